// src/core/private_address.h — which addresses the internet does not reach. No LibTorch.

#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>

namespace tessera::core {

/// Whether an IPv4 address, in this machine's byte order, is of this host alone or of a network
/// that the internet does not reach: loopback, link-local, private (RFC 1918) or shared (RFC 6598).
inline bool is_private_v4(std::uint32_t address) {
  const std::uint32_t first = address >> 24;
  return first == 127 || first == 10 || (address >> 20) == 0xac1 || (address >> 16) == 0xc0a8 ||
         (address >> 16) == 0xa9fe || (address >> 22) == (100U << 2 | 1);
}

/// The same of any address; private for IPv6 is RFC 4193.
inline bool is_private(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    return is_private_v4(ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr));
  }
  if (address.sa_family != AF_INET6) return false;
  const in6_addr& place = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  std::uint32_t last = 0;
  std::memcpy(&last, place.s6_addr + 12, sizeof(last));
  return IN6_IS_ADDR_LOOPBACK(&place) || IN6_IS_ADDR_LINKLOCAL(&place) ||
         (place.s6_addr[0] & 0xfe) == 0xfc ||
         (IN6_IS_ADDR_V4MAPPED(&place) && is_private_v4(ntohl(last)));
}

}  // namespace tessera::core
