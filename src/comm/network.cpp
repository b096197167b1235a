#include "comm/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

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

}  // namespace

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

int listen_on(const std::string& address, std::uint16_t port) {
  const auto list = resolve(address, SOCK_STREAM);
  int error = 0;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    const int descriptor = ::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
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

}  // namespace tessera::comm
