// workloads/lm/checkpoints.h — what a training of the small GPT saves, and how it goes on from
// there.

#pragma once

#include <cstdint>
#include <string>

#include <torch/optim/optimizer.h>

#include "lm/gpt.h"
#include "lm/train.h"
#include "tessera/checkpoint/state.h"
#include "tessera/comm/mesh.h"

namespace tessera::workloads {

/// Parameters, the state of the optimizer, the number of steps and the last loss. They load on any
/// mesh. What it is given must outlive it.
class LmCheckpoints {
 public:
  LmCheckpoints(const LmOptions& options, const Gpt& model, torch::optim::Optimizer& optimizer,
                const comm::Mesh& mesh, const comm::Group& world);

  /// Saves and returns when it is on the disk. The first data rank's vocabulary group writes; all
  /// ranks are collective.
  void save(std::int64_t step, double loss);

  struct Place {
    std::int64_t step = 0;
    double loss = 0;
  };
  /// Loads the newest checkpoint; step 0 if there is none. Collective. Throws ValueError if it is
  /// of a job with another batch, length or seed.
  Place load();

 private:
  const LmOptions& options_;
  torch::optim::Optimizer& optimizer_;
  const comm::Mesh& mesh_;
  comm::Group world_;
  checkpoint::State state_;
};

}  // namespace tessera::workloads
