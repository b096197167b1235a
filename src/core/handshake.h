// src/core/handshake.h — two processes prove to each other that they know the job's secret.
//
// The one who listens says a random number; the one who connects answers with one of its own and
// the HMAC of both; the listener checks it and answers with its own. Nobody has then been told more
// than random numbers. What follows travels in frames, each with a counter and an HMAC under a key
// of this connection alone, so none can be made up, changed, repeated or left out. Nothing is
// encrypted. No LibTorch, and no input or output of its own.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/secret.h"

namespace tessera::core {

/// How long a stranger may take.
inline constexpr int kHandshakeSeconds = 5;

/// Makes the frames of one direction.
class FrameWriter {
 public:
  explicit FrameWriter(const Secret& key) : key_(key) {}
  std::string frame(std::string_view payload);

 private:
  Secret key_;
  std::uint64_t count_ = 0;
};

/// Reads the frames of one direction.
class FrameReader {
 public:
  explicit FrameReader(const Secret& key) : key_(key) {}
  /// Takes the first frame out of `received` and returns what it holds; nothing if it is not whole
  /// yet. Throws FrameError if it is longer than `longest` or not from the peer.
  std::optional<std::string> next(std::string& received, std::size_t longest);

 private:
  Secret key_;
  std::uint64_t count_ = 0;
};

class FrameError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Handshake {
 public:
  enum class Side { kListens, kConnects };
  enum class State {
    kOpen,      // more has to be said
    kProven,    // both know the secret
    kRefused,   // the listener does not take our proof
    kStranger,  // the peer does not know the secret, or speaks of something else
  };

  /// `purpose` keeps the proofs of one kind of connection from being used on another.
  Handshake(Side side, const Secret& secret, std::string purpose);

  /// What to send before anything is received.
  std::string opening() const;
  /// Takes what it needs out of `received`; what has to be sent is appended to `to_send`, in every
  /// state.
  State advance(std::string& received, std::string& to_send);
  State state() const noexcept { return state_; }

  /// The keys of the connection; valid once proven.
  FrameWriter writer() const;
  FrameReader reader() const;

 private:
  Digest proof(std::string_view who) const;

  Side side_;
  Secret secret_;
  std::string purpose_;
  std::string listener_number_;
  std::string caller_number_;
  State state_ = State::kOpen;
  bool has_answered_ = false;
};

}  // namespace tessera::core
