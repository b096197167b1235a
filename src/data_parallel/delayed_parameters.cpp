#include "data_parallel/delayed_parameters.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/core/check.h"

namespace tessera::data_parallel {

DelayedParameters::DelayedParameters(const ModelParts& parts, const Options& options,
                                     std::function<void()> on_trigger) {
  const auto named = [&](const std::string& name, const char* option) -> const at::Tensor& {
    const auto place = std::find_if(parts.parameters.begin(), parts.parameters.end(),
                                    [&](const NamedParameter& p) { return p.name == name; });
    TESSERA_CHECK_VALUE(place != parts.parameters.end(), "DistributedDataParallel: ", option,
                        " names '", name, "', which is no parameter.");
    return place->tensor;
  };
  for (const std::string& name : options.delay_all_reduce_named_params) {
    const at::Tensor& tensor = named(name, "delay_all_reduce_named_params");
    auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const Batch& other) {
      return other.parameters.front().options().type_equal(tensor.options()) &&
             other.parameters.front().device() == tensor.device();
    });
    if (batch == batches_.end()) batch = batches_.emplace(batches_.end());
    batch->parameters.push_back(tensor);
  }
  for (Batch& batch : batches_) {
    std::int64_t count = 0;
    for (const at::Tensor& parameter : batch.parameters) count += parameter.numel();
    batch.buffer = at::zeros({count}, batch.parameters.front().options().requires_grad(false));
    std::int64_t first = 0;
    for (const at::Tensor& parameter : batch.parameters) {
      batch.views.push_back(
          batch.buffer.narrow(0, first, parameter.numel()).view(parameter.sizes()));
      first += parameter.numel();
    }
  }
  trigger_.emplace(named(*options.param_to_hook_all_reduce, "param_to_hook_all_reduce"),
                   std::move(on_trigger));
}

void DelayedParameters::expect_backward(bool has_sync) {
  has_sync_ = has_sync;
  for (Batch& batch : batches_) {
    for (std::size_t i = 0; i < batch.parameters.size(); ++i) {
      if (batch.parameters[i].grad().defined()) continue;
      batch.views[i].zero_();
      batch.parameters[i].mutable_grad() = batch.views[i];
    }
  }
}

void DelayedParameters::reduce(const comm::Group& group, double divisor) {
  if (!has_sync_) return;
  at::NoGradGuard no_grad;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (Batch& batch : batches_) {
    for (std::size_t i = 0; i < batch.parameters.size(); ++i) {
      const at::Tensor& gradient = batch.parameters[i].grad();
      // Accumulation may have made a tensor of its own.
      if (gradient.defined() && !gradient.is_alias_of(batch.buffer)) {
        batch.views[i].copy_(gradient);
      }
    }
    batch.buffer.div_(divisor);
    std::vector<at::Tensor> tensors{batch.buffer};
    works.push_back(group.process_group()->allreduce(tensors));
  }
  for (const auto& work : works) work->wait();
  for (Batch& batch : batches_) {
    for (std::size_t i = 0; i < batch.parameters.size(); ++i) {
      at::Tensor& gradient = batch.parameters[i].mutable_grad();
      if (gradient.defined() && !gradient.is_alias_of(batch.buffer)) {
        gradient.copy_(batch.views[i]);
      } else {
        gradient = batch.views[i];
      }
    }
  }
}

}  // namespace tessera::data_parallel
