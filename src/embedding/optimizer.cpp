#include "tessera/embedding/optimizer.h"

#include <algorithm>
#include <cmath>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "embedding/row_cache.h"
#include "embedding/row_state.h"
#include "embedding/table_pass.h"
#include "tessera/core/check.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::embedding {
namespace {

using kernels::RowRule;

RowRule rule_of(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return RowRule::kSgd;
    case OptimizerKind::kAdagrad:
      return RowRule::kAdagrad;
    case OptimizerKind::kRowWiseAdagrad:
      return RowRule::kRowWiseAdagrad;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return RowRule::kAdam;
    case OptimizerKind::kPartialRowWiseAdam:
      return RowRule::kPartialRowWiseAdam;
    case OptimizerKind::kLamb:
      return RowRule::kLamb;
    case OptimizerKind::kPartialRowWiseLamb:
      return RowRule::kPartialRowWiseLamb;
    case OptimizerKind::kLarsSgd:
      return RowRule::kLarsSgd;
  }
  TESSERA_INTERNAL_ASSERT(false, "there is no such optimizer");
}

at::Tensor full_state(const at::Tensor& weight, bool per_element, double value) {
  const std::int64_t rows = weight.size(0);
  const std::int64_t columns = weight.size(1);
  // One number per row stays in the GPU's memory; as much as the row goes where the row is.
  const auto make = detail::is_mapped(weight) ? mapped_rows : empty_rows;
  at::Tensor state = per_element ? make(rows, columns, at::kFloat, weight.device())
                                 : empty_rows(rows, 1, at::kFloat, weight.device()).reshape({rows});
  return state.fill_(value);
}

}  // namespace

std::string_view name_of(OptimizerKind kind) noexcept {
  switch (kind) {
    case OptimizerKind::kSgd:
      return "SGD";
    case OptimizerKind::kAdagrad:
      return "ADAGRAD";
    case OptimizerKind::kRowWiseAdagrad:
      return "ROWWISE_ADAGRAD";
    case OptimizerKind::kAdam:
      return "ADAM";
    case OptimizerKind::kAdamW:
      return "ADAMW";
    case OptimizerKind::kPartialRowWiseAdam:
      return "PARTIAL_ROWWISE_ADAM";
    case OptimizerKind::kLamb:
      return "LAMB";
    case OptimizerKind::kPartialRowWiseLamb:
      return "PARTIAL_ROWWISE_LAMB";
    case OptimizerKind::kLarsSgd:
      return "LARS_SGD";
  }
  return "?";
}

void check_options(std::string_view operation, const OptimizerOptions& options) {
  const auto check = [&](bool is_right, const char* name, double value, const char* range) {
    TESSERA_CHECK_VALUE(is_right, operation, ": ", name, " is ", value, "; it must be ", range,
                        ".");
  };
  const auto is_rate = [](double value) { return std::isfinite(value) && value >= 0; };
  const auto is_beta = [](double value) { return value >= 0 && value < 1; };
  check(is_rate(options.learning_rate), "learning_rate", options.learning_rate,
        "finite and not negative");
  check(is_rate(options.eps), "eps", options.eps, "finite and not negative");
  check(is_beta(options.beta1), "beta1", options.beta1, "at least 0 and below 1");
  check(is_beta(options.beta2), "beta2", options.beta2, "at least 0 and below 1");
  check(is_rate(options.weight_decay), "weight_decay", options.weight_decay,
        "finite and not negative");
  check(is_rate(options.momentum), "momentum", options.momentum, "finite and not negative");
  check(is_rate(options.eta), "eta", options.eta, "finite and not negative");
  check(is_rate(options.initial_accumulator), "initial_accumulator", options.initial_accumulator,
        "finite and not negative");
  check(options.max_gradient > 0, "max_gradient", options.max_gradient, "greater than 0");
}

namespace detail {

kernels::TableRows rows_of(const at::Tensor& weight) {
  kernels::TableRows rows;
  rows.element = weight.scalar_type() == at::kHalf       ? kernels::Element::kFloat16
                 : weight.scalar_type() == at::kBFloat16 ? kernels::Element::kBFloat16
                                                         : kernels::Element::kFloat32;
  rows.data = weight.data_ptr();
  rows.num_rows = weight.size(0);
  rows.num_columns = weight.size(1);
  return rows;
}

void check_weight(std::string_view operation, const std::string& name, const at::Tensor& weight) {
  TESSERA_CHECK_VALUE(weight.defined() && weight.dim() == 2 && weight.is_contiguous(), operation,
                      ": the weights of table '", name,
                      "' must be a contiguous tensor [rows, columns].");
  TESSERA_CHECK_TYPE(weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kHalf ||
                         weight.scalar_type() == at::kBFloat16,
                     operation, ": the weights of table '", name, "' are ", weight.scalar_type(),
                     "; rows that train are float32, float16 or bfloat16.");
  TESSERA_CHECK_VALUE(weight.size(1) > 0, operation, ": table '", name, "' has no columns.");
  TESSERA_CHECK_VALUE(weight.size(0) < (std::int64_t{1} << 32), operation, ": table '", name,
                      "' has ", weight.size(0), " rows; there may be 4294967295.");
}

}  // namespace detail

kernels::RowStep RowOptimizer::State::step_of(std::size_t table) const {
  const auto corrected = [&](double beta) {
    return static_cast<float>(1.0 / (1.0 - std::pow(beta, static_cast<double>(num_steps))));
  };
  kernels::RowStep step;
  step.rule = rule_of(options.kind);
  step.is_decoupled = options.kind == OptimizerKind::kAdamW ||
                      options.weight_decay_mode == WeightDecayMode::kDecoupled;
  step.is_stochastic = options.stochastic_rounding;
  step.rate = static_cast<float>(options.learning_rate);
  step.eps = static_cast<float>(options.eps);
  step.beta1 = static_cast<float>(options.beta1);
  step.beta2 = static_cast<float>(options.beta2);
  step.rest1 = static_cast<float>(1.0 - options.beta1);
  step.rest2 = static_cast<float>(1.0 - options.beta2);
  step.correction1 = corrected(options.beta1);
  step.correction2 = corrected(options.beta2);
  step.decay = static_cast<float>(options.weight_decay);
  step.momentum = static_cast<float>(options.momentum);
  step.eta = static_cast<float>(options.eta);
  step.key = (options.seed * 0x9E3779B97F4A7C15U + static_cast<std::uint64_t>(num_steps)) *
                 0xD1B54A32D192ED03U +
             table;
  return step;
}

kernels::RowState RowOptimizer::State::state_of(std::size_t table) const {
  const Rows& rows = tables[table];
  return {rows.momentum1.defined() ? rows.momentum1.data_ptr<float>() : nullptr,
          rows.momentum2.defined() ? rows.momentum2.data_ptr<float>() : nullptr};
}

RowOptimizer::RowOptimizer(std::vector<std::pair<std::string, at::Tensor>> weights,
                           OptimizerOptions options)
    : state_(std::make_shared<State>()) {
  const char* operation = "embedding.optimizer";
  check_options(operation, options);
  const RowRule rule = rule_of(options.kind);
  const bool is_adagrad = rule == RowRule::kAdagrad || rule == RowRule::kRowWiseAdagrad;
  for (auto& [name, weight] : weights) {
    detail::check_weight(operation, name, weight);
    TESSERA_CHECK_VALUE(weight.device() == weights.front().second.device(), operation, ": table '",
                        name, "' is on ", weight.device(), ", table '", weights.front().first,
                        "' is on ", weights.front().second.device(), ".");
    State::Rows rows{
        .name = name, .weight = weight, .momentum1 = {}, .momentum2 = {}, .is_stepped = {}};
    if (rule != RowRule::kSgd) {
      rows.momentum1 = full_state(weight, kernels::has_full_momentum1(rule),
                                  is_adagrad ? options.initial_accumulator : 0.0);
    }
    if (kernels::has_momentum2(rule)) {
      rows.momentum2 = full_state(weight, kernels::has_full_momentum2(rule), 0.0);
    }
    state_->tables.push_back(std::move(rows));
  }
  state_->options = options;
}

namespace {

/// Remembers that `rows` were stepped; undefined means all.
void note_rows(const RowOptimizer::State::Rows& table, const at::Tensor& rows) {
  if (!table.is_stepped.defined()) return;
  if (rows.defined()) {
    table.is_stepped.index_fill_(0, rows, true);
  } else {
    table.is_stepped.fill_(true);
  }
}

}  // namespace

void RowOptimizer::step() {
  const at::NoGradGuard no_grad;
  ++state_->num_steps;
  const auto limit = static_cast<float>(state_->options.max_gradient);
  for (std::size_t i = 0; i < state_->tables.size(); ++i) {
    const State::Rows& table = state_->tables[i];
    at::Tensor grad = table.weight.grad();
    if (!grad.defined()) continue;
    at::Tensor rows;
    if (grad.is_sparse()) {
      grad = grad.coalesce();
      rows = grad.indices()[0].contiguous();
      grad = grad.values();
    }
    detail::step_rows(detail::rows_of(table.weight), state_->state_of(i), state_->step_of(i), rows,
                      grad.to(at::kFloat).contiguous(), limit);
    note_rows(table, rows);
  }
}

void RowOptimizer::step_rows(const std::vector<RowGradient>& gradients) {
  TESSERA_CHECK_VALUE(gradients.size() == state_->tables.size(), "embedding.step_rows: there are ",
                      gradients.size(), " gradients for ", state_->tables.size(), " tables.");
  const at::NoGradGuard no_grad;
  ++state_->num_steps;
  const auto limit = static_cast<float>(state_->options.max_gradient);
  for (std::size_t i = 0; i < state_->tables.size(); ++i) {
    if (gradients[i].values.numel() == 0) continue;
    detail::step_rows(detail::rows_of(state_->tables[i].weight), state_->state_of(i),
                      state_->step_of(i), gradients[i].rows,
                      gradients[i].values.to(at::kFloat).contiguous(), limit);
    note_rows(state_->tables[i], gradients[i].rows);
  }
}

void RowOptimizer::zero_grad() {
  for (State::Rows& table : state_->tables) table.weight.mutable_grad() = at::Tensor();
}

namespace {

/// The gradients of all tables, with every row once; the values of sparse ones.
std::vector<at::Tensor> summed_gradients(RowOptimizer::State& state) {
  std::vector<at::Tensor> found;
  for (RowOptimizer::State::Rows& table : state.tables) {
    at::Tensor& grad = table.weight.mutable_grad();
    if (!grad.defined()) continue;
    if (grad.is_sparse()) {
      if (!grad.is_coalesced()) grad = grad.coalesce();
      found.push_back(grad._values());
    } else {
      found.push_back(grad);
    }
  }
  return found;
}

}  // namespace

double RowOptimizer::clip_grad_norm(double max_norm) {
  TESSERA_CHECK_VALUE(max_norm >= 0, "embedding.clip_grad_norm: max_norm is ", max_norm,
                      "; it must not be negative.");
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> grads = summed_gradients(*state_);
  double total = 0;
  for (const at::Tensor& grad : grads) {
    total += grad.to(at::kDouble).pow(2).sum().item<double>();
  }
  const double norm = std::sqrt(total);
  if (norm > max_norm) {
    for (const at::Tensor& grad : grads) grad.mul_(max_norm / norm);
  }
  return norm;
}

void RowOptimizer::clip_grad_value(double limit) {
  TESSERA_CHECK_VALUE(limit >= 0, "embedding.clip_grad_value: the limit is ", limit,
                      "; it must not be negative.");
  const at::NoGradGuard no_grad;
  for (const at::Tensor& grad : summed_gradients(*state_)) grad.clamp_(-limit, limit);
}

const OptimizerOptions& RowOptimizer::options() const noexcept { return state_->options; }

void RowOptimizer::set_learning_rate(double learning_rate) {
  OptimizerOptions changed = state_->options;
  changed.learning_rate = learning_rate;
  check_options("embedding.set_learning_rate", changed);
  state_->options = changed;
}

std::int64_t RowOptimizer::num_steps() const noexcept { return state_->num_steps; }

std::map<std::string, at::Tensor> RowOptimizer::state_dict() const {
  std::map<std::string, at::Tensor> state;
  for (const State::Rows& table : state_->tables) {
    if (table.momentum1.defined()) state[table.name + ".momentum1"] = table.momentum1;
    if (table.momentum2.defined()) state[table.name + ".momentum2"] = table.momentum2;
  }
  state["step"] = at::full({}, state_->num_steps, at::kLong);
  return state;
}

void RowOptimizer::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  const char* operation = "embedding.load_state_dict";
  const std::map<std::string, at::Tensor> own = state_dict();
  for (const auto& [name, tensor] : own) {
    const auto given = state.find(name);
    TESSERA_CHECK_VALUE(given != state.end(), operation, ": '", name, "' is missing.");
    TESSERA_CHECK_VALUE(given->second.sizes() == tensor.sizes(), operation, ": '", name,
                        "' has shape ", given->second.sizes(), ", it should have ", tensor.sizes(),
                        ".");
  }
  for (const auto& [name, tensor] : state) {
    TESSERA_CHECK_VALUE(own.contains(name), operation, ": '", name, "' is nothing this optimizer (",
                        name_of(state_->options.kind), ") has a state for.");
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) {
    if (name != "step") at::Tensor(tensor).copy_(state.at(name));
  }
  state_->num_steps = state.at("step").item<std::int64_t>();
}

bool RowOptimizer::has_table(const std::string& table) const noexcept {
  return std::any_of(state_->tables.begin(), state_->tables.end(),
                     [&](const State::Rows& rows) { return rows.name == table; });
}

void RowOptimizer::track_rows() {
  for (State::Rows& table : state_->tables) {
    if (table.is_stepped.defined()) continue;
    table.is_stepped = at::zeros({table.weight.size(0)},
                                 table.weight.options().dtype(at::kBool).requires_grad(false));
  }
}

at::Tensor RowOptimizer::stepped_rows(const std::string& table) const {
  for (const State::Rows& rows : state_->tables) {
    if (rows.name != table) continue;
    return rows.is_stepped.defined() ? rows.is_stepped.nonzero().squeeze(1) : at::Tensor();
  }
  TESSERA_CHECK_INDEX(false, "embedding.stepped_rows: there is no table '", table, "'.");
}

void RowOptimizer::forget_rows() {
  for (State::Rows& table : state_->tables) {
    if (table.is_stepped.defined()) table.is_stepped.zero_();
  }
}

}  // namespace tessera::embedding
