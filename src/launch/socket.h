// launch/socket.h — TCP sockets bound to one named address, never to all of them.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <sys/socket.h>

#include "file_descriptor.h"
#include "tessera/launch/options.h"

namespace tessera::launch {

/// A numeric address and port, ready for bind and connect.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  std::string host() const;  // numeric
  uint16_t port() const;
  void set_port(uint16_t port);
  bool is_loopback() const;
  bool is_wildcard() const;
  std::string text() const;
};

/// Resolves a host name or address. Throws LaunchError (rendezvous) if that is not possible.
SocketAddress resolve(const Endpoint& endpoint);

/// A numeric address as text; an IPv4 address in IPv6's form is given its own.
std::string plain_host(const std::string& host);

/// The addresses of this host's interfaces that other hosts may see, at most 32.
std::vector<std::string> own_hosts();

/// A listening socket and the address it got.
struct Listener {
  FileDescriptor fd;
  SocketAddress address;
};

/// Binds to exactly this address and listens. Throws LaunchError (rendezvous) if the port is taken,
/// the address is not one of this host, or it is a wildcard.
Listener listen_on(const SocketAddress& address);

/// How launchers reach each other: TCP, or what a simulator puts in its place. Descriptors can be
/// polled, and do not block.
class Wire {
 public:
  Wire() = default;
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  virtual ~Wire() = default;

  /// As listen_on.
  virtual Listener listen(const SocketAddress& address);
  /// A connection that waits at `listener`, and from where; none and errno if there is none.
  virtual FileDescriptor accept(int listener, std::string& host);
  /// Begins to connect; none and errno if that failed at once.
  virtual FileDescriptor connect(const SocketAddress& address);
  /// Once it can be written to: 0 if the connection stands, else the error.
  virtual int outcome(int socket);
  /// As own_hosts.
  virtual std::vector<std::string> hosts();
};

/// Listens on a Unix socket at `path`, for this user alone. Throws LaunchError (internal).
FileDescriptor listen_on_path(const std::string& path);
/// Whether a Unix socket can have this path.
bool fits_socket(const std::string& path);

}  // namespace tessera::launch
