// src/comm/failure_channel.h — the reason a group ended, told through its store.
//
// Shared memory carries failures by itself. Between hosts they travel through the store: the first
// reason written stays, and ranks that wait look for it a few times a second. A store that is gone
// or does not answer is not an error: what was settled, or could not be, also goes to each rank by
// a datagram.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/transport.h"

namespace tessera::comm {

/// One group's channel. Thread-safe. A thread of its own talks to the store, so that a store that
/// hangs holds nobody up.
class FailureChannel {
 public:
  /// `address` is the one by which the other ranks reach this one.
  FailureChannel(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                 const std::string& address);
  ~FailureChannel();
  FailureChannel(const FailureChannel&) = delete;
  FailureChannel& operator=(const FailureChannel&) = delete;

  /// Learns where the other ranks listen. To be called once all of them have a channel.
  void meet(c10d::Store& store) noexcept;

  /// Makes `failure` the group's, unless it has one; returns the group's. Waits for the store, at
  /// most 1 s. Never throws.
  Failure publish(const Failure& failure) noexcept;
  /// The group's failure, if known here. Has the store asked at most every 50 ms, and does not wait
  /// for the answer: it is there at one of the next calls.
  std::optional<Failure> poll() noexcept;
  /// The failure known here, without asking the store.
  std::optional<Failure> known() const;

  /// Asks all ranks to look whether a process near them has died: a connection broke, and this rank
  /// cannot see why. Does not wait.
  void inquire() noexcept;
  /// Whether a rank has asked so, as of the last poll that was answered.
  bool has_inquiry() const;

  /// Says that this rank waits in collective `sequence`; to be called again and again while it
  /// does. The others hear of it if one of them asks. If this one `asks`, returns the ranks that
  /// have not arrived there; or, if all have, those from which nothing more has come for half a
  /// second; as far as the store has told yet, and nothing as long as it has not. Does not wait.
  std::optional<std::vector<int>> call_roll(std::uint64_t sequence, bool asks) noexcept;

 private:
  struct State;
  static void serve(const std::shared_ptr<State>& state);

  std::shared_ptr<State>
      state_;  // shared with the thread, which may be stuck in a call to the store
  std::thread thread_;
};

}  // namespace tessera::comm
