// src/core/listening.h — what a socket that anybody may connect to bears.

#pragma once

#include <cerrno>
#include <chrono>
#include <cstddef>

namespace tessera::core {

/// Connections that have not proven the secret; the oldest makes room for the next.
inline constexpr std::size_t kMostStrangers = 256;
/// Connections that are taken before other work is looked at.
inline constexpr int kMostAccepted = 64;
/// How long nobody is taken after the process had nothing left to take them with: who waits stays
/// in line, so poll(2) would tell of them again and again.
inline constexpr std::chrono::milliseconds kPauseOfAccepting{50};

/// Returns whether accept(2) failed with `error` for want of descriptors or memory.
inline bool is_scarcity(int error) noexcept {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace tessera::core
