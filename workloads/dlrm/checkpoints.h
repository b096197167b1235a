// dlrm/checkpoints.h — what a DLRM training saves, and how it goes on from there.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <torch/optim/optimizer.h>

#include "dlrm/model.h"
#include "tessera/checkpoint/save.h"
#include "tessera/comm/group.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::workloads::dlrm {

struct CheckpointOptions {
  std::string folder;
  int keep = 2;
  std::int64_t samples_per_step = 0;  // of all ranks; a resumed job must have the same
  std::uint64_t seed = 0;             // likewise
};

/// Dense layers, tables, the state of both optimizers, and the number of steps. Tables load under
/// any sharding and any number of ranks, with one exception: row-wise optimizer state of a table
/// that is cut by columns belongs to that cut.
class Checkpoints {
 public:
  /// Collective. What it is given must outlive it.
  Checkpoints(const CheckpointOptions& options, Dlrm& model, torch::optim::Optimizer& optimizer,
              sharding::ShardedEmbeddingBagCollection& tables, const comm::Group& group);

  /// Saves beside training, or `waits` until it is on the disk. Collective.
  void save(std::int64_t step, bool waits);
  /// Loads the newest checkpoint and returns its step; 0 if there is none. Collective. Throws
  /// ValueError if it is of a job with another seed or batch.
  std::int64_t load();

 private:
  CheckpointOptions options_;
  sharding::ShardedEmbeddingBagCollection& tables_;
  comm::Group group_;
  checkpoint::State state_;
  checkpoint::AsyncSaver saver_;
};

}  // namespace tessera::workloads::dlrm
