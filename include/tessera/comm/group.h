// tessera/comm/group.h — the ranks that work together, and how to become one of them.
//
// A Group is what every module takes: a few ranks and the engine between them. It holds an ordinary
// c10d::ProcessGroup, so it goes wherever LibTorch expects one, and groups made elsewhere (in
// Python, by other libraries) can be wrapped.

#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/core/export.h"

namespace tessera::comm {

enum class Engine {
  kAuto,  // shared memory inside a host, Gloo between hosts, NCCL for CUDA tensors if there is one
  kShm,   // as kAuto, but an error instead of a fall-back when shared memory cannot be had
  kGloo,  // TCP for everything
};

struct GroupOptions {
  Engine engine = Engine::kAuto;
  /// Limit of every wait. TESSERA_TIMEOUT (seconds) changes the default.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Shown in errors.
  std::string name = "world";
  /// World rank of each member, for errors; empty means 0, 1, 2, ...
  std::vector<int> world_ranks;
  /// Compare what the ranks are about to do before Gloo moves data. Always on with shared memory,
  /// where it is free; here it costs one small message. TESSERA_CHECK_COLLECTIVES=0 turns it off.
  bool check_gloo_calls = true;
};

/// The options' defaults, with the environment's wishes applied.
TESSERA_API GroupOptions default_group_options();

/// Some ranks and the engine between them. Copies are cheap and refer to the same group.
class TESSERA_API Group {
 public:
  /// Wraps a group made elsewhere. Throws ValueError if it is null.
  explicit Group(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  /// This process's place in the group.
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// World rank of the member `group_rank`.
  int world_rank(int group_rank) const;
  const std::string& name() const noexcept;
  /// "shm", "gloo", "shm+gloo", or what a group made elsewhere says.
  std::string engine() const;

  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const noexcept { return group_; }
  /// The store the group met on. Throws ValueError if a group made elsewhere has none.
  c10::intrusive_ptr<c10d::Store> store() const;

  /// Makes the group of `ranks` (of this group, ascending) and returns it; null on other ranks.
  ///
  /// Collective: all ranks of this group call it, in the same order, also those not in `ranks`.
  std::shared_ptr<Group> subgroup(const std::vector<int>& ranks, const std::string& name) const;

  /// Ends every wait of every rank of the group with an Error that says `reason`; later calls raise
  /// the same. Not collective; any thread.
  void abort(const std::string& reason) const;

  bool operator==(const Group& other) const noexcept { return group_ == other.group_; }

 private:
  friend TESSERA_API Group make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                      int size, const GroupOptions& options);
  struct State;
  Group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::shared_ptr<State> state);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<State> state_;
  int rank_;
  int size_;
};

/// Makes a group of `size` ranks that meet on `store`; this process (or thread) is `rank`.
///
/// Collective over those ranks. Throws ValueError for a rank outside the size, Error(kRendezvous)
/// naming the missing ranks when they do not all come within the timeout.
TESSERA_API Group make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             const GroupOptions& options = default_group_options());

/// Joins the job this process was started for and returns its world group.
///
/// Collective over the whole job. Reads the environment (see environment.h), meets the other ranks,
/// and arranges that an uncaught exception of this process reaches the others and the launcher.
/// Throws ValueError for an environment that makes no sense, Error(kRendezvous) naming missing,
/// duplicate or disagreeing ranks, or the port that is in use.
TESSERA_API Group init(const GroupOptions& options = default_group_options());

}  // namespace tessera::comm
