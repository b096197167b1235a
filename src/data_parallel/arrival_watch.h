// src/data_parallel/arrival_watch.h — notices that a gradient reaches a parameter.

#pragma once

#include <functional>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::data_parallel {

/// Calls a function when a gradient of `parameter` is about to be accumulated, while this lives.
///
/// Sits on the node that accumulates: a hook of C++ on the tensor itself takes the place of those
/// that Python has put there, and the next one of Python would take its place in turn.
class ArrivalWatch {
 public:
  ArrivalWatch(const at::Tensor& parameter, std::function<void()> function);
  ~ArrivalWatch();
  ArrivalWatch(ArrivalWatch&&) noexcept = default;
  ArrivalWatch& operator=(ArrivalWatch&&) = delete;

 private:
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  NodePtr accumulator_;  // null once moved from
  const torch::autograd::FunctionPreHook* hook_ = nullptr;
};

}  // namespace tessera::data_parallel
