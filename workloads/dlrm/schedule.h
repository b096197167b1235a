// dlrm/schedule.h — optimizers of dense layers, and how their step size changes.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

namespace tessera::workloads::dlrm {

/// What the learning rate is multiplied with in step `step` (from 0): up from 1/warmup in `warmup`
/// steps, then by `decay` ("none", "linear", "cosine") down to 0 after the last one. Throws
/// ValueError for another word.
double schedule_factor(std::int64_t step, std::int64_t num_steps, std::int64_t warmup,
                       const std::string& decay);

/// "sgd", "adagrad" or "adam"; throws ValueError for another word.
std::unique_ptr<torch::optim::Optimizer> make_dense_optimizer(const std::string& name,
                                                              std::vector<at::Tensor> parameters,
                                                              double learning_rate);
void set_learning_rate(torch::optim::Optimizer& optimizer, double learning_rate);

}  // namespace tessera::workloads::dlrm
