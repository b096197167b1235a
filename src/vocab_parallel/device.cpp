#include "vocab_parallel/device.h"

#include <algorithm>

#include <ATen/Parallel.h>

namespace tessera::vocab_parallel::detail {
namespace {

// Rows below which a second thread costs more than it gains: about 32 K elements.
std::int64_t grain(std::int64_t num_columns) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(num_columns, 1));
}

}  // namespace

void run_statistics(c10::Device device, const kernels::SoftmaxStatisticsTask& task) {
  if (task.rows.num_rows == 0) return;
  if (device.is_cuda()) return cuda_statistics(task);
  at::parallel_for(0, task.rows.num_rows, grain(task.rows.num_columns),
                   [&](std::int64_t first, std::int64_t last) {
                     kernels::softmax_statistics(task, first, last);
                   });
}

void run_gradient(c10::Device device, const kernels::SoftmaxGradientTask& task) {
  if (task.rows.num_rows == 0 || task.num_written == 0) return;
  if (device.is_cuda()) return cuda_gradient(task);
  at::parallel_for(
      0, task.rows.num_rows, grain(task.num_written),
      [&](std::int64_t first, std::int64_t last) { kernels::softmax_gradient(task, first, last); });
}

void run_merge(c10::Device device, const kernels::MergeTask& task) {
  if (device.is_cuda()) return cuda_merge(task);
  kernels::merge_tokens(task);
}

void run_coefficients(c10::Device device, const kernels::CoefficientsTask& task) {
  if (device.is_cuda()) return cuda_coefficients(task);
  kernels::token_coefficients(task);
}

bool run_fused(c10::Device device, const kernels::SoftmaxStatisticsTask& task,
               const kernels::LossShape& shape, bool divide_by_count) {
  if (device.is_cuda()) return cuda_fused(task, shape, divide_by_count);
  return false;
}

}  // namespace tessera::vocab_parallel::detail
