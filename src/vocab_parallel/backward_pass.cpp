#include <cstdint>
#include <utility>

#include <ATen/Functions.h>

#include "core/kept_memory.h"
#include "tessera/core/check.h"
#include "vocab_parallel/device.h"
#include "vocab_parallel/logit_pieces.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel::detail {
namespace {

template <typename T>
const T* const_pointer_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

/// One row gradient per token, contiguous float32; undefined stays so.
at::Tensor flat_gradient(const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  return gradient.to(at::kFloat).reshape(-1).contiguous();
}

}  // namespace

at::Tensor scale_gradient(at::Tensor gradient, const at::Tensor& upstream) {
  if (!upstream.defined()) return gradient.zero_();
  if (gradient.is_cuda() && gradient.is_non_overlapping_and_dense()) {
    const at::Tensor factor = upstream.to(at::kFloat);
    cuda_scale(element_of(gradient), gradient.data_ptr(), gradient.numel(),
               factor.const_data_ptr<float>());
    return gradient;
  }
  if (gradient.is_cpu() && upstream.item<float>() == 1.0F) return gradient;
  return gradient.mul_(upstream);
}

at::Tensor backward_pass(const at::Tensor& logits, const at::Tensor& labels,
                         const PassResult& saved, const PassGradients& gradients,
                         const PassSettings& settings, bool in_place) {
  const std::int64_t num_rows = saved.maximum.numel();
  const std::int64_t held = logits.size(-1);
  // A gradient of the reduced loss is one number, and so is an expanded one: stride 0 reads both.
  at::Tensor of_loss = gradients.loss;
  if (of_loss.defined()) {
    const bool is_one = of_loss.numel() == 1 && settings.reduction != Reduction::kNone;
    of_loss = is_one ? of_loss.to(at::kFloat) : flat_gradient(of_loss);
  }
  const at::Tensor of_label = flat_gradient(gradients.log_probability);
  const at::Tensor of_log_sum_exp = flat_gradient(gradients.log_sum_exp);
  const at::Tensor of_entropy = flat_gradient(gradients.entropy);

  const at::Tensor coefficients = at::empty({4, num_rows}, saved.maximum.options());
  float* rows_out = coefficients.data_ptr<float>();
  kernels::CoefficientsTask task;
  task.num_rows = num_rows;
  task.maximum = const_pointer_of<float>(saved.maximum);
  task.sum = const_pointer_of<float>(saved.sum);
  task.weighted = const_pointer_of<float>(saved.weighted);
  task.labels = const_pointer_of<std::int64_t>(labels);
  task.vocab = const_pointer_of<std::int64_t>(saved.vocab);
  task.shape = settings.shape;
  task.loss = const_pointer_of<float>(of_loss);
  task.loss_stride = settings.reduction == Reduction::kNone ? 1 : 0;
  task.inverse = const_pointer_of<float>(saved.inverse);
  task.log_probability = const_pointer_of<float>(of_label);
  task.log_sum_exp = const_pointer_of<float>(of_log_sum_exp);
  task.entropy = const_pointer_of<float>(of_entropy);
  task.out_softmax = rows_out;
  task.out_uniform = rows_out + num_rows;
  task.out_target = rows_out + 2 * num_rows;
  task.out_weighted = of_entropy.defined() ? rows_out + 3 * num_rows : nullptr;
  run_coefficients(logits.device(), task);

  at::Tensor gradient =
      in_place ? logits.detach() : core::empty_kept_last(logits.sizes(), logits.options());
  for_each_piece(logits, in_place, [&](const at::Tensor& piece, std::int64_t first) {
    kernels::SoftmaxGradientTask piece_task;
    TESSERA_INTERNAL_ASSERT(as_rows(piece, piece_task.rows), "a piece of logits is made of rows");
    piece_task.rows.num_columns = settings.num_valid;
    piece_task.labels = {labels.defined() ? labels.const_data_ptr<std::int64_t>() + first : nullptr,
                         settings.columns.start, settings.shape.ignored};
    piece_task.scale = static_cast<float>(settings.shape.scale);
    piece_task.coefficients = {task.maximum + first, task.out_softmax + first,
                               task.out_weighted != nullptr ? task.out_weighted + first : nullptr,
                               task.out_uniform + first, task.out_target + first};
    piece_task.num_written = held;
    if (in_place) {
      piece_task.gradient = piece.data_ptr();
      piece_task.inner_stride = piece_task.rows.inner_stride;
      piece_task.outer_stride = piece_task.rows.outer_stride;
    } else {
      piece_task.gradient = static_cast<char*>(gradient.data_ptr()) +
                            first * held * static_cast<std::int64_t>(gradient.element_size());
      piece_task.inner_stride = held;
      piece_task.outer_stride = piece_task.rows.inner_rows * held;
      piece_task.store = kernels::Store::kStreaming;
    }
    run_gradient(logits.device(), piece_task);
  });
  return gradient;
}

}  // namespace tessera::vocab_parallel::detail
