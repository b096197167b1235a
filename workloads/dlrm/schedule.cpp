#include "dlrm/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "tessera/core/check.h"

namespace tessera::workloads::dlrm {

double schedule_factor(std::int64_t step, std::int64_t num_steps, std::int64_t warmup,
                       const std::string& decay) {
  TESSERA_CHECK_VALUE(decay == "none" || decay == "linear" || decay == "cosine",
                      "dlrm.train: there is no decay '", decay,
                      "'. There are none, linear and cosine.");
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (decay == "none") return 1;
  const auto length = static_cast<double>(std::max<std::int64_t>(1, num_steps - warmup));
  const double done = static_cast<double>(step - warmup) / length;
  if (decay == "linear") return std::max(0.0, 1 - done);
  return 0.5 * (1 + std::cos(std::numbers::pi * std::min(1.0, done)));
}

std::unique_ptr<torch::optim::Optimizer> make_dense_optimizer(const std::string& name,
                                                              std::vector<at::Tensor> parameters,
                                                              double learning_rate) {
  using namespace torch::optim;
  if (name == "sgd") {
    return std::make_unique<SGD>(std::move(parameters), SGDOptions(learning_rate));
  }
  if (name == "adagrad") {
    return std::make_unique<Adagrad>(std::move(parameters), AdagradOptions(learning_rate));
  }
  TESSERA_CHECK_VALUE(name == "adam", "dlrm.train: there is no optimizer '", name,
                      "'. There are sgd, adagrad and adam.");
  return std::make_unique<Adam>(std::move(parameters), AdamOptions(learning_rate));
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double learning_rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate);
}

}  // namespace tessera::workloads::dlrm
