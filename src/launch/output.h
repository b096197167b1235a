// launch/output.h — many ranks, one terminal: whole lines, each with its rank.

#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "event_loop.h"
#include "file_descriptor.h"

namespace tessera::launch {

class RankStream;

/// The launcher's stdout or stderr. Never blocks: what the reader does not take waits in a queue,
/// and while the queue is long the ranks' pipes are left unread, so that they wait instead.
class Console {
 public:
  /// Consoles that show on the same terminal or pipe must share `line`, so that a line begun by
  /// one is ended before the other writes.
  struct OpenLine {
    const RankStream* owner = nullptr;
    Console* console = nullptr;
  };

  /// Returns the line of `fd`'s console, `line`, if `other` shows in the same place, else a new
  /// one.
  static std::shared_ptr<OpenLine> line_shared_by(int fd, int other,
                                                  const std::shared_ptr<OpenLine>& line);

  Console(EventLoop& loop, int fd, std::shared_ptr<OpenLine> line);
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  ~Console();

  /// Queues whole lines of the launcher itself.
  void print(std::string_view text);

  /// Writes what is queued, as much as the reader takes now.
  void flush();

  bool is_empty() const noexcept { return begin_ == queue_.size(); }
  bool is_full() const noexcept { return queue_.size() - begin_ > kHighWater; }
  bool is_closed() const noexcept { return is_closed_; }
  bool is_terminal() const noexcept { return is_terminal_; }
  bool use_color() const noexcept { return use_color_; }
  /// Columns of the terminal; 100 where there is none, or a very narrow one.
  int width() const noexcept;

 private:
  friend class RankStream;
  static constexpr size_t kHighWater = 4 << 20;

  // Ends the line another stream has begun. Returns whether `stream` continues its own.
  bool continue_line(const RankStream* stream);
  void subscribe(RankStream* stream) { streams_.push_back(stream); }
  void unsubscribe(const RankStream* stream);
  ssize_t write_some(const char* data, size_t size);

  EventLoop& loop_;
  int fd_;
  FileDescriptor reopened_;  // the same file with a non-blocking flag of its own
  bool is_socket_ = false;
  bool is_regular_ = false;
  bool is_terminal_ = false;
  bool use_color_ = false;
  bool is_closed_ = false;
  bool is_watched_ = false;
  bool is_paused_ = false;
  std::shared_ptr<OpenLine> line_;
  std::string queue_;
  size_t begin_ = 0;
  std::vector<RankStream*> streams_;
};

/// Reads one output stream of one rank; writes it to the console, to a file, or both.
class RankStream {
 public:
  /// Takes the reading end of a pipe. `console` may be null (file only) and `log` closed (console
  /// only).
  RankStream(EventLoop& loop, FileDescriptor pipe, Console* console, FileDescriptor log,
             std::string prefix);
  RankStream(const RankStream&) = delete;
  RankStream& operator=(const RankStream&) = delete;
  ~RankStream();

  /// Reads what is in the pipe now, without waiting.
  void drain();

  /// Reads what is left, ends the last line and closes the pipe.
  void finish();

  /// Returns the end of what was written, at most 2 KiB.
  const std::string& tail() const noexcept { return tail_; }
  bool was_shown() const noexcept { return was_shown_; }

 private:
  friend class Console;

  bool read_once();
  void take(std::string_view data);
  void show(std::string_view data);
  void append_lines(std::string_view lines, bool continues);
  void flush_partial();
  void flush_stale_partial();
  void resume();
  void pause();

  EventLoop& loop_;
  FileDescriptor pipe_;
  Console* console_;
  const bool was_shown_;
  FileDescriptor log_;
  std::string prefix_;
  std::string partial_;  // a line whose end has not come yet
  std::string tail_;
  Clock::time_point partial_since_;
  EventLoop::TimerId flush_timer_ = 0;
};

}  // namespace tessera::launch
