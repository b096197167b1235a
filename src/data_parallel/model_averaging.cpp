#include "tessera/data_parallel/model_averaging.h"

#include <map>
#include <string>

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

#include "data_parallel/hook_base.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

class PostLocalSgdHook final : public Sending<> {
 public:
  explicit PostLocalSgdHook(const PostLocalSgdOptions& options) : options_(options) {
    TESSERA_CHECK_VALUE(options.start_step >= 0,
                        "ddp.post_local_sgd: local steps cannot start at step ", options.start_step,
                        ".");
    TESSERA_CHECK_VALUE(options.subgroup || !options.reduce_in_subgroup,
                        "ddp.post_local_sgd: no subgroup. Give one, or set reduce_in_subgroup to "
                        "false.");
  }

  FuturePtr reduce(Bucket& bucket) override {
    if (step_ < options_.start_step) return sender().average_plainly(bucket);
    if (!options_.reduce_in_subgroup) return completed(bucket.buffer());
    const comm::Group& group = *options_.subgroup;
    return then(sender().start_average(bucket.buffer(), group, group.size())->getFuture(),
                bucket.buffer(), [](at::Tensor result) { return result; });
  }

  void end_step() override { ++step_; }
  std::string name() const override { return "post_local_sgd"; }

  HookState state() const override { return {.tensors = {}, .numbers = {{"step", step_}}}; }
  void load_state(const HookState& state) override {
    const auto step = state.numbers.find("step");
    TESSERA_CHECK_VALUE(step != state.numbers.end(),
                        "ddp.post_local_sgd: the state has no 'step'.");
    step_ = step->second;
  }

 private:
  PostLocalSgdOptions options_;
  std::int64_t step_ = 0;
};

}  // namespace

std::shared_ptr<CommHook> post_local_sgd_hook(const PostLocalSgdOptions& options) {
  return std::make_shared<PostLocalSgdHook>(options);
}

void average_parameters(const std::vector<at::Tensor>& parameters, const comm::Group& group) {
  const c10::AutoGradMode no_grad(false);
  std::map<c10::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const at::Tensor& parameter : parameters) {
    by_dtype[parameter.scalar_type()].push_back(parameter.detach());
  }
  Sender sender;
  std::vector<std::pair<at::Tensor, WorkPtr>> flats;
  for (const auto& [dtype, tensors] : by_dtype) {
    TESSERA_CHECK_VALUE(c10::isFloatingType(dtype) || c10::isComplexType(dtype),
                        "ddp.average_parameters: ", dtype, " has no average.");
  }
  for (const auto& [dtype, tensors] : by_dtype) {
    std::vector<at::Tensor> rows;
    for (const at::Tensor& tensor : tensors) rows.push_back(tensor.reshape(-1));
    at::Tensor flat = at::cat(rows);
    flats.emplace_back(flat, sender.start_average(flat, group, group.size()));
  }
  auto next = flats.begin();
  for (const auto& [dtype, tensors] : by_dtype) {
    next->second->wait();
    std::int64_t offset = 0;
    for (at::Tensor tensor : tensors) {
      tensor.copy_(next->first.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
    ++next;
  }
}

PeriodicModelAverager::PeriodicModelAverager(comm::Group group, std::int64_t period,
                                             std::int64_t warmup_steps)
    : group_(std::move(group)), period_(period), warmup_steps_(warmup_steps) {
  TESSERA_CHECK_VALUE(period_ >= 1, "ddp.model_averager: a period of ", period_,
                      " steps. It must be at least 1.");
  TESSERA_CHECK_VALUE(warmup_steps_ >= 0, "ddp.model_averager: ", warmup_steps_,
                      " steps of warm-up. It cannot be negative.");
}

void PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  if (step_ >= warmup_steps_ && (step_ - warmup_steps_) % period_ == 0) {
    data_parallel::average_parameters(parameters, group_);
  }
  ++step_;
}

HierarchicalModelAverager::HierarchicalModelAverager(std::vector<Level> levels,
                                                     std::int64_t warmup_steps)
    : levels_(std::move(levels)), warmup_steps_(warmup_steps) {
  TESSERA_CHECK_VALUE(!levels_.empty(), "ddp.hierarchical_averager: no levels.");
  TESSERA_CHECK_VALUE(levels_.front().period >= 1, "ddp.hierarchical_averager: a period of ",
                      levels_.front().period, " steps. It must be at least 1.");
  for (std::size_t i = 1; i < levels_.size(); ++i) {
    TESSERA_CHECK_VALUE(levels_[i - 1].period < levels_[i].period,
                        "ddp.hierarchical_averager: periods must ascend, but ",
                        levels_[i - 1].period, " comes before ", levels_[i].period, ".");
  }
  TESSERA_CHECK_VALUE(warmup_steps_ >= 0, "ddp.hierarchical_averager: ", warmup_steps_,
                      " steps of warm-up. It cannot be negative.");
}

std::vector<HierarchicalModelAverager::Level> HierarchicalModelAverager::blocks_of(
    const comm::Group& group, const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes) {
  TESSERA_CHECK_VALUE(!sizes.empty() && sizes.back().second == group.size(),
                      "ddp.hierarchical_averager: the last level has ",
                      sizes.empty() ? 0 : sizes.back().second, " ranks, but the group has ",
                      group.size(), ".");
  std::int64_t last = 1;
  for (const auto& [period, size] : sizes) {
    TESSERA_CHECK_VALUE(size >= 1 && size % last == 0 && group.size() % size == 0,
                        "ddp.hierarchical_averager: blocks of ", size,
                        " ranks do not nest: each size must divide the next.");
    last = size;
  }
  std::vector<Level> levels;
  for (const auto& [period, size] : sizes) {
    if (size == group.size()) {
      levels.push_back({period, group});
      continue;
    }
    std::shared_ptr<comm::Group> mine;
    for (int first = 0; first < group.size(); first += static_cast<int>(size)) {
      std::vector<int> ranks;
      for (int rank = first; rank < first + size; ++rank) ranks.push_back(rank);
      const auto block =
          group.subgroup(ranks, std::string("averaging every ").append(std::to_string(period)));
      if (block) mine = block;
    }
    levels.push_back({period, *mine});
  }
  return levels;
}

void HierarchicalModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  if (step_ >= warmup_steps_) {
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      if (step_ % level->period != 0) continue;
      data_parallel::average_parameters(parameters, level->group);
      break;
    }
  }
  ++step_;
}

}  // namespace tessera::data_parallel
