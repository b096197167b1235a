// launch/channel.h — one connection between two launchers.
//
// Both sides prove that they know the job's secret before a message is sent or read. Messages are
// JSON objects of strings, one in a frame. Lengths are bounded, silence is noticed.

#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "core/handshake.h"
#include "event_loop.h"
#include "file_descriptor.h"

namespace tessera::launch {

struct Message {
  std::string kind;
  std::map<std::string, std::string> fields;

  /// Returns a field, empty if it is absent.
  const std::string& text(const std::string& name) const;
  /// Returns a field as a number, -1 if it is absent or not one.
  int number(const std::string& name) const;
};

class Channel {
 public:
  struct Events {
    std::function<void()> on_proven;  // the peer knows the secret
    std::function<void(const Message&)> on_message;
    std::function<void(const std::string& why)> on_closed;  // at most once; not after close()
  };

  /// Takes a connected, non-blocking socket and begins the handshake.
  Channel(EventLoop& loop, FileDescriptor socket, core::Handshake handshake, Events events);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  /// Only once the peer has proven itself.
  void send(const Message& message);

  /// From now on accepts long messages, sends a sign of life every few seconds and expects one.
  void trust();

  core::Handshake::State state() const noexcept { return handshake_.state(); }
  bool has_unsent() const noexcept { return !unsent_.empty(); }
  bool is_open() const noexcept { return socket_.is_open(); }
  void close();

 private:
  void on_ready(short events);
  void read_some();
  void write_some();
  void shake_hands();
  void serve_frames();
  void serve(const std::string& text);
  void update_watch();
  void beat();
  void fail(const std::string& why);

  EventLoop& loop_;
  FileDescriptor socket_;
  core::Handshake handshake_;
  std::optional<core::FrameWriter> writer_;  // both once proven
  std::optional<core::FrameReader> reader_;
  Events events_;
  size_t longest_;
  std::string received_;
  std::string unsent_;
  Clock::time_point last_received_;
  EventLoop::TimerId beat_timer_ = 0;
};

}  // namespace tessera::launch
