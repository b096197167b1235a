// Parameters whose gradients are reduced together, when that of one chosen parameter is there.

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>

#include "data_parallel/replica_state.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {

using torch::autograd::Engine;

void Replica::State::delay_parameters() {
  if (options.delay_all_reduce_named_params.empty()) return;
  std::map<std::pair<c10::ScalarType, c10::Device>, std::vector<at::Tensor>,
           decltype([](const auto& a, const auto& b) {
             return std::make_pair(a.first, a.second.str()) <
                    std::make_pair(b.first, b.second.str());
           })>
      groups;
  for (const std::string& name : options.delay_all_reduce_named_params) {
    const auto place = std::find_if(parts.parameters.begin(), parts.parameters.end(),
                                    [&](const NamedParameter& p) { return p.name == name; });
    TESSERA_CHECK_VALUE(place != parts.parameters.end(),
                        "DistributedDataParallel: delay_all_reduce_named_params names '", name,
                        "', which is no parameter.");
    groups[{place->tensor.scalar_type(), place->tensor.device()}].push_back(place->tensor);
  }
  for (auto& [key, parameters] : groups) {
    DelayedGroup delayed;
    std::int64_t count = 0;
    for (const at::Tensor& parameter : parameters) count += parameter.numel();
    delayed.buffer = at::zeros({count}, parameters.front().options().requires_grad(false));
    std::int64_t first = 0;
    for (const at::Tensor& parameter : parameters) {
      delayed.views.push_back(
          delayed.buffer.narrow(0, first, parameter.numel()).view(parameter.sizes()));
      first += parameter.numel();
    }
    delayed.parameters = std::move(parameters);
    delayed_.push_back(std::move(delayed));
  }
  const auto trigger = std::find_if(
      parts.parameters.begin(), parts.parameters.end(),
      [&](const NamedParameter& p) { return p.name == *options.param_to_hook_all_reduce; });
  TESSERA_CHECK_VALUE(trigger != parts.parameters.end(),
                      "DistributedDataParallel: param_to_hook_all_reduce names '",
                      *options.param_to_hook_all_reduce, "', which is no parameter.");
  delayed_trigger_.emplace(trigger->tensor, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      // At the end of this node, the gradient of the trigger itself may be one of them.
      Engine::get_default_engine().queue_callback([self] { self->reduce_delayed(); });
    }
  });
}

void Replica::State::point_delayed_gradients() {
  for (DelayedGroup& delayed : delayed_) {
    for (std::size_t i = 0; i < delayed.parameters.size(); ++i) {
      if (delayed.parameters[i].grad().defined()) continue;
      delayed.views[i].zero_();
      delayed.parameters[i].mutable_grad() = delayed.views[i];
    }
  }
}

void Replica::State::reduce_delayed() {
  if (!has_delayed_sync_) return;
  at::NoGradGuard no_grad;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (DelayedGroup& delayed : delayed_) {
    for (std::size_t i = 0; i < delayed.parameters.size(); ++i) {
      const at::Tensor& gradient = delayed.parameters[i].grad();
      // Accumulation may have made a tensor of its own.
      if (gradient.defined() && !gradient.is_alias_of(delayed.buffer)) {
        delayed.views[i].copy_(gradient);
      }
    }
    delayed.buffer.div_(divisor());
    std::vector<at::Tensor> tensors{delayed.buffer};
    works.push_back(group.process_group()->allreduce(tensors));
  }
  for (const auto& work : works) work->wait();
  for (DelayedGroup& delayed : delayed_) {
    for (std::size_t i = 0; i < delayed.parameters.size(); ++i) {
      at::Tensor& gradient = delayed.parameters[i].mutable_grad();
      if (gradient.defined() && !gradient.is_alias_of(delayed.buffer)) {
        gradient.copy_(delayed.views[i]);
      } else {
        gradient = delayed.views[i];
      }
    }
  }
}

}  // namespace tessera::data_parallel
