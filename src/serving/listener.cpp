#include "serving/listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <system_error>

namespace tessera::serving {
namespace {

constexpr std::string_view kUnix = "unix:";

// Whether somebody takes connections there.
bool is_alive(const sockaddr_un& address) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return true;
  const bool is_taken =
      ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno != ECONNREFUSED;
  ::close(fd);
  return is_taken;
}

}  // namespace

Listener::Listener(const std::string& host, int port) : owner_(::getpid()) {
  if (host.starts_with(kUnix)) {
    open_unix(host.substr(kUnix.size()));
  } else {
    open_tcp(host, port);
  }
}

Listener::~Listener() {
  if (fd_ >= 0) ::close(fd_);
  if (!path_.empty() && owner_ == ::getpid()) ::unlink(path_.c_str());
}

void Listener::fail(const std::string& where) {
  const int code = errno;
  if (fd_ >= 0) ::close(fd_);
  throw std::system_error(code, std::generic_category(), "serve: " + where);
}

void Listener::open_unix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    fail(std::string(kUnix) + path);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  struct stat facts{};
  if (::lstat(path.c_str(), &facts) == 0 && S_ISSOCK(facts.st_mode) && !is_alive(address)) {
    ::unlink(path.c_str());
  }
  fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) fail(path);
  const mode_t mask = ::umask(0177);
  const int result = ::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  ::umask(mask);
  if (result != 0 || ::listen(fd_, SOMAXCONN) != 0) fail(std::string(kUnix) + path);
  path_ = path;
}

void Listener::open_tcp(const std::string& host, int port) {
  const std::string where = host + ":" + std::to_string(port);
  sockaddr_storage address{};
  socklen_t size = 0;
  auto* four = reinterpret_cast<sockaddr_in*>(&address);
  auto* six = reinterpret_cast<sockaddr_in6*>(&address);
  if (::inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof(sockaddr_in);
  } else if (::inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof(sockaddr_in6);
  } else {
    errno = EINVAL;
    fail(where + " is not an address in numbers");
  }
  fd_ = ::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) fail(where);
  const int yes = 1;
  ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (::bind(fd_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(fd_, SOMAXCONN) != 0 ||
      ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    fail(where);
  }
  port_ = ntohs(address.ss_family == AF_INET ? four->sin_port : six->sin6_port);
}

}  // namespace tessera::serving
