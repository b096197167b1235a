#include "tessera/vocab_parallel/linear.h"

#include <algorithm>
#include <optional>

#include <ATen/Functions.h>

#include "core/autograd.h"
#include "core/kept_memory.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "vocab_parallel/saved_settings.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel {
namespace {

using detail::PassGradients;
using detail::PassResult;
using detail::PassSettings;

constexpr const char* kFunction = "vocab.linear_cross_entropy";
constexpr std::int64_t kDefaultWorkspace = std::int64_t{256} << 20;

/// What forward leaves for backward besides tensors of the context.
struct LinearState : torch::CustomClassHolder {
  LinearState(PassSettings given, comm::Group with)
      : settings(std::move(given)), group(std::move(with)) {}
  PassSettings settings;
  comm::Group group;
  std::int64_t columns_per_part = 1;
  bool is_one_part = true;  // on all ranks
  double softcap = 0.0;
  PassResult result;
  bool kept_is_spent = false;  // the logits that were saved became their gradient
};

/// Note [Parts are columns]
///
/// If the logits do not fit the workspace, they are made some columns (ids) at a time, all rows of
/// them. Then the gradient of a part's weight rows is one product, summed in float32 inside it, and
/// final: no second copy of the weight is needed to add it up. The hidden states' gradient is added
/// up over the parts in float32, which is small. And the ranks exchange once, whatever the number
/// of parts.

std::int64_t largest_of_group(std::int64_t own, const at::Tensor& like, const comm::Group& group,
                              const PassSettings& settings) {
  if (!settings.explicit_columns || group.size() == 1) return own;
  return comm::all_reduce(at::full({1}, own, like.options().dtype(at::kLong).requires_grad(false)),
                          group, comm::Reduction::kMax)
      .item<std::int64_t>();
}

/// Columns of a part, the same on all ranks.
std::int64_t columns_per_part(const at::Tensor& hidden, std::int64_t most_columns,
                              std::optional<std::int64_t> workspace_bytes) {
  const std::int64_t column_bytes =
      std::max<std::int64_t>(hidden.size(0), 1) * static_cast<std::int64_t>(hidden.element_size());
  // Logits no larger than the weight are kept: computing them twice costs more than their room.
  if (!workspace_bytes && hidden.size(0) <= hidden.size(1)) {
    return std::max<std::int64_t>(most_columns, 1);
  }
  return std::clamp<std::int64_t>(workspace_bytes.value_or(kDefaultWorkspace) / column_bytes, 1,
                                  std::max<std::int64_t>(most_columns, 1));
}

/// Adds gradient weight to the float32 `total`.
void add_product(at::Tensor& total, const at::Tensor& gradient, const at::Tensor& weight) {
  if (weight.scalar_type() == at::kFloat) {
    total.addmm_(gradient, weight);
  } else if (weight.is_cuda()) {
    at::addmm_out(total, total, gradient, weight, at::kFloat);
  } else {
    total.add_(at::mm(gradient, weight));
  }
}

/// Note [The gradient of kept logits]
///
/// On one rank, kept logits whose loss is summed or averaged become their gradient while forward
/// reads them: backward then starts with products. That gradient is rounded before it is multiplied
/// by the one from above; float16 would lose small values there, so it waits for backward.

/// Outputs: the loss, reduced or per row; per row log-probability, log-sum-exp, entropy, argmax;
/// empty if not wanted. The last one is the size of the vocabulary.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden,
                               const at::Tensor& weight, const at::Tensor& given_bias,
                               const at::Tensor& labels, const comm::Group& group,
                               const PassSettings& settings, double softcap,
                               std::optional<std::int64_t> workspace_bytes) {
    auto state = c10::make_intrusive<LinearState>(settings, group);
    state->softcap = softcap;
    const at::Tensor bias = given_bias.dim() == 1 ? given_bias : at::Tensor();
    const std::int64_t most_columns = largest_of_group(weight.size(0), hidden, group, settings);
    state->columns_per_part = columns_per_part(hidden, most_columns, workspace_bytes);
    at::Tensor workspace = workspace_for(hidden, weight, *state);
    detail::PartsOfLogits parts;
    parts.num_rows = hidden.size(0);
    parts.held = weight.size(0);
    parts.columns = state->columns_per_part;
    parts.num_parts = std::max<std::int64_t>((most_columns + parts.columns - 1) / parts.columns, 1);
    state->is_one_part = parts.num_parts == 1;
    parts.logits = [&](std::int64_t first, std::int64_t last) {
      return product_of(workspace, hidden, weight, bias, softcap, first, last);
    };
    PassResult& result = state->result;
    result = detail::forward_pass_in_parts(parts, hidden.options(), labels, group, settings);
    // The logits of the only part, or already their gradient, are for the first backward.
    const bool is_kept = settings.needs_gradient && weight.size(0) <= state->columns_per_part;

    context->set_materialize_grads(false);
    context->save_for_backward({hidden, weight, labels, bias, is_kept ? workspace : at::Tensor()});
    variable_list outputs;
    variable_list constants;
    for (const at::Tensor& value :
         {result.loss, result.scores.log_probability, result.scores.log_sum_exp,
          result.scores.entropy, result.scores.argmax}) {
      outputs.push_back(value.defined() ? value.clone()
                                        : at::empty({0}, hidden.options().dtype(at::kFloat)));
      if (!value.defined() || outputs.size() == 5) constants.push_back(outputs.back());
    }
    outputs.push_back(result.vocab.clone());
    constants.push_back(outputs.back());
    context->mark_non_differentiable(constants);
    result.loss = at::Tensor();
    result.scores = {};
    carry(context, std::move(state));
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto state = carried<LinearState>(context);
    const PassSettings& settings = state->settings;
    detail::check_first_gradient(settings);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& hidden = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& labels = saved[2];
    const at::Tensor& bias = saved[3];
    const bool need_bias = bias.defined() && context->needs_input_grad(2);
    const bool need_hidden = context->needs_input_grad(0);
    const bool need_weight = context->needs_input_grad(1);
    const std::int64_t step = state->columns_per_part;
    const std::int64_t num_valid = settings.num_valid;
    // All ranks add up their gradients in one type, whatever the number of their own parts.
    const bool is_whole = state->is_one_part;

    at::Tensor hidden_gradient;
    if (need_hidden && is_whole) {
      hidden_gradient = at::empty_like(hidden);
    } else if (need_hidden) {
      hidden_gradient = at::zeros(hidden.sizes(), hidden.options().dtype(at::kFloat));
    }
    at::Tensor weight_gradient = need_weight ? at::empty_like(weight) : at::Tensor();
    at::Tensor bias_gradient = need_bias ? at::zeros_like(bias) : at::Tensor();
    const bool is_kept = saved[4].defined() && !state->kept_is_spent;
    state->kept_is_spent = true;  // a second backward computes them again
    // Writing them must not look like a change of what was saved.
    at::Tensor workspace =
        is_kept ? saved[4].variable_data() : workspace_for(hidden, weight, *state);
    const PassGradients of{gradients[0], gradients[1], gradients[2], gradients[3]};
    std::optional<comm::Awaitable<at::Tensor>> sum;
    for (std::int64_t first = 0; first == 0 || first < num_valid; first += step) {
      const std::int64_t last = std::min(first + step, num_valid);
      at::Tensor gradient;
      if (is_kept && state->result.gradient_is_written) {
        gradient = detail::scale_gradient(part_of(workspace, last - first), of.loss);
      } else {
        const at::Tensor logits =
            is_kept ? part_of(workspace, last - first)
                    : product_of(workspace, hidden, weight, bias, state->softcap, first, last);
        at::Tensor slope;
        if (state->softcap != 0.0) {
          slope = logits.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
          slope.div_(state->softcap).square_().neg_().add_(1.0);
        }
        PassSettings own = settings;
        own.columns = {settings.columns.start + first, settings.columns.start + last};
        own.num_valid = last - first;
        gradient = detail::backward_pass(logits, labels, state->result, of, own,
                                         /*in_place=*/true);
        if (slope.defined()) gradient.mul_(slope);
      }
      if (need_bias) bias_gradient.slice(0, first, last).copy_(gradient.sum(0, false, at::kFloat));
      const at::Tensor rows = weight.slice(0, first, last);
      if (need_hidden && is_whole) {
        at::mm_out(hidden_gradient, gradient, rows);
      } else if (need_hidden) {
        add_product(hidden_gradient, gradient, rows);
      }
      // Travels while the weight's gradient is computed.
      if (need_hidden && last == num_valid && state->group.size() > 1) {
        sum = comm::all_reduce_async_(hidden_gradient, state->group);
      }
      if (need_weight) {
        at::Tensor piece = weight_gradient.slice(0, first, last);
        at::mm_out(piece, gradient.t(), hidden);
      }
    }
    if (need_weight) weight_gradient.slice(0, num_valid).zero_();  // padding
    if (sum) sum->wait();
    if (need_hidden) hidden_gradient = hidden_gradient.to(hidden.scalar_type());
    return {hidden_gradient, weight_gradient, bias_gradient, at::Tensor(),
            at::Tensor(),    at::Tensor(),    at::Tensor(),  at::Tensor()};
  }

 private:
  static at::Tensor workspace_for(const at::Tensor& hidden, const at::Tensor& weight,
                                  const LinearState& state) {
    return core::empty_kept_last({hidden.size(0), std::min(state.columns_per_part, weight.size(0))},
                                 hidden.options());
  }

  /// The workspace for so many columns: a narrower last part has its rows closer together.
  static at::Tensor part_of(const at::Tensor& workspace, std::int64_t columns) {
    return workspace.flatten()
        .narrow(0, 0, workspace.size(0) * columns)
        .view({workspace.size(0), columns});
  }

  /// The logits of some ids, in the workspace.
  static at::Tensor product_of(const at::Tensor& workspace, const at::Tensor& hidden,
                               const at::Tensor& weight, const at::Tensor& bias, double softcap,
                               std::int64_t first, std::int64_t last) {
    at::Tensor logits = part_of(workspace, last - first);
    const at::Tensor rows = weight.slice(0, first, last).t();
    if (bias.defined()) {
      at::addmm_out(logits, bias.slice(0, first, last), hidden, rows);
    } else {
      at::mm_out(logits, hidden, rows);
    }
    if (softcap != 0.0) logits.div_(softcap).tanh_().mul_(softcap);
    return logits;
  }
};

void check_inputs(const at::Tensor& hidden, const at::Tensor& weight,
                  const LinearOptions& options) {
  const std::string operation = detail::operation_of(options, kFunction);
  TESSERA_CHECK_VALUE(
      hidden.defined() && hidden.dim() >= 1 && weight.defined() && weight.dim() == 2 &&
          hidden.size(-1) == weight.size(1),
      operation, ": hidden states of shape ", hidden.defined() ? hidden.sizes() : at::IntArrayRef(),
      " do not fit a weight of shape ", weight.defined() ? weight.sizes() : at::IntArrayRef(),
      ". The last dimensions must be equal.");
  TESSERA_CHECK_TYPE(hidden.scalar_type() == weight.scalar_type(), operation,
                     ": the hidden states are ", hidden.scalar_type(), ", the weight is ",
                     weight.scalar_type(), ". Use one type.");
  TESSERA_CHECK_VALUE(options.softcap >= 0.0, operation, ": a softcap of ", options.softcap,
                      " is not possible. Use 0 for none.");
  if (options.local_bias) {
    const at::Tensor& bias = *options.local_bias;
    TESSERA_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == weight.size(0), operation,
                        ": a bias of shape ", bias.sizes(), " does not fit a weight of shape ",
                        weight.sizes(), ". Use one value per column.");
    TESSERA_CHECK_TYPE(bias.scalar_type() == weight.scalar_type(), operation, ": the bias is ",
                       bias.scalar_type(), ", the weight is ", weight.scalar_type(),
                       ". Use one type.");
  }
  TESSERA_CHECK_VALUE(options.workspace_bytes.value_or(1) > 0, operation, ": a workspace of ",
                      options.workspace_bytes.value_or(1), " bytes is not possible.");
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
  PassSettings settings = detail::settings_of(logits, labels, group, options, kFunction);
  TESSERA_CHECK_VALUE(labels.defined(), settings.operation, ": the labels are undefined.");
  settings.tile = 0;
  settings.wanted = wanted;
  detail::set_loss(settings, options);
  // See Note [The gradient of kept logits]
  const bool only_loss =
      options.reduction != Reduction::kNone && !wanted.log_probability && !settings.has_extras();
  const bool may_write = only_loss && options.softcap == 0.0 && hidden.scalar_type() != at::kHalf;
  settings.overwrite = may_write ? Overwrite::kInForward : Overwrite::kNever;
  // Autograd does not take an undefined tensor.
  const at::Tensor bias =
      options.local_bias.value_or(at::empty({0, 0}, hidden.options().requires_grad(false)));
  settings.needs_gradient =
      at::GradMode::is_enabled() &&
      (hidden.requires_grad() || local_weight.requires_grad() || bias.requires_grad());

  detail::check_labels_before(labels, settings);
  at::Tensor flat_labels = detail::flat_labels(labels);
  at::Tensor flat_hidden = hidden.reshape({-1, hidden.size(-1)});
  const std::int64_t num_rows = flat_hidden.size(0);
  at::Tensor kept;
  // Ranks whose labels differ may keep different numbers of tokens, so this cannot wait.
  if (group.size() > 1 && settings.check_labels) {
    PassSettings compared = settings;
    compared.label_digest = detail::digest_of(labels, group, settings);
    detail::vocab_of_ranks(logits, group, compared);
  }
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
  const variable_list rows =
      LinearFunction::apply(flat_hidden, local_weight, bias, flat_labels, group, unchecked,
                            options.softcap, options.workspace_bytes);
  detail::check_labels_after(labels, rows[5], settings);
  const auto shaped = [&](const at::Tensor& of) {
    return spread(of, kept, num_rows).view(labels.sizes());
  };
  CrossEntropyScores scores;
  scores.loss = options.reduction == Reduction::kNone ? shaped(rows[0]) : rows[0];
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
