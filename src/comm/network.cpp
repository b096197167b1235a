#include "comm/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <system_error>

#include "core/own_files.h"
#include "core/private_address.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const std::string& host, int socket_type) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = socket_type;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (error == EAI_SYSTEM) {
    throw Error(ErrorKind::kUnavailable, {},
                "comm.init: cannot look up '" + host + "': " + std::strerror(errno) +
                    ". If too many files are open, raise the limit: ulimit -n 65536.");
  }
  if (error != 0) {
    throw Error(
        ErrorKind::kRendezvous, {},
        "comm.init: MASTER_ADDR '" + host + "' has no address: " + ::gai_strerror(error) + ".");
  }
  return {list, &::freeaddrinfo};
}

void set_port(sockaddr* address, std::uint16_t port) {
  if (address->sa_family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = htons(port);
  }
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  return ::getnameinfo(address, length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0 ? host
                                                                                             : "";
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, &::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || name != entry->ifa_name) continue;
    if (entry->ifa_addr->sa_family == AF_INET) return numeric(entry->ifa_addr, sizeof(sockaddr_in));
  }
  return "";
}

// A listening socket, or -1 and the reason.
int try_to_listen(const std::string& address, std::uint16_t port, int flags, int& error) {
  const auto list = resolve(address, SOCK_STREAM);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    const int descriptor = ::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    if (descriptor < 0) {
      error = errno;
      continue;
    }
    const int on = 1;
    ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    set_port(entry->ai_addr, port);
    if (::bind(descriptor, entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::listen(descriptor, 1024) == 0) {
      return descriptor;
    }
    error = errno;
    ::close(descriptor);
  }
  return -1;
}

// 0 once the connection that `socket` is making stands, else the reason why it does not.
int await_connection(int socket, std::chrono::steady_clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return ETIMEDOUT;
    pollfd request{.fd = socket, .events = POLLOUT, .revents = 0};
    constexpr long kHour = 3600 * 1000;
    const int ready = ::poll(&request, 1, static_cast<int>(std::min(kHour, left.count())));
    if (ready < 0 && errno != EINTR) return errno;
    if (ready <= 0) continue;
    int error = 0;
    socklen_t length = sizeof(error);
    ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length);
    return error;
  }
}

}  // namespace

Socket::Socket(int descriptor) noexcept : descriptor_(descriptor) {
  core::keep_from_children(descriptor);
}

Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::string address_towards_peers() {
  for (const char* variable : {"TESSERA_INTERFACE", "GLOO_SOCKET_IFNAME"}) {
    const char* name = std::getenv(variable);
    if (name == nullptr || *name == '\0') continue;
    const std::string address = address_of_interface(name);
    TESSERA_CHECK_VALUE(!address.empty(), "comm.init: ", variable, " names interface '", name,
                        "', which has no IPv4 address on this host.");
    return address;
  }
  const char* master = std::getenv("MASTER_ADDR");
  TESSERA_CHECK_VALUE(master != nullptr && *master != '\0',
                      "comm.init: the ranks sit on several hosts, and MASTER_ADDR is not set. Set "
                      "it, or name the network interface in TESSERA_INTERFACE.");
  // Connecting a datagram socket sends nothing; it only asks the kernel for the route.
  const auto list = resolve(master, SOCK_DGRAM);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    const int descriptor = ::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (descriptor < 0) continue;
    set_port(entry->ai_addr, 9);
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    std::string address;
    if (::connect(descriptor, entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
      address = numeric(reinterpret_cast<sockaddr*>(&own), length);
    }
    ::close(descriptor);
    if (!address.empty()) return address;
  }
  TESSERA_CHECK_VALUE(false, "comm.init: this host has no route to MASTER_ADDR '", master,
                      "'. Name the network interface in TESSERA_INTERFACE.");
}

bool is_private(const std::string& host) {
  const auto list = resolve(host, SOCK_STREAM);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    if (!core::is_private(*entry->ai_addr)) return false;
  }
  return true;
}

int listen_on(const std::string& address, std::uint16_t port) {
  int error = 0;
  const int descriptor = try_to_listen(address, port, 0, error);
  if (descriptor >= 0) return descriptor;
  const std::string place = address + ":" + std::to_string(port);
  if (error == EADDRINUSE) {
    throw Error(ErrorKind::kRendezvous, {},
                "comm.init: port " + std::to_string(port) + " of " + address +
                    " is in use, perhaps by another job. Choose "
                    "another MASTER_PORT.");
  }
  throw Error(ErrorKind::kRendezvous, {},
              "comm.init: rank 0 cannot listen on " + place + ": " + std::strerror(error) +
                  ". MASTER_ADDR must be an address of rank 0's host.");
}

Socket listen_on_free_port(const std::string& address) {
  int error = 0;
  Socket socket(try_to_listen(address, 0, SOCK_NONBLOCK, error));
  if (socket) return socket;
  throw Error(ErrorKind::kRendezvous, {},
              "comm.init: this rank cannot listen on " + address + ": " + std::strerror(error) +
                  ". Name the network interface towards the other ranks in TESSERA_INTERFACE.");
}

std::uint16_t port_of(const Socket& socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0) return 0;
  return ntohs(own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&own)->sin_port
                                        : reinterpret_cast<sockaddr_in6*>(&own)->sin6_port);
}

Socket connect_to(const std::string& address, std::uint16_t port,
                  std::chrono::steady_clock::time_point deadline) {
  const auto list = resolve(address, SOCK_STREAM);
  int error = 0;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    Socket socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) {
      error = errno;
      continue;
    }
    set_port(entry->ai_addr, port);
    error = ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS || error == EINTR) error = await_connection(socket.get(), deadline);
    if (error != 0) continue;
    send_without_delay(socket);
    return socket;
  }
  throw Error(ErrorKind::kRendezvous, {},
              "comm.init: no connection to " + address + ":" + std::to_string(port) + ": " +
                  std::strerror(error) + ".");
}

void send_without_delay(const Socket& socket) noexcept {
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void make_room_for_files(std::size_t needed, const std::string& what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  std::size_t open_files = 0;
  std::error_code problem;
  for (auto entry = std::filesystem::directory_iterator("/proc/self/fd", problem);
       entry != std::filesystem::directory_iterator(); entry.increment(problem)) {
    ++open_files;
  }
  // Not even one for the look.
  if (problem == std::errc::too_many_files_open) open_files = limit.rlim_cur;
  if (open_files + needed <= limit.rlim_cur) return;
  limit.rlim_cur = limit.rlim_max;
  if (open_files + needed <= limit.rlim_max && ::setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
  throw Error(ErrorKind::kUnavailable, {},
              "comm.init: " + what + " needs about " + std::to_string(needed) +
                  " more open files, " + std::to_string(open_files) + " are open already, and " +
                  std::to_string(limit.rlim_max) +
                  " is the limit of this process. Raise it: ulimit -Hn, or LimitNOFILE.");
}

std::optional<core::Secret> job_secret() {
  try {
    return core::Secret::from_environment();
  } catch (const core::SecretError& error) {
    TESSERA_CHECK_VALUE(false, "comm.init: ", error.what(), ".");
  }
}

std::string random_token() {
  std::array<std::uint64_t, 2> words{};
  if (::getrandom(words.data(), sizeof(words), 0) != sizeof(words)) return "";
  std::ostringstream text;
  text << std::hex << words[0] << words[1];
  return text.str();
}

}  // namespace tessera::comm
