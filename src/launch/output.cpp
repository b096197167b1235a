#include "output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace tessera::launch {
namespace {

constexpr size_t kReadBytes = 256 << 10;  // what the enlarged pipe holds
constexpr size_t kTailBytes = 2 << 10;
constexpr size_t kLongestLine = 1 << 20;  // longer lines are shown in pieces
// A line without an end (a prompt, a progress bar) is shown after this pause.
constexpr std::chrono::milliseconds kPartialDelay{100};

}  // namespace

std::shared_ptr<Console::OpenLine> Console::line_shared_by(int fd, int other,
                                                           const std::shared_ptr<OpenLine>& line) {
  struct stat first{};
  struct stat second{};
  const bool is_same = fstat(fd, &first) == 0 && fstat(other, &second) == 0 &&
                       first.st_dev == second.st_dev && first.st_ino == second.st_ino;
  return is_same ? line : std::make_shared<OpenLine>();
}

int Console::width() const noexcept {
  winsize size{};
  return ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40 ? size.ws_col : 100;
}

Console::Console(EventLoop& loop, int fd, std::shared_ptr<OpenLine> line)
    : loop_(loop), fd_(fd), line_(std::move(line)) {
  struct stat status{};
  if (fstat(fd, &status) != 0) {
    is_closed_ = true;
    return;
  }
  is_socket_ = S_ISSOCK(status.st_mode);
  is_regular_ = S_ISREG(status.st_mode);
  is_terminal_ = isatty(fd) == 1;
  const char* no_color = std::getenv("NO_COLOR");
  use_color_ = is_terminal_ && (no_color == nullptr || *no_color == '\0');
  // The flag of the given descriptor is shared with the shell and others, so it is not touched.
  if (S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode)) {
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    reopened_ = FileDescriptor(open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  }
}

Console::~Console() {
  if (is_watched_) loop_.unwatch(reopened_.is_open() ? reopened_.get() : fd_);
}

ssize_t Console::write_some(const char* data, size_t size) {
  if (reopened_.is_open()) return write(reopened_.get(), data, size);
  if (is_regular_) return write(fd_, data, size);
  if (is_socket_) return send(fd_, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  // Cannot be made non-blocking: a ready pipe takes PIPE_BUF bytes without waiting.
  pollfd file{fd_, POLLOUT, 0};
  if (poll(&file, 1, 0) <= 0) {
    errno = EAGAIN;
    return -1;
  }
  return write(fd_, data, std::min<size_t>(size, PIPE_BUF));
}

void Console::flush() {
  const int watched_fd = reopened_.is_open() ? reopened_.get() : fd_;
  while (!is_closed_ && !is_empty()) {
    const ssize_t written = write_some(queue_.data() + begin_, queue_.size() - begin_);
    if (written > 0) {
      begin_ += static_cast<size_t>(written);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      is_closed_ = true;  // the reader is gone
    }
  }
  if (is_closed_) begin_ = queue_.size();
  if (is_empty()) {
    queue_.clear();
    begin_ = 0;
  } else if (begin_ > kHighWater) {
    queue_.erase(0, begin_);
    begin_ = 0;
  }
  if (is_watched_ != !is_empty()) {
    is_watched_ = !is_empty();
    if (is_watched_) {
      loop_.watch(watched_fd, POLLOUT, [this](short) { flush(); });
    } else {
      loop_.unwatch(watched_fd);
    }
  }
  if (is_closed_) {
    // Ranks whose output nobody keeps learn of it as if they had held the closed pipe themselves.
    for (RankStream* stream : streams_) {
      if (stream->log_.is_open()) continue;
      stream->pause();
      stream->pipe_.reset();
    }
  } else if (is_full() != is_paused_) {
    is_paused_ = is_full();
    for (RankStream* stream : streams_) is_paused_ ? stream->pause() : stream->resume();
  }
}

bool Console::continue_line(const RankStream* stream) {
  if (line_->owner == nullptr) return false;
  if (line_->owner == stream && line_->console == this) return true;
  line_->console->queue_ += '\n';
  if (line_->console != this) line_->console->flush();
  *line_ = {};
  return false;
}

void Console::print(std::string_view text) {
  continue_line(nullptr);
  queue_.append(text);
  flush();
}

void Console::unsubscribe(const RankStream* stream) {
  streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
}

RankStream::RankStream(EventLoop& loop, FileDescriptor pipe, Console* console, FileDescriptor log,
                       std::string prefix)
    : loop_(loop),
      pipe_(std::move(pipe)),
      console_(console),
      was_shown_(console != nullptr),
      log_(std::move(log)),
      prefix_(std::move(prefix)) {
  fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
  fcntl(pipe_.get(), F_SETPIPE_SZ, kReadBytes);  // smaller is fine too
  if (console_ != nullptr) console_->subscribe(this);
  if (console_ == nullptr || !console_->is_full()) resume();
}

RankStream::~RankStream() { finish(); }

void RankStream::resume() {
  if (pipe_.is_open()) loop_.watch(pipe_.get(), POLLIN, [this](short) { read_once(); });
}

void RankStream::pause() {
  if (pipe_.is_open()) loop_.unwatch(pipe_.get());
}

bool RankStream::read_once() {
  if (!pipe_.is_open()) return false;
  static char buffer[kReadBytes];
  const ssize_t size = read(pipe_.get(), buffer, sizeof(buffer));
  if (size > 0) {
    take({buffer, static_cast<size_t>(size)});
    return true;
  }
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  flush_partial();
  pause();
  pipe_.reset();
  return false;
}

void RankStream::drain() {
  // Bounded: a process that outlives its rank may write for ever.
  for (int i = 0; i < 64 && read_once(); ++i) {
  }
}

void RankStream::finish() {
  drain();
  pause();
  pipe_.reset();
  if (console_ != nullptr) {
    flush_partial();
    if (console_->line_->owner == this) {
      if (!prefix_.empty()) console_->queue_ += '\n';
      *console_->line_ = {};
    }
    console_->unsubscribe(this);
    console_->flush();
    console_ = nullptr;
  }
  loop_.cancel(flush_timer_);
}

void RankStream::take(std::string_view data) {
  const std::string_view end = data.substr(data.size() - std::min(data.size(), kTailBytes));
  if (tail_.size() + end.size() > kTailBytes) {
    tail_.erase(0, tail_.size() + end.size() - kTailBytes);
  }
  tail_.append(end);
  for (std::string_view rest = data; log_.is_open() && !rest.empty();) {
    const ssize_t written = write(log_.get(), rest.data(), rest.size());
    if (written > 0) {
      rest.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      const std::string why = std::strerror(errno);
      log_.reset();
      if (console_ != nullptr) {
        console_->print("tessera: warning: a log file cannot be written (" + why +
                        "); this stream is on the console only\n");
      }
    }
  }
  if (console_ != nullptr && !console_->is_closed()) show(data);
}

void RankStream::show(std::string_view data) {
  const void* last = memrchr(data.data(), '\n', data.size());
  if (last != nullptr) {
    const size_t length = static_cast<size_t>(static_cast<const char*>(last) - data.data()) + 1;
    bool continues = console_->continue_line(this);
    if (!partial_.empty()) {
      if (!continues) console_->queue_ += prefix_;
      console_->queue_ += partial_;
      partial_.clear();
      continues = true;
    }
    append_lines(data.substr(0, length), continues);
    *console_->line_ = {};
    data.remove_prefix(length);
  }
  if (partial_.empty()) partial_since_ = Clock::now();
  partial_.append(data);
  if (partial_.size() > kLongestLine) {
    flush_partial();
  } else if (!partial_.empty() && flush_timer_ == 0) {
    flush_timer_ = loop_.after(kPartialDelay, [this] { flush_stale_partial(); });
  }
  console_->flush();
}

void RankStream::flush_stale_partial() {
  flush_timer_ = 0;
  // A line is late only if its rest is not in the pipe already, unread because of a slow console.
  if (console_ == nullptr || console_->is_full()) {
    partial_since_ = Clock::now();
  } else {
    read_once();
  }
  if (partial_.empty() || flush_timer_ != 0) return;
  const auto age = Clock::now() - partial_since_;
  if (age >= kPartialDelay) {
    flush_partial();
  } else {
    flush_timer_ = loop_.after(kPartialDelay - age, [this] { flush_stale_partial(); });
  }
}

void RankStream::append_lines(std::string_view lines, bool continues) {
  std::string& queue = console_->queue_;
  if (prefix_.empty()) {
    queue.append(lines);
    return;
  }
  while (!lines.empty()) {
    const void* end = std::memchr(lines.data(), '\n', lines.size());
    const size_t length = static_cast<size_t>(static_cast<const char*>(end) - lines.data()) + 1;
    if (!continues) queue += prefix_;
    continues = false;
    queue.append(lines.substr(0, length));
    lines.remove_prefix(length);
  }
}

void RankStream::flush_partial() {
  if (partial_.empty() || console_ == nullptr) return;
  if (!console_->continue_line(this)) console_->queue_ += prefix_;
  console_->queue_ += partial_;
  partial_.clear();
  *console_->line_ = {this, console_};
  console_->flush();
}

}  // namespace tessera::launch
