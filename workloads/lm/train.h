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
  int data_ranks = 0;   // 0: what the vocabulary's leave over
  int vocab_ranks = 0;  // 0: all ranks, unless data_ranks is given
};

struct LmProgress {
  std::int64_t step = 0;
  double loss = 0;  // mean over the whole batch, the same on all ranks
  double tokens_per_second = 0;
  double milliseconds = 0;  // of the last step
};

/// Trains and returns the last loss. Collective over `world`; `report` is called after every step
/// on every rank. For a given seed the losses are the same, to rounding, for every number of ranks
/// and every mesh. Throws ValueError if the ranks do not divide into the mesh or the batch does not
/// divide over the data ranks.
double train_lm(const LmOptions& options, const comm::Group& world,
                const std::function<void(const LmProgress&)>& report);

}  // namespace tessera::workloads
