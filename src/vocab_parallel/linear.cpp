#include "tessera/vocab_parallel/linear.h"

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel {
namespace {

using detail::PassGradients;
using detail::PassResult;
using detail::PassSettings;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What forward leaves for backward besides tensors of the context.
struct LinearState : torch::CustomClassHolder {
  LinearState(PassSettings given, comm::Group with)
      : settings(std::move(given)), group(std::move(with)) {}
  PassSettings settings;
  comm::Group group;
  std::int64_t rows_per_chunk = 1;
  std::vector<PassResult> chunks;
  at::Tensor kept_logits;  // of the only chunk, until backward has turned them into their gradient
};

/// The same on all ranks: each chunk is exchanged.
std::int64_t rows_per_chunk(const at::Tensor& hidden, const at::Tensor& weight,
                            const PassSettings& settings, const comm::Group& group,
                            std::int64_t workspace_bytes) {
  std::int64_t columns = weight.size(0);
  if (settings.explicit_columns && group.size() > 1) {
    columns = comm::all_reduce(at::full({1}, columns, hidden.options().dtype(at::kLong)), group,
                               comm::Reduction::kMax)
                  .item<std::int64_t>();
  }
  const std::int64_t row_bytes =
      std::max<std::int64_t>(columns, 1) * static_cast<std::int64_t>(hidden.element_size());
  return std::clamp<std::int64_t>(workspace_bytes / row_bytes, 1,
                                  std::max<std::int64_t>(hidden.size(0), 1));
}

/// Adds gradient^T hidden to the float32 `total`.
void add_product(at::Tensor& total, const at::Tensor& gradient, const at::Tensor& hidden) {
  if (hidden.scalar_type() == at::kFloat) {
    total.addmm_(gradient.t(), hidden);
  } else if (hidden.is_cuda()) {
    at::addmm_out(total, total, gradient.t(), hidden, at::kFloat);
  } else {
    total.add_(at::mm(gradient.t(), hidden));
  }
}

at::Tensor slice_of(const at::Tensor& rows, std::int64_t first, std::int64_t last) {
  return rows.defined() ? rows.slice(0, first, last) : rows;
}

/// Outputs per row: loss, log-probability, log-sum-exp, entropy, argmax; empty if not wanted. The
/// last one is the size of the vocabulary.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden,
                               const at::Tensor& weight, const at::Tensor& labels,
                               const comm::Group& group, const PassSettings& settings,
                               std::int64_t workspace_bytes) {
    auto state = c10::make_intrusive<LinearState>(settings, group);
    state->rows_per_chunk = rows_per_chunk(hidden, weight, settings, group, workspace_bytes);
    const std::int64_t num_rows = hidden.size(0);
    const std::int64_t step = state->rows_per_chunk;
    at::Tensor workspace =
        detail::empty_gradient({std::min(step, num_rows), weight.size(0)}, hidden.options());
    std::vector<variable_list> pieces;
    for (std::int64_t first = 0; first == 0 || first < num_rows; first += step) {
      const std::int64_t last = std::min(first + step, num_rows);
      at::Tensor logits = workspace.slice(0, 0, last - first);
      at::mm_out(logits, hidden.slice(0, first, last), weight.t());
      PassResult result =
          detail::forward_pass(logits, labels.slice(0, first, last), group, settings);
      pieces.push_back({result.loss, result.scores.log_probability, result.scores.log_sum_exp,
                        result.scores.entropy, result.scores.argmax});
      result.loss = at::Tensor();
      result.scores = {};
      state->chunks.push_back(std::move(result));
    }
    if (settings.needs_gradient && num_rows <= step) state->kept_logits = workspace;

    context->set_materialize_grads(false);
    context->save_for_backward({hidden, weight, labels});
    variable_list outputs;
    variable_list constants;
    for (std::size_t i = 0; i < 5; ++i) {
      std::vector<at::Tensor> parts;
      for (const auto& piece : pieces) {
        if (piece[i].defined()) parts.push_back(piece[i]);
      }
      outputs.push_back(parts.empty()       ? at::empty({0}, hidden.options().dtype(at::kFloat))
                        : parts.size() == 1 ? parts[0].clone()
                                            : at::cat(parts));
      if (parts.empty() || i == 4) constants.push_back(outputs.back());
    }
    outputs.push_back(state->chunks[0].vocab.clone());
    constants.push_back(outputs.back());
    context->mark_non_differentiable(constants);
    context->saved_data["state"] = c10::IValue::make_capsule(std::move(state));
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto state =
        c10::static_intrusive_pointer_cast<LinearState>(context->saved_data["state"].toCapsule());
    const PassSettings& settings = state->settings;
    TORCH_CHECK(!at::GradMode::is_enabled(), settings.operation,
                ": gradients of gradients are not available. Call backward without create_graph.");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& hidden = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& labels = saved[2];
    const bool need_hidden = context->needs_input_grad(0);
    const bool need_weight = context->needs_input_grad(1);
    const std::int64_t num_rows = hidden.size(0);
    const std::int64_t step = state->rows_per_chunk;
    const bool is_whole = num_rows <= step;

    at::Tensor hidden_gradient = need_hidden ? at::empty_like(hidden) : at::Tensor();
    at::Tensor weight_gradient;
    if (need_weight && !is_whole) {
      weight_gradient = at::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
    }
    at::Tensor workspace = state->kept_logits;
    const bool is_kept = workspace.defined();
    state->kept_logits = at::Tensor();  // a second backward computes them again
    if (!is_kept) {
      workspace =
          detail::empty_gradient({std::min(step, num_rows), weight.size(0)}, hidden.options());
    }
    std::vector<comm::Awaitable<at::Tensor>> sums;
    for (std::int64_t first = 0; first == 0 || first < num_rows; first += step) {
      const std::int64_t last = std::min(first + step, num_rows);
      const at::Tensor rows = hidden.slice(0, first, last);
      at::Tensor logits = workspace.slice(0, 0, last - first);
      if (!is_kept) at::mm_out(logits, rows, weight.t());
      const PassGradients of{
          slice_of(gradients[0], first, last), slice_of(gradients[1], first, last),
          slice_of(gradients[2], first, last), slice_of(gradients[3], first, last)};
      const at::Tensor gradient =
          detail::backward_pass(logits, labels.slice(0, first, last),
                                state->chunks[static_cast<std::size_t>(first / step)], of, settings,
                                /*in_place=*/true);
      if (need_hidden) {
        at::Tensor piece = hidden_gradient.slice(0, first, last);
        at::mm_out(piece, gradient, weight);
        // Travels while the weight's gradient is computed.
        if (state->group.size() > 1) sums.push_back(comm::all_reduce_async_(piece, state->group));
      }
      if (need_weight && is_whole) {
        weight_gradient = at::mm(gradient.t(), rows);
      } else if (need_weight) {
        add_product(weight_gradient, gradient, rows);
      }
    }
    for (auto& sum : sums) sum.wait();
    if (need_weight) weight_gradient = weight_gradient.to(weight.scalar_type());
    return {hidden_gradient, weight_gradient, at::Tensor(),
            at::Tensor(),    at::Tensor(),    at::Tensor()};
  }
};

void check_inputs(const at::Tensor& hidden, const at::Tensor& weight,
                  const LinearOptions& options) {
  TESSERA_CHECK_VALUE(hidden.defined() && hidden.dim() >= 1 && weight.defined() &&
                          weight.dim() == 2 && hidden.size(-1) == weight.size(1),
                      options.operation, ": hidden states of shape ",
                      hidden.defined() ? hidden.sizes() : at::IntArrayRef(),
                      " do not fit a weight of shape ",
                      weight.defined() ? weight.sizes() : at::IntArrayRef(),
                      ". The last dimensions must be equal.");
  TESSERA_CHECK_TYPE(hidden.scalar_type() == weight.scalar_type(), options.operation,
                     ": the hidden states are ", hidden.scalar_type(), ", the weight is ",
                     weight.scalar_type(), ". Use one type.");
  TESSERA_CHECK_VALUE(options.workspace_bytes > 0, options.operation, ": a workspace of ",
                      options.workspace_bytes, " bytes is not possible.");
}

/// Rows of all tokens from those of the tokens with a label; the others are 0.
at::Tensor spread(const at::Tensor& rows, const at::Tensor& kept, std::int64_t num_rows) {
  if (!rows.defined() || !kept.defined()) return rows;
  return at::zeros({num_rows}, rows.options()).index_put({kept}, rows);
}

}  // namespace

CrossEntropyScores linear_cross_entropy_with_scores(
    const at::Tensor& hidden, const at::Tensor& local_weight, const at::Tensor& labels,
    const comm::Group& group, const WantedScores& wanted, const LinearOptions& options) {
  check_inputs(hidden, local_weight, options);
  auto logits_shape = hidden.sizes().vec();
  logits_shape.back() = local_weight.size(0);
  // A tensor without memory: the checks look at shapes and types only.
  const at::Tensor logits =
      at::empty({1}, hidden.options().requires_grad(false)).expand(logits_shape);
  PassSettings settings = detail::settings_of(logits, labels, group, options);
  TESSERA_CHECK_VALUE(labels.defined(), settings.operation, ": the labels are undefined.");
  settings.tile = 0;
  settings.overwrite = Overwrite::kNever;
  settings.wanted = wanted;
  settings.want_loss = true;
  settings.reduction = Reduction::kNone;
  settings.shape.label_smoothing = options.label_smoothing;
  settings.shape.z_loss = options.z_loss;
  settings.needs_gradient =
      at::GradMode::is_enabled() && (hidden.requires_grad() || local_weight.requires_grad());

  at::Tensor flat_labels = detail::flat_labels(labels);
  at::Tensor flat_hidden = hidden.reshape({-1, hidden.size(-1)});
  const std::int64_t num_rows = flat_hidden.size(0);
  at::Tensor kept;
  // Other scores are wanted for every token.
  if (settings.check_labels && !settings.has_extras()) {
    kept = at::nonzero(flat_labels != options.ignore_index).squeeze(1);
    if (kept.numel() == num_rows) {
      kept = at::Tensor();
    } else {
      flat_hidden = flat_hidden.index_select(0, kept);
      flat_labels = flat_labels.index_select(0, kept);
    }
  }
  PassSettings unchecked = settings;
  unchecked.check_labels = false;
  const variable_list rows = LinearFunction::apply(flat_hidden, local_weight, flat_labels, group,
                                                   unchecked, options.workspace_bytes);
  if (settings.check_labels) {
    detail::check_label_range(labels, rows[5].item<std::int64_t>(), settings);
  }
  const auto shaped = [&](const at::Tensor& of) {
    return spread(of, kept, num_rows).view(labels.sizes());
  };
  CrossEntropyScores scores;
  if (options.reduction == Reduction::kNone) {
    scores.loss = shaped(rows[0]);
  } else {
    scores.loss = rows[0].sum();
    if (options.reduction == Reduction::kMean) {
      scores.loss = scores.loss / (flat_labels != options.ignore_index).sum().clamp_min(1);
    }
  }
  if (wanted.log_probability) scores.tokens.log_probability = shaped(rows[1]);
  if (wanted.log_sum_exp) scores.tokens.log_sum_exp = shaped(rows[2]);
  if (wanted.entropy) scores.tokens.entropy = shaped(rows[3]);
  if (wanted.argmax) scores.tokens.argmax = shaped(rows[4]);
  return scores;
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& local_weight,
                                const at::Tensor& labels, const comm::Group& group,
                                const LinearOptions& options) {
  return linear_cross_entropy_with_scores(hidden, local_weight, labels, group, {}, options).loss;
}

}  // namespace tessera::vocab_parallel
