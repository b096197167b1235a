// launch/ranks.h — the ranks of one host during one attempt, as those see them who decide.

#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "tessera/launch/failure.h"

namespace tessera::launch {

/// Ranks that have been started. Processes (rank_group.h), or what a simulator puts in their place.
class Ranks {
 public:
  /// Never called while the ranks are being started.
  struct Events {
    std::function<void()> on_failure;  // the first rank that ended badly; at most once
    std::function<void()> on_gone;     // once
  };

  Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  virtual ~Ranks() = default;

  /// Stops the ranks that still run: SIGTERM after `grace`, SIGKILL after the shutdown timeout.
  virtual void stop(std::chrono::milliseconds grace) = 0;

  /// Sends `signal_number` now, SIGKILL after the shutdown timeout.
  virtual void forward(int signal_number) = 0;

  /// Kills everything at once.
  virtual void kill_all() = 0;

  virtual bool is_gone() const noexcept = 0;

  /// Returns how the ranks that did not end with 0 ended; valid once gone.
  virtual std::vector<RankFailure> failures() const = 0;

  /// Ranks that had to be killed after the shutdown timeout.
  virtual const std::vector<int>& killed_ranks() const noexcept = 0;
};

}  // namespace tessera::launch
