#include <ATen/Functions.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/launch.h"
#include "tessera/core/check.h"
#include "vocab_parallel/device.h"

namespace tessera::vocab_parallel::detail {
namespace {

void* stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

at::TensorOptions on_this_device(at::ScalarType type) {
  return at::TensorOptions().dtype(type).device(at::kCUDA, c10::cuda::current_device());
}

void check(int error, const char* kernel) {
  TORCH_CHECK(error == 0, "vocab: the CUDA kernel '", kernel,
              "' did not start: ", kernels::cuda::error_text(error), ".");
}

}  // namespace

void cuda_statistics(const kernels::SoftmaxStatisticsTask& task) {
  check(kernels::cuda::softmax_statistics(task, stream()), "softmax statistics");
}

void cuda_gradient(const kernels::SoftmaxGradientTask& task) {
  check(kernels::cuda::softmax_gradient(task, stream()), "softmax gradient");
}

void cuda_merge(const kernels::MergeTask& task) {
  at::Tensor workspace;
  if (task.reduced != nullptr) {
    workspace =
        at::empty({kernels::cuda::merge_workspace_bytes(task.num_rows)}, on_this_device(at::kByte));
  }
  check(kernels::cuda::merge_tokens(task, workspace.defined() ? workspace.data_ptr() : nullptr,
                                    stream()),
        "merge tokens");
}

void cuda_fold(const kernels::MergeTask& task, float* statistics) {
  check(kernels::cuda::fold_parts(task, statistics, stream()), "fold parts");
}

void cuda_coefficients(const kernels::CoefficientsTask& task) {
  check(kernels::cuda::token_coefficients(task, stream()), "token coefficients");
}

bool cuda_fused(const kernels::SoftmaxStatisticsTask& task, const kernels::LossShape& shape,
                bool divide_by_count) {
  if (!kernels::cuda::can_fuse(task, shape)) return false;
  at::Tensor inverse;
  if (divide_by_count) {
    inverse = at::empty({1}, on_this_device(at::kFloat));
    check(kernels::cuda::inverse_count(task.labels.ids, task.rows.num_rows, shape.ignored,
                                       inverse.data_ptr<float>(), stream()),
          "inverse count");
  }
  check(kernels::cuda::softmax_fused(
            task, shape, divide_by_count ? inverse.const_data_ptr<float>() : nullptr, stream()),
        "fused softmax");
  return true;
}

void cuda_scale(kernels::Element element, void* data, std::int64_t count, const float* factor) {
  check(kernels::cuda::scale(element, data, count, factor, stream()), "scale");
}

}  // namespace tessera::vocab_parallel::detail
