// src/comm/network.h — addresses of this host, as far as a group needs them.

#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/secret.h"

namespace tessera::comm {

/// Owns a descriptor; -1 is none. Children that are forked do not have it.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) noexcept;
  ~Socket();
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int get() const noexcept { return descriptor_; }
  explicit operator bool() const noexcept { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

/// The address by which ranks on other hosts reach this one: that of the interface named by
/// TESSERA_INTERFACE or GLOO_SOCKET_IFNAME, else the one this host uses towards MASTER_ADDR.
/// Throws ValueError if neither leads to an address.
std::string address_towards_peers();

/// Whether `host` (a name or number) is this host alone or an address of a network that the
/// internet does not reach: loopback, link-local, private (RFC 1918, RFC 4193) or shared (RFC
/// 6598). Throws Error(kRendezvous) if it has no address.
bool is_private(const std::string& host);

/// A listening socket bound to `address` (a name or number) and `port`, and to nothing else.
/// Throws Error(kRendezvous) saying so if the port is in use or the address is not of this host.
int listen_on(const std::string& address, std::uint16_t port);

/// As listen_on, on a port that is free; does not block in accept. Throws Error(kRendezvous) if the
/// address is not of this host.
Socket listen_on_free_port(const std::string& address);
/// The port a socket is bound to.
std::uint16_t port_of(const Socket& socket);

/// A connection to `address` and `port` that sends at once and does not block. Throws
/// Error(kRendezvous) with the reason if there is none at the deadline.
Socket connect_to(const std::string& address, std::uint16_t port,
                  std::chrono::steady_clock::time_point deadline);
/// Has `socket` send at once what it is given.
void send_without_delay(const Socket& socket) noexcept;

/// Sees to it that `needed` more files can be opened, and raises this process's soft limit for that
/// if the hard one allows it. Throws Error(kUnavailable) with the numbers if it does not; `what`
/// says who needs them.
void make_room_for_files(std::size_t needed, const std::string& what);

/// The secret of the job, if it has one: see core/secret.h. Throws ValueError if it cannot be used.
std::optional<core::Secret> job_secret();

/// A word that nobody outside the group can guess, of at most 32 letters.
std::string random_token();

}  // namespace tessera::comm
