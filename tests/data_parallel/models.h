// tests/data_parallel/models.h — small models, samples and the plain training they are judged by.

#pragma once

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "support/ranks.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/distributed_data_parallel.h"

namespace tessera::testing {

using data_parallel::DistributedDataParallel;
using data_parallel::Options;

inline at::Tensor sample(std::int64_t seed, at::IntArrayRef shape,
                         at::ScalarType type = at::kDouble) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(type));
}

/// Gives every parameter its own values, the same for the same seed.
inline void fill(torch::nn::Module& module, std::int64_t seed) {
  at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    parameter.copy_(sample(seed++, parameter.sizes(), parameter.scalar_type()) * 0.3);
  }
}

/// Layers of which each may be left out, and may have a buffer.
struct Layers : torch::nn::Module {
  explicit Layers(int num_layers = 3, int width = 5, std::int64_t seed = 1) {
    for (int i = 0; i < num_layers; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
    scale = register_parameter("scale", at::ones({width}));
    to(at::kDouble);
    fill(*this, seed);
  }
  at::Tensor forward(at::Tensor x, std::optional<std::vector<bool>> used = std::nullopt) {
    x = x * scale;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (!used || (*used)[i]) x = at::tanh(layers[i](x)) + x;
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  at::Tensor scale;
};

/// A layer with buffers that each forward changes.
struct Counting : torch::nn::Module {
  Counting() {
    weight = register_parameter("weight", at::ones({3}));
    mean = register_buffer("mean", at::zeros({3}));
    count = register_buffer("count", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) {
      at::NoGradGuard no_grad;
      mean = named_buffers()["mean"];
      mean.mul_(0.5).add_(x.mean(0), 0.5);
      count.add_(1);
    }
    return (x - mean) * weight;
  }
  at::Tensor weight, mean, count;
};

inline at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }

inline std::vector<at::Tensor> gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : module.parameters()) {
    result.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  return result;
}

inline void clear_gradients(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
}

inline void descend(torch::nn::Module& module, double rate = 0.1) {
  at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    if (parameter.grad().defined()) {
      parameter.sub_(parameter.grad().to_dense(), rate);
      parameter.mutable_grad() = at::Tensor();
    }
  }
}

inline void expect_near(const at::Tensor& a, const at::Tensor& b, const std::string& what,
                        double tolerance = 1e-12) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) return;
  const double difference = (a - b).abs().max().item<double>();
  EXPECT_LE(difference, tolerance) << what;
}

/// Reduces to twice the average, remembers what it was given, and throws when told to.
struct Doubling : data_parallel::CommHook {
  data_parallel::FuturePtr reduce(data_parallel::Bucket& bucket) override {
    if (throws) throw std::runtime_error("the hook is not in the mood");
    indices.push_back(bucket.index());
    if (bucket.is_last()) ++num_last;
    for (const auto& name : bucket.names()) names.push_back(name);
    divisor = bucket.divisor();
    std::vector<at::Tensor> buffer{bucket.buffer().mul_(2 / bucket.divisor())};
    return bucket.group().process_group()->allreduce(buffer)->getFuture();
  }
  void end_step() override { ++num_steps; }
  std::string name() const override { return "doubling"; }
  bool throws = false;
  std::vector<std::size_t> indices;
  std::vector<std::string> names;
  int num_last = 0, num_steps = 0;
  double divisor = 0;
};

}  // namespace tessera::testing
