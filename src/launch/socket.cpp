#include "socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {
namespace {

const sockaddr_in& v4(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}

const sockaddr_in6& v6(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

std::string remedy_for(int error, const SocketAddress& address) {
  if (error == EADDRINUSE) {
    return "choose another port, or see who has it: ss -ltnp 'sport = :" +
           std::to_string(address.port()) + "'";
  }
  if (error == EADDRNOTAVAIL) {
    return "node 0 must run on the host that owns this address; list them with: ip address";
  }
  return "choose another --rdzv-endpoint";
}

}  // namespace

std::string SocketAddress::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  if (storage.ss_family == AF_INET6) {
    inet_ntop(AF_INET6, &v6(*this).sin6_addr, text, sizeof(text));
  } else {
    inet_ntop(AF_INET, &v4(*this).sin_addr, text, sizeof(text));
  }
  return text;
}

uint16_t SocketAddress::port() const {
  return ntohs(storage.ss_family == AF_INET6 ? v6(*this).sin6_port : v4(*this).sin_port);
}

void SocketAddress::set_port(uint16_t port) {
  if (storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  }
}

bool SocketAddress::is_loopback() const {
  if (storage.ss_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&v6(*this).sin6_addr) != 0;
  return (ntohl(v4(*this).sin_addr.s_addr) >> 24) == 127;
}

bool SocketAddress::is_wildcard() const {
  if (storage.ss_family == AF_INET6) return IN6_IS_ADDR_UNSPECIFIED(&v6(*this).sin6_addr) != 0;
  return v4(*this).sin_addr.s_addr == htonl(INADDR_ANY);
}

std::string SocketAddress::text() const { return Endpoint{host(), port()}.text(); }

std::string plain_host(const std::string& host) {
  constexpr std::string_view kMapped = "::ffff:";
  const bool is_v4 = host.starts_with(kMapped) && host.find('.') != std::string::npos;
  return is_v4 ? host.substr(kMapped.size()) : host;
}

std::vector<std::string> own_hosts() {
  constexpr size_t kMost = 32;  // they are said in a hello, which is short
  std::vector<std::string> hosts;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return hosts;
  for (const ifaddrs* entry = list; entry != nullptr && hosts.size() < kMost;
       entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    SocketAddress address;
    address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.storage, entry->ifa_addr, address.length);
    if (!address.is_loopback()) hosts.push_back(address.host());
  }
  freeifaddrs(list);
  return hosts;
}

SocketAddress resolve(const Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(endpoint.port);
  const int status = getaddrinfo(endpoint.host.c_str(), port.c_str(), &hints, &found);
  if (status != 0 || found == nullptr) {
    if (status == EAI_SYSTEM) {
      // Not the name's fault: no descriptor is left, as a rule.
      throw LaunchError(kExitInternal, "rendezvous: cannot look up '" + endpoint.host + "'",
                        std::strerror(errno), "raise the limit of open files: ulimit -n 65536");
    }
    throw LaunchError(kExitRendezvous, "rendezvous: the host '" + endpoint.host + "' is not known",
                      gai_strerror(status), "write an address, as in 10.0.0.1:29500");
  }
  // IPv4 first: it is what a name of this host usually means, and what the ranks try.
  const addrinfo* chosen = found;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET) {
      chosen = entry;
      break;
    }
  }
  SocketAddress address;
  std::memcpy(&address.storage, chosen->ai_addr, chosen->ai_addrlen);
  address.length = chosen->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

Listener listen_on(const SocketAddress& address) {
  if (address.is_wildcard()) {
    throw LaunchError(kExitRendezvous,
                      "rendezvous: " + address.text() + " would listen on every interface",
                      "anyone who reaches such a port can read and change the job's store",
                      "name the address of the interface the other hosts use");
  }
  Listener listener;
  listener.fd = FileDescriptor(
      socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int fd = listener.fd.get();
  const int yes = 1;
  // Lets a restarted job take the port of its predecessor; two listeners stay impossible.
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  const auto* raw = reinterpret_cast<const sockaddr*>(&address.storage);
  if (fd < 0 || bind(fd, raw, address.length) != 0 || listen(fd, SOMAXCONN) != 0) {
    const int error = errno;
    throw LaunchError(kExitRendezvous, "rendezvous: cannot listen on " + address.text(),
                      std::strerror(error), remedy_for(error, address));
  }
  listener.address.length = sizeof(listener.address.storage);
  getsockname(fd, reinterpret_cast<sockaddr*>(&listener.address.storage), &listener.address.length);
  return listener;
}

Listener Wire::listen(const SocketAddress& address) { return listen_on(address); }

FileDescriptor Wire::accept(int listener, std::string& host) {
  SocketAddress peer;
  peer.length = sizeof(peer.storage);
  FileDescriptor socket(accept4(listener, reinterpret_cast<sockaddr*>(&peer.storage), &peer.length,
                                SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket.is_open()) host = peer.host();
  return socket;
}

FileDescriptor Wire::connect(const SocketAddress& address) {
  FileDescriptor connecting(
      socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto* raw = reinterpret_cast<const sockaddr*>(&address.storage);
  if (::connect(connecting.get(), raw, address.length) == 0 || errno == EINPROGRESS) {
    return connecting;
  }
  const int error = errno;
  connecting.reset();
  errno = error;
  return connecting;
}

int Wire::outcome(int socket) {
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

std::vector<std::string> Wire::hosts() { return own_hosts(); }

bool fits_socket(const std::string& path) { return path.size() < sizeof(sockaddr_un::sun_path); }

FileDescriptor listen_on_path(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  FileDescriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const mode_t before = umask(0177);
  const bool is_bound =
      listener.is_open() &&
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  umask(before);
  if (!is_bound || listen(listener.get(), SOMAXCONN) != 0) {
    throw LaunchError(kExitInternal, "run: cannot listen at " + path, std::strerror(errno),
                      "set TMPDIR to a folder on a local disk");
  }
  return listener;
}

}  // namespace tessera::launch
