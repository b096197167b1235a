// src/comm/store/session.h — one client of the store, from its first byte to its last.
//
// Knows nothing of sockets: bytes come in, bytes go out. No LibTorch.

#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "comm/store/wire.h"
#include "core/handshake.h"

namespace tessera::comm::store {

class Session {
 public:
  explicit Session(const core::Secret& secret);

  /// Takes what has arrived and calls `serve` for each request of a client that has proven the
  /// secret; what `serve` throws as WireError is answered. Nothing happens once it is over.
  void receive(std::string_view bytes, const std::function<void(const Packet&)>& serve);
  /// Sends an answer to a client that has proven the secret.
  void answer(const Packet& packet);

  /// What has to be sent; whoever sends takes it out.
  std::string& unsent() noexcept { return unsent_; }
  bool is_proven() const noexcept { return reader_.has_value(); }
  /// Whether the connection is to be closed.
  bool is_over() const noexcept { return is_over_; }
  void end() noexcept { is_over_ = true; }

 private:
  core::Handshake handshake_;
  std::optional<core::FrameWriter> writer_;  // both once proven
  std::optional<core::FrameReader> reader_;
  std::string received_;
  std::string unsent_;
  bool is_over_ = false;
};

}  // namespace tessera::comm::store
