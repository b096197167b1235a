// Stands in for device_cuda.cpp in a build without CUDA.

#include "tessera/core/check.h"
#include "vocab_parallel/device.h"

namespace tessera::vocab_parallel::detail {
namespace {

[[noreturn]] void refuse() {
  TORCH_CHECK(false,
              "vocab: the logits are on a CUDA device, but this build has no CUDA kernels. Rebuild "
              "with TESSERA_BUILD_CUDA=ON, or move them to the CPU.");
}

}  // namespace

void cuda_statistics(const kernels::SoftmaxStatisticsTask&) { refuse(); }
void cuda_gradient(const kernels::SoftmaxGradientTask&) { refuse(); }
void cuda_merge(const kernels::MergeTask&) { refuse(); }
void cuda_fold(const kernels::MergeTask&, float*) { refuse(); }
void cuda_coefficients(const kernels::CoefficientsTask&) { refuse(); }
bool cuda_fused(const kernels::SoftmaxStatisticsTask&, const kernels::LossShape&, bool) {
  refuse();
}
void cuda_scale(kernels::Element, void*, std::int64_t, const float*) { refuse(); }

}  // namespace tessera::vocab_parallel::detail
