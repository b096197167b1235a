#include "data_parallel/arrival_watch.h"

#include <memory>
#include <vector>

#include <torch/csrc/autograd/function.h>

namespace tessera::data_parallel {
namespace {

using torch::autograd::variable_list;

class CallingHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit CallingHook(std::function<void()> function) : function_(std::move(function)) {}

  variable_list operator()(const variable_list& gradients) override {
    function_();
    return gradients;
  }
  // Compiled backwards call no hooks of C++.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  std::function<void()> function_;
};

}  // namespace

ArrivalWatch::ArrivalWatch(const at::Tensor& parameter, std::function<void()> function)
    : accumulator_(torch::autograd::impl::grad_accumulator(parameter)) {
  auto hook = std::make_unique<CallingHook>(std::move(function));
  hook_ = hook.get();
  accumulator_->add_pre_hook(std::move(hook));
}

ArrivalWatch::~ArrivalWatch() {
  if (!accumulator_) return;
  std::erase_if(accumulator_->pre_hooks(), [&](const auto& hook) { return hook.get() == hook_; });
}

}  // namespace tessera::data_parallel
