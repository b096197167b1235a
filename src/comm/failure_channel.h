// src/comm/failure_channel.h — the reason a group ended, told through its store.
//
// Shared memory carries failures by itself. Between hosts they travel through the store: the first
// reason written stays, and ranks that wait look for it a few times a second. A store that is gone
// is not an error; the ranks then only know what they see themselves.

#pragma once

#include <chrono>
#include <mutex>
#include <optional>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/transport.h"

namespace tessera::comm {

/// One group's channel. Thread-safe.
class FailureChannel {
 public:
  explicit FailureChannel(const c10::intrusive_ptr<c10d::Store>& store);

  /// Makes `failure` the group's, unless it has one; returns the group's. Never throws.
  Failure publish(const Failure& failure) noexcept;
  /// The group's failure, if known here. Asks the store at most every 100 ms.
  std::optional<Failure> poll() noexcept;
  /// The failure known here, without asking the store.
  std::optional<Failure> known() const;

 private:
  std::optional<Failure> ask_store();

  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Store> store_;  // null once it failed us
  std::optional<Failure> failure_;
  Clock::time_point next_poll_{};
};

}  // namespace tessera::comm
