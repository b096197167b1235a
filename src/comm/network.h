// src/comm/network.h — addresses of this host, as far as a group needs them.

#pragma once

#include <cstdint>
#include <string>

namespace tessera::comm {

/// The address by which ranks on other hosts reach this one: that of the interface named by
/// TESSERA_INTERFACE or GLOO_SOCKET_IFNAME, else the one this host uses towards MASTER_ADDR.
/// Throws ValueError if neither leads to an address.
std::string address_towards_peers();

/// A listening socket bound to `address` (a name or number) and `port`, and to nothing else.
/// Throws Error(kRendezvous) saying so if the port is in use or the address is not of this host.
int listen_on(const std::string& address, std::uint16_t port);

}  // namespace tessera::comm
