#include "collision/unknown_rows.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "core/autograd.h"
#include "tessera/comm/collectives.h"

namespace tessera::collision {
namespace {

struct Call : torch::CustomClassHolder {
  std::vector<UnknownPlaces> unknown;
  std::vector<at::Tensor> values;
  std::shared_ptr<UnknownRows> rows;
};
using CallPtr = c10::intrusive_ptr<Call>;

struct Replace : Function<Replace> {
  // The anchor asks for a gradient, so that ranks without values take part in backward.
  static Variable forward(AutogradContext* context, const Variable& own, const Variable& /*anchor*/,
                          const CallPtr& call) {
    carry(context, call);
    at::Tensor result = own.clone();
    auto* to = result.data_ptr<float>();
    for (std::size_t u = 0; u < call->unknown.size(); ++u) {
      const UnknownPlaces& unknown = call->unknown[u];
      const auto* from = call->values[u].const_data_ptr<float>();
      for (const std::int64_t place : unknown.places) {
        std::copy_n(from, unknown.columns, to + place);
        from += unknown.columns;
      }
    }
    call->values.clear();
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call = carried<Call>(context);
    const at::Tensor given = gradients[0].to(at::kFloat).contiguous();
    if (call->rows) call->rows->step(call->unknown, given);
    at::Tensor result = given.clone();
    auto* to = result.data_ptr<float>();
    for (const UnknownPlaces& unknown : call->unknown) {
      for (const std::int64_t place : unknown.places) std::fill_n(to + place, unknown.columns, 0.F);
    }
    return {result, Variable(), Variable()};
  }
};

}  // namespace

UnknownRows::UnknownRows(std::vector<std::pair<std::string, std::int64_t>> tables,
                         comm::Group group, const embedding::OptimizerOptions& options)
    : group_(std::move(group)) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& [name, columns] : tables) {
    weights_.push_back(at::zeros({1, columns}, at::kFloat));
    named.emplace_back(name, weights_.back());
  }
  optimizer_ = std::make_unique<embedding::RowOptimizer>(std::move(named), options);
}

void UnknownRows::step(const std::vector<UnknownPlaces>& unknown, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  // By table and bucket, each in order of the ids.
  std::map<std::pair<std::size_t, int>, std::vector<float>> sums;
  const auto* from = gradient.const_data_ptr<float>();
  for (const UnknownPlaces& one : unknown) {
    for (std::size_t i = 0; i < one.places.size(); ++i) {
      auto& sum = sums[{one.table, one.buckets[i]}];
      sum.resize(static_cast<std::size_t>(one.columns));
      const float* row = from + one.places[i];
      for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += row[c];
    }
  }
  std::vector<std::int64_t> keys;
  std::vector<float> values;
  for (const auto& [key, sum] : sums) {
    keys.push_back(static_cast<std::int64_t>(key.first) << 10 | key.second);
    values.insert(values.end(), sum.begin(), sum.end());
  }
  at::Tensor all_keys = at::tensor(keys, at::kLong);
  at::Tensor all_values = at::tensor(values, at::kFloat);
  if (group_.size() > 1) {
    all_keys = comm::all_gather_v(all_keys, group_);
    all_values = comm::all_gather_v(all_values, group_);
  }
  std::map<std::int64_t, const float*> by_key;  // a bucket has one owner: every key is there once
  const auto* next = all_values.const_data_ptr<float>();
  for (std::int64_t i = 0; i < all_keys.numel(); ++i) {
    const std::int64_t key = all_keys.const_data_ptr<std::int64_t>()[i];
    by_key[key] = next;
    next += weights_[static_cast<std::size_t>(key >> 10)].size(1);
  }
  std::vector<embedding::RowGradient> steps;
  for (const at::Tensor& weight : weights_) {
    steps.push_back({at::empty({0}, at::kLong), at::empty({0, weight.size(1)}, at::kFloat)});
  }
  for (const auto& [key, row] : by_key) {
    embedding::RowGradient& step = steps[static_cast<std::size_t>(key >> 10)];
    if (step.rows.numel() == 0) {
      step = {at::zeros({1}, at::kLong), at::zeros({1, step.values.size(1)}, at::kFloat)};
    }
    auto* sum = step.values.data_ptr<float>();
    for (std::int64_t c = 0; c < step.values.size(1); ++c) sum[c] += row[c];
  }
  optimizer_->step_rows(steps);
}

at::Tensor with_unknown(const at::Tensor& own, std::vector<UnknownPlaces> unknown,
                        const std::vector<at::Tensor>& values, std::shared_ptr<UnknownRows> rows) {
  auto call = c10::make_intrusive<Call>();
  call->unknown = std::move(unknown);
  call->values = values;
  call->rows = std::move(rows);
  const at::Tensor anchor =
      at::empty({0}, at::kFloat).requires_grad_(at::GradMode::is_enabled() && call->rows);
  return Replace::apply(own, anchor, call);
}

}  // namespace tessera::collision
