// src/comm/gloo/gloo_sockets.h — finds the connections that Gloo has opened, which it shows to
// nobody.

#pragma once

#include <cstdint>
#include <set>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::comm {

/// Made before Gloo connects.
class GlooSockets {
 public:
  GlooSockets();

  /// Has forked children let go of what Gloo has opened at `address` since: as long as they kept
  /// its connections, nobody would notice that this rank has died. Collective over the ranks, which
  /// tell each other on `store` where their Gloo listens; so no other socket is mistaken for one.
  void keep_from_children(c10d::Store& store, int rank, int size, const std::string& address) const;

 private:
  std::set<std::uint64_t> before_;
};

}  // namespace tessera::comm
