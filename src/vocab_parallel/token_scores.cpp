#include "tessera/vocab_parallel/token_scores.h"

#include <ATen/MemoryOverlap.h>

#include "core/autograd.h"
#include "tessera/core/check.h"
#include "tessera/vocab_parallel/cross_entropy.h"
#include "vocab_parallel/device.h"
#include "vocab_parallel/logit_pieces.h"
#include "vocab_parallel/saved_settings.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel {
namespace {

using detail::PassResult;
using detail::PassSettings;

constexpr const char* kSpent = "spent";

/// Order of the outputs: loss, log-probability, log-sum-exp, entropy, argmax. One that is not
/// wanted is an empty tensor.
class TokenFunction : public torch::autograd::Function<TokenFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& logits,
                               const at::Tensor& given_labels, const comm::Group& group,
                               const PassSettings& settings) {
    const at::Tensor labels = settings.has_labels ? given_labels : at::Tensor();
    const at::Tensor flat = detail::flat_labels(labels);
    detail::check_labels_before(labels, settings);
    PassResult result = detail::forward_pass(logits.detach(), flat, group, settings);
    detail::check_labels_after(labels, result.vocab, settings);
    at::Tensor kept = logits;
    if (settings.overwrite == Overwrite::kInForward && settings.needs_gradient) {
      if (!result.gradient_is_written) write_gradient(logits, flat, result, settings);
      logits.unsafeGetTensorImpl()->bump_version();
      kept = logits.detach();
    }
    context->set_materialize_grads(false);
    context->save_for_backward(
        {kept, flat, result.maximum, result.sum, result.weighted, result.vocab, result.inverse});
    detail::save_settings(context, settings);
    context->saved_data[kSpent] = false;

    const auto shape = logits.sizes().slice(0, logits.dim() - 1);
    const auto shaped = [&](const at::Tensor& rows) {
      return rows.defined() ? rows.view(shape) : at::empty({0}, result.maximum.options());
    };
    at::Tensor loss = settings.want_loss && settings.reduction != Reduction::kNone
                          ? result.loss
                          : shaped(result.loss);
    variable_list outputs{loss, shaped(result.scores.log_probability),
                          shaped(result.scores.log_sum_exp), shaped(result.scores.entropy),
                          shaped(result.scores.argmax)};
    const WantedScores& wanted = settings.wanted;
    const bool is_wanted[] = {settings.want_loss, wanted.log_probability, wanted.log_sum_exp,
                              wanted.entropy};
    variable_list constants{outputs[4]};
    for (int i = 0; i < 4; ++i) {
      if (!is_wanted[i]) constants.push_back(outputs[i]);
    }
    context->mark_non_differentiable(constants);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const PassSettings& settings = detail::settings_for_gradient(context);
    TORCH_CHECK(!context->saved_data[kSpent].toBool(), settings.operation,
                ": the logits were overwritten by their gradient in an earlier backward. Use "
                "Overwrite::kNever to go back twice.");
    const variable_list saved = context->get_saved_variables();
    at::Tensor logits = saved[0];
    if (settings.overwrite == Overwrite::kInForward) {
      context->saved_data[kSpent] = true;
      return {detail::scale_gradient(logits, gradients[0]), at::Tensor(), at::Tensor(),
              at::Tensor()};
    }
    PassResult result;
    result.maximum = saved[2];
    result.sum = saved[3];
    result.weighted = saved[4];
    result.vocab = saved[5];
    result.inverse = saved[6];
    const bool in_place = settings.overwrite == Overwrite::kInBackward;
    at::Tensor gradient = detail::backward_pass(
        logits, saved[1], result, {gradients[0], gradients[1], gradients[2], gradients[3]},
        settings, in_place);
    if (in_place) {
      context->saved_data[kSpent] = true;
      logits.unsafeGetTensorImpl()->bump_version();
    }
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  // The gradient for an upstream gradient of 1.
  static void write_gradient(const at::Tensor& logits, const at::Tensor& labels,
                             const PassResult& result, const PassSettings& settings) {
    detail::backward_pass(logits.detach(), labels, result,
                          {.loss = at::ones({}, result.maximum.options())}, settings,
                          /*in_place=*/true);
  }
};

void check_combination(const PassSettings& settings) {
  if (settings.overwrite != Overwrite::kInForward) return;
  TESSERA_CHECK_VALUE(settings.want_loss && settings.reduction != Reduction::kNone &&
                          !settings.wanted.log_probability && !settings.has_extras(),
                      settings.operation,
                      ": the gradient can be written in forward only for a loss that is summed or "
                      "averaged, without other scores. Use Overwrite::kInBackward.");
}

CrossEntropyScores run(const at::Tensor& logits, const at::Tensor& labels, const comm::Group& group,
                       PassSettings settings) {
  check_combination(settings);
  settings.needs_gradient = at::GradMode::is_enabled() && logits.requires_grad();
  TESSERA_CHECK_VALUE(settings.overwrite == Overwrite::kNever || !settings.needs_gradient ||
                          at::has_internal_overlap(logits) != at::MemOverlap::Yes,
                      settings.operation, ": logits of strides ", logits.strides(),
                      " share memory, so that their gradients would overwrite each other. Use "
                      "Overwrite::kNever.");
  settings.label_digest = detail::digest_of(labels, group, settings);
  // Autograd does not take an undefined tensor.
  const at::Tensor given = settings.has_labels ? labels : at::empty({0}, at::kLong);
  const variable_list outputs = TokenFunction::apply(logits, given, group, settings);
  CrossEntropyScores scores;
  if (settings.want_loss) scores.loss = outputs[0];
  if (settings.wanted.log_probability) scores.tokens.log_probability = outputs[1];
  if (settings.wanted.log_sum_exp) scores.tokens.log_sum_exp = outputs[2];
  if (settings.wanted.entropy) scores.tokens.entropy = outputs[3];
  if (settings.wanted.argmax) scores.tokens.argmax = outputs[4];
  return scores;
}

}  // namespace

TokenScores token_scores(const at::Tensor& local_logits, const at::Tensor& labels,
                         const comm::Group& group, const WantedScores& wanted,
                         const TokenOptions& options) {
  PassSettings settings =
      detail::settings_of(local_logits, labels, group, options, "vocab.token_scores");
  TESSERA_CHECK_VALUE(labels.defined() || !wanted.log_probability, settings.operation,
                      ": log-probabilities need labels.");
  settings.wanted = wanted;
  return run(local_logits, labels, group, std::move(settings)).tokens;
}

CrossEntropyScores cross_entropy_with_scores(const at::Tensor& local_logits,
                                             const at::Tensor& labels, const comm::Group& group,
                                             const WantedScores& wanted,
                                             const CrossEntropyOptions& options) {
  PassSettings settings =
      detail::settings_of(local_logits, labels, group, options, "vocab.cross_entropy");
  TESSERA_CHECK_VALUE(labels.defined(), settings.operation, ": the labels are undefined.");
  detail::set_loss(settings, options);
  settings.wanted = wanted;
  return run(local_logits, labels, group, std::move(settings));
}

at::Tensor cross_entropy(const at::Tensor& local_logits, const at::Tensor& labels,
                         const comm::Group& group, const CrossEntropyOptions& options) {
  return cross_entropy_with_scores(local_logits, labels, group, {}, options).loss;
}

}  // namespace tessera::vocab_parallel
