// tests/data_parallel/hook_steps.h — steps of a small model, handed to a hook bucket by bucket, as
// a backward would.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "tessera/comm/group.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel::testing {

/// Parameters by name. Cuts say which of them share a bucket: {{2, 1}, {0}}.
struct Model {
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
};

using Cuts = std::vector<std::vector<std::size_t>>;

/// A few matrices, vectors, a convolution in channels_last, an empty tensor and a number.
inline Model small_model() {
  const auto image = at::zeros({6, 5, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
  return {{"embed", "conv", "bias", "mix", "mix_too", "none", "scale"},
          {at::zeros({12, 9}), image, at::zeros({7}), at::zeros({8, 20}), at::zeros({8, 20}),
           at::zeros({0, 4}), at::zeros({})}};
}

inline const Cuts kOneBucket = {{6, 5, 4, 3, 2, 1, 0}};
inline const Cuts kManyBuckets = {{6, 5}, {4}, {3, 2}, {1}, {0}};

/// Reproducible numbers for one parameter, rank and step.
inline at::Tensor gradient_of(const Model& model, std::size_t parameter, int rank, int step) {
  const std::uint64_t seed =
      parameter + 100 * static_cast<std::uint64_t>(rank) + 10000 * static_cast<std::uint64_t>(step);
  return at::randn(model.parameters[parameter].sizes(), at::detail::createCPUGenerator(seed),
                   at::kFloat);
}

/// The same with numbers in it, and a parameter whose memory has gaps.
inline Model model_with_values() {
  Model model = small_model();
  for (std::size_t i = 0; i < model.names.size(); ++i) {
    model.parameters[i].copy_(gradient_of(model, i, 77, 77));
  }
  model.names.push_back("sliced");
  model.parameters.push_back(
      at::randn({4, 6}, at::detail::createCPUGenerator(5), at::kFloat).narrow(1, 0, 3));
  return model;
}

inline std::vector<at::Tensor> gradients_of(const Model& model, int rank, int step) {
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < model.names.size(); ++i) {
    gradients.push_back(gradient_of(model, i, rank, step));
  }
  return gradients;
}

/// The average over `size` ranks in double precision.
inline std::vector<at::Tensor> average_of(const Model& model, int size, int step) {
  std::vector<at::Tensor> averages;
  for (std::size_t i = 0; i < model.names.size(); ++i) {
    at::Tensor sum = at::zeros(model.parameters[i].sizes(), at::kDouble);
    for (int rank = 0; rank < size; ++rank) sum += gradient_of(model, i, rank, step);
    averages.push_back((sum / size).to(at::kFloat));
  }
  return averages;
}

struct StepOptions {
  double divisor = 0;  // zero: the group's size
  c10::Device device{at::kCPU};
  bool flush = false;  // after every bucket, as a caller that cannot tell the last one does
};

/// Runs one step of `hook` and returns the results as their parameters see them.
inline std::vector<at::Tensor> run_step(CommHook& hook, const Model& model,
                                        const std::vector<at::Tensor>& gradients, const Cuts& cuts,
                                        const comm::Group& group, const StepOptions& options = {}) {
  std::vector<Bucket> buckets;
  std::vector<FuturePtr> futures;
  for (std::size_t index = 0; index < cuts.size(); ++index) {
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters;
    std::int64_t length = 0;
    for (const std::size_t i : cuts[index]) {
      names.push_back(model.names[i]);
      parameters.push_back(model.parameters[i]);
      length += model.parameters[i].numel();
    }
    Bucket bucket(index, index + 1 == cuts.size(),
                  at::zeros({length}, at::TensorOptions(options.device)), names, parameters, group,
                  options.divisor == 0 ? group.size() : options.divisor);
    const auto views = bucket.gradients();
    for (std::size_t i = 0; i < views.size(); ++i) {
      views[i].copy_(gradients[cuts[index][i]]);
    }
    buckets.push_back(bucket);
    futures.push_back(hook.reduce(bucket));
    if (options.flush) hook.flush();
  }
  hook.end_step();
  std::vector<at::Tensor> results(model.names.size());
  for (std::size_t index = 0; index < cuts.size(); ++index) {
    futures[index]->waitAndThrow();
    const c10::IValue value = futures[index]->value();
    const at::Tensor flat = value.isTensor() ? value.toTensor() : value.toTensorVector()[0];
    const auto views = buckets[index].views_of(flat);
    for (std::size_t i = 0; i < views.size(); ++i) {
      results[cuts[index][i]] = views[i].clone();
    }
  }
  return results;
}

inline double largest_difference(const std::vector<at::Tensor>& a,
                                 const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].numel() == 0) continue;
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  }
  return largest;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

}  // namespace tessera::data_parallel::testing
