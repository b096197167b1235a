// src/comm/shm/handover.h — lines between processes of one user on one host, over which a segment
// is handed from one to the other.
//
// Note [Who is at the other end]
// A line is a Unix socket under an unguessable abstract name. Other users may learn the name, from
// the store or from the kernel's tables, and may listen or connect themselves. So neither end
// believes a byte before the kernel has said that the process at the other end belongs to the same
// user: whoever connects asks for the one who listens, whoever accepts for the one who connects.

#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "comm/transport.h"

namespace tessera::comm::shm {

/// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();
  int get() const noexcept { return number_; }
  int release() noexcept { return std::exchange(number_, -1); }

 private:
  int number_;
};

/// One message: a text, and perhaps a file.
struct Delivery {
  std::string text;
  Descriptor file{};
};

/// One end of a line. Nothing waits.
class Line {
 public:
  /// Connects to the listener `name`; nothing if it has no room at the moment. Throws
  /// Failure(kAborted) if it belongs to another user, Failure(kUnavailable) if there is none.
  static std::optional<Line> connect(const std::string& name);

  /// False if the other end is gone.
  bool send(const std::string& text, int file = -1) noexcept;
  /// Nothing if no message has come. `has_ended` is then whether none will come any more.
  std::optional<Delivery> receive();
  bool has_ended() const noexcept { return has_ended_; }
  int socket() const noexcept { return socket_.get(); }

 private:
  friend class Listener;
  explicit Line(Descriptor socket) : socket_(std::move(socket)) {}
  Descriptor socket_;
  bool has_ended_ = false;
};

class Listener {
 public:
  /// Throws Failure(kUnavailable) if the system gives no socket.
  Listener();
  /// What others connect to: 32 hexadecimal digits.
  const std::string& name() const noexcept { return name_; }
  int socket() const noexcept { return socket_.get(); }
  /// The next line from a process of this user, if one has come. Those of others are closed.
  std::optional<Line> accept();

 private:
  std::string name_;
  Descriptor socket_;
};

/// Whether `name` can be a listener's.
bool is_listener_name(const std::string& name) noexcept;

}  // namespace tessera::comm::shm
