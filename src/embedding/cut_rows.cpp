// Steps of rows whose columns lie in several places, of whole tensors: the norms wait for others.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "embedding/row_state.h"
#include "tessera/core/check.h"
#include "tessera/embedding/optimizer.h"

namespace tessera::embedding {
namespace {

using kernels::RowRule;
using kernels::RowStep;

/// The rows of one table that step.
struct Rows {
  at::Tensor rows;
  at::Tensor w;  // float32
  at::Tensor g;
  at::Tensor m;
  at::Tensor v;
  at::Tensor u;  // LAMB's direction
  RowStep step;
};

bool is_layerwise(RowRule rule) {
  return rule == RowRule::kLamb || rule == RowRule::kPartialRowWiseLamb ||
         rule == RowRule::kLarsSgd;
}

bool has_row_squares(RowRule rule) {
  return rule == RowRule::kRowWiseAdagrad || rule == RowRule::kPartialRowWiseAdam ||
         rule == RowRule::kPartialRowWiseLamb;
}

at::Tensor squares(const at::Tensor& values) { return values.pow(2).sum(1); }

template <typename Number>
std::vector<at::Tensor> summed(std::vector<Rows>& all, const RowSum& sum, const Number& number) {
  std::vector<at::Tensor> numbers;
  for (Rows& table : all) numbers.push_back(number(table));
  sum(numbers);
  return numbers;
}

void take_moments(Rows& t, const at::Tensor& mean_squares) {
  const RowStep& s = t.step;
  t.m = s.beta1 * t.m + s.rest1 * t.g;
  t.v = s.beta2 * t.v + s.rest2 * (mean_squares.defined() ? mean_squares : t.g.pow(2));
  const at::Tensor below = (t.v * s.correction2).sqrt() + s.eps;
  t.u = t.m * s.correction1 / (mean_squares.defined() ? below.unsqueeze(1) : below);
}

/// Weight decay and the part of the step that needs no norms but the mean squares of the rows.
void begin_step(Rows& t, const at::Tensor& mean_squares) {
  const RowStep& s = t.step;
  switch (s.rule) {
    case RowRule::kRowWiseAdagrad:
      t.m = t.m + mean_squares;
      t.w = t.w - s.rate * t.g / (t.m.sqrt() + s.eps).unsqueeze(1);
      return;
    case RowRule::kPartialRowWiseAdam:
      take_moments(t, mean_squares);
      t.w = t.w - s.rate * t.u;
      return;
    case RowRule::kLamb:
    case RowRule::kPartialRowWiseLamb:
      take_moments(t, mean_squares);
      t.u = t.u + s.decay * t.w;
      return;
    default:
      t.u = t.g;
  }
}

/// The rest, of the rules that compare the norms of weights and steps.
void end_step(Rows& t, const at::Tensor& weight_squares, const at::Tensor& step_squares) {
  const RowStep& s = t.step;
  const at::Tensor weight_norm = weight_squares.sqrt();
  const at::Tensor step_norm = step_squares.sqrt();
  if (s.rule == RowRule::kLarsSgd) {
    const at::Tensor below = step_norm + s.decay * weight_norm;
    const at::Tensor rate =
        at::where((weight_norm > 0).logical_and(below > 0), s.rate * s.eta * weight_norm / below,
                  at::full_like(below, s.rate));
    t.m = s.momentum * t.m + rate.unsqueeze(1) * (t.g + s.decay * t.w);
    t.w = t.w - t.m;
    return;
  }
  const at::Tensor ratio = at::where((weight_norm > 0).logical_and(step_norm > 0),
                                     weight_norm / step_norm, at::ones_like(weight_norm));
  t.w = t.w - s.rate * ratio.unsqueeze(1) * t.u;
}

}  // namespace

bool reads_row_norms(OptimizerKind kind) noexcept {
  return kind == OptimizerKind::kRowWiseAdagrad || kind == OptimizerKind::kPartialRowWiseAdam ||
         kind == OptimizerKind::kLamb || kind == OptimizerKind::kPartialRowWiseLamb ||
         kind == OptimizerKind::kLarsSgd;
}

void RowOptimizer::step_cut_rows(const std::vector<RowGradient>& gradients,
                                 const std::vector<std::int64_t>& num_columns, const RowSum& sum) {
  if (!reads_row_norms(state_->options.kind)) return step_rows(gradients);
  const char* operation = "embedding.step_cut_rows";
  TESSERA_CHECK_VALUE(!state_->options.stochastic_rounding, operation,
                      ": rows that are cut cannot be rounded at random as whole ones are.");
  TESSERA_CHECK_VALUE(
      gradients.size() == state_->tables.size() && num_columns.size() == state_->tables.size(),
      operation, ": there are ", gradients.size(), " gradients and ", num_columns.size(),
      " numbers of columns for ", state_->tables.size(), " tables.");
  const at::NoGradGuard no_grad;
  ++state_->num_steps;
  std::vector<Rows> all;
  for (std::size_t i = 0; i < state_->tables.size(); ++i) {
    const State::Rows& table = state_->tables[i];
    Rows t;
    t.step = state_->step_of(i);
    t.rows = gradients[i].rows;
    t.w = table.weight.index_select(0, t.rows).to(at::kFloat);
    const double limit = state_->options.max_gradient;
    t.g = gradients[i].values.to(at::kFloat).clamp(-limit, limit);
    if (table.momentum1.defined()) t.m = table.momentum1.index_select(0, t.rows);
    if (table.momentum2.defined()) t.v = table.momentum2.index_select(0, t.rows);
    if (!is_layerwise(t.step.rule)) {
      if (t.step.is_decoupled) {
        t.w = t.w * (1.0F - t.step.rate * t.step.decay);
      } else if (t.step.decay != 0) {
        t.g = t.g + t.step.decay * t.w;
      }
    }
    all.push_back(std::move(t));
  }
  if (all.empty()) return;
  const RowRule rule = all[0].step.rule;
  std::vector<at::Tensor> mean_squares(all.size());
  if (has_row_squares(rule)) {
    mean_squares = summed(all, sum, [](Rows& t) { return squares(t.g); });
    for (std::size_t i = 0; i < all.size(); ++i) {
      mean_squares[i] = mean_squares[i] / static_cast<double>(num_columns[i]);
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) begin_step(all[i], mean_squares[i]);
  if (is_layerwise(rule)) {
    const auto weights = summed(all, sum, [](Rows& t) { return squares(t.w); });
    const auto steps = summed(all, sum, [](Rows& t) { return squares(t.u); });
    for (std::size_t i = 0; i < all.size(); ++i) end_step(all[i], weights[i], steps[i]);
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    State::Rows& table = state_->tables[i];
    table.weight.detach().index_copy_(0, all[i].rows, all[i].w.to(table.weight.scalar_type()));
    if (table.momentum1.defined()) table.momentum1.index_copy_(0, all[i].rows, all[i].m);
    if (table.momentum2.defined()) table.momentum2.index_copy_(0, all[i].rows, all[i].v);
  }
}

}  // namespace tessera::embedding
