// workloads/lm/train.h — trains the small GPT on a text, on a mesh of data and vocabulary ranks.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lm/gpt.h"
#include "tessera/comm/group.h"

namespace tessera::workloads {

struct LmOptions {
  GptOptions model;
  std::string file;  // empty: the library's own source text
  std::int64_t steps = 200;
  std::int64_t batch = 16;  // sequences per step, over all ranks
  double learning_rate = 1e-3;
  int data_ranks = 0;                 // 0: what the vocabulary's leave over
  int vocab_ranks = 0;                // 0: all ranks, unless data_ranks is given
  std::string checkpoints;            // folder; none are saved if empty
  std::int64_t checkpoint_every = 0;  // steps; 0: after the last only
  int keep_checkpoints = 2;
  bool resume = false;  // from the newest checkpoint there, if there is one
};

struct LmProgress {
  std::int64_t step = 0;
  double loss = 0;  // mean over the whole batch, the same on all ranks
  double tokens_per_second = 0;
  double milliseconds = 0;  // of the last step
};

/// Trains and returns the last loss. Collective over `world`; `report` is called after every step
/// on every rank. For a given seed the losses are the same, to rounding, for every number of ranks
/// and every mesh; a run that goes on after a checkpoint has those of one that was never
/// interrupted, to the bit on the same mesh. `started` is told how many steps a checkpoint had
/// done. Throws ValueError if the ranks do not divide into the mesh, the batch does not divide over
/// the data ranks, or the checkpoint is of another batch, length or seed; checkpoint::Error for one
/// that cannot be used.
double train_lm(const LmOptions& options, const comm::Group& world,
                const std::function<void(const LmProgress&)>& report,
                const std::function<void(std::int64_t)>& started = {});

}  // namespace tessera::workloads
