#include "vocab_parallel/device.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "kernels/softmax_fused.h"

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

void run_fold(c10::Device device, const kernels::MergeTask& task, float* statistics) {
  if (device.is_cuda()) return cuda_fold(task, statistics);
  at::parallel_for(0, task.num_rows, grain(task.num_parts * task.num_fields),
                   [&](std::int64_t first, std::int64_t last) {
                     kernels::fold_parts(task, statistics, first, last);
                   });
}

void run_coefficients(c10::Device device, const kernels::CoefficientsTask& task) {
  if (device.is_cuda()) return cuda_coefficients(task);
  kernels::token_coefficients(task);
}

bool run_fused(c10::Device device, const kernels::SoftmaxStatisticsTask& task,
               const kernels::LossShape& shape, bool divide_by_count) {
  if (device.is_cuda()) return cuda_fused(task, shape, divide_by_count);
  // A row of exponentials must stay in the second-level cache: 128 K of them are 512 KB.
  constexpr std::int64_t kMostColumns = 131072;
  if (shape.label_smoothing != 0.0 || task.rows.num_columns > kMostColumns) return false;
  kernels::SoftmaxFusedTask fused{.statistics = task, .z_loss = shape.z_loss};
  if (divide_by_count) {
    const auto* ids = task.labels.ids;
    const auto count =
        task.rows.num_rows - std::count(ids, ids + task.rows.num_rows, task.labels.ignored);
    fused.weight = 1.0F / static_cast<float>(std::max<std::int64_t>(count, 1));
  }
  const std::int64_t floats = kernels::softmax_fused_workspace(task.rows.num_columns);
  at::parallel_for(0, task.rows.num_rows, grain(task.rows.num_columns),
                   [&](std::int64_t first, std::int64_t last) {
                     const at::Tensor workspace = at::empty({floats}, at::kFloat);
                     kernels::softmax_fused(fused, first, last, workspace.data_ptr<float>());
                   });
  return true;
}

}  // namespace tessera::vocab_parallel::detail
