// src/serving/listener.h — an address that takes connections.

#pragma once

#include <string>

namespace tessera::serving {

class Listener {
 public:
  /// Listens on `host`, a numeric address or "unix:PATH", and `port` (0: a free one). A Unix socket
  /// is for its user alone; one that nobody listens on any more is replaced. Throws
  /// std::system_error naming the address.
  Listener(const std::string& host, int port);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener();

  int fd() const noexcept { return fd_; }
  int port() const noexcept { return port_; }  // 0: a Unix socket
  bool is_unix() const noexcept { return !path_.empty(); }

 private:
  void open_unix(const std::string& path);
  void open_tcp(const std::string& host, int port);
  [[noreturn]] void fail(const std::string& where);

  int fd_ = -1;
  int port_ = 0;
  int owner_ = 0;  // the process that removes the path
  std::string path_;
};

}  // namespace tessera::serving
