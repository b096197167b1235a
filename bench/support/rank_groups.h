// bench/support/rank_groups.h — the groups that the ranks of a benchmark measure.

#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "support/rank_bench.h"
#include "tessera/comm/group.h"

namespace tessera::bench {

/// Makes groups over the ranks of a benchmark. Each has a name of its own, the same on all ranks.
/// Every wait in them ends after a minute.
class RankGroups {
 public:
  /// Collective: the ranks meet at the benchmark's listener.
  explicit RankGroups(const RankBench& bench);

  /// One of Tessera's engines. Collective.
  comm::Group of(comm::Engine engine, const std::string& name) const;
  /// LibTorch's engine with nothing of ours around it. Collective.
  comm::Group plain_gloo(const std::string& name) const;
  /// This rank alone, over shared memory. Not collective.
  comm::Group alone() const;

 private:
  c10::intrusive_ptr<c10d::Store> part(const std::string& name) const;

  int rank_;
  int size_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace tessera::bench
