#include <ATen/Functions.h>

#include "core/autograd.h"
#include "core/kept_memory.h"
#include "tessera/core/check.h"
#include "tessera/vocab_parallel/log_probabilities.h"
#include "vocab_parallel/row_chunks.h"
#include "vocab_parallel/saved_settings.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel {
namespace {

using detail::chunk_rows;
using detail::flat_rows;
using detail::log_softmax_rows;
using detail::PassSettings;

class SoftCrossEntropy : public torch::autograd::Function<SoftCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& target_logits, const comm::Group& group,
                            const PassSettings& settings) {
    const at::Tensor rows = flat_rows(logits.detach());
    const at::Tensor target_rows = flat_rows(target_logits.detach());
    const auto own = detail::forward_pass(rows, at::Tensor(), group, settings);
    const auto target = detail::forward_pass(target_rows, at::Tensor(), group, settings);
    const at::Tensor own_log_sum = own.sum.log();
    const at::Tensor target_log_sum = target.sum.log();
    at::Tensor product = at::zeros({rows.size(0)}, own_log_sum.options());
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      const at::Tensor p =
          log_softmax_rows(target_rows, first, last, target.maximum, target_log_sum, settings)
              .exp_();
      const at::Tensor log_q =
          log_softmax_rows(rows, first, last, own.maximum, own_log_sum, settings);
      // A probability of 0 counts 0, whatever its logarithm is.
      product.slice(0, first, last).copy_((p * log_q).masked_fill_(p == 0, 0.0).sum(1));
    });
    context->save_for_backward(
        {logits, target_logits, own.maximum, own_log_sum, target.maximum, target_log_sum});
    detail::save_settings(context, settings);
    return detail::sum_over_group(product, group)
        .neg()
        .view(logits.sizes().slice(0, logits.dim() - 1));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const PassSettings& settings = detail::settings_for_gradient(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor rows = flat_rows(saved[0]);
    const at::Tensor target_rows = flat_rows(saved[1]);
    const at::Tensor upstream =
        gradients[0].to(at::kFloat).reshape({rows.size(0), 1}) * settings.shape.scale;
    at::Tensor gradient = core::empty_kept_last(saved[0].sizes(), saved[0].options());
    at::Tensor gradient_rows = gradient.view(rows.sizes());
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      at::Tensor q = log_softmax_rows(rows, first, last, saved[2], saved[3], settings).exp_();
      q.sub_(log_softmax_rows(target_rows, first, last, saved[4], saved[5], settings).exp_())
          .mul_(upstream.slice(0, first, last));
      gradient_rows.slice(0, first, last).slice(1, 0, settings.num_valid).copy_(q);
    });
    gradient_rows.slice(1, settings.num_valid, rows.size(1)).zero_();
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor soft_cross_entropy(const at::Tensor& local_logits, const at::Tensor& local_target_logits,
                              const comm::Group& group, const TokenOptions& options) {
  constexpr const char* kFunction = "vocab.soft_cross_entropy";
  PassSettings settings =
      detail::settings_of(local_logits, at::Tensor(), group, options, kFunction);
  detail::settings_of(local_target_logits, at::Tensor(), group, options, kFunction);
  TESSERA_CHECK_VALUE(local_logits.sizes() == local_target_logits.sizes(), settings.operation,
                      ": the logits have shape ", local_logits.sizes(), ", the target logits ",
                      local_target_logits.sizes(), ". They must be equal.");
  settings.overwrite = Overwrite::kNever;
  return SoftCrossEntropy::apply(local_logits, local_target_logits, group, settings);
}

}  // namespace tessera::vocab_parallel
