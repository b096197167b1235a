#include "kernels/softmax_fused.h"

#include "kernels/levels.h"

namespace tessera::kernels {

TESSERA_KERNEL_LEVELS(SoftmaxFusedKernel, kSoftmaxFused);

SoftmaxFusedKernel softmax_fused_kernel(Isa isa) noexcept {
  const auto* kernel = kSoftmaxFusedLevels.at(isa);
  return kernel == nullptr ? nullptr : *kernel;
}

std::int64_t softmax_fused_workspace(std::int64_t num_columns) noexcept {
  // The exponentials, filled up to whole blocks, and a double for each block.
  constexpr std::int64_t kLargestBlock = 1024;
  constexpr std::int64_t kSmallestBlock = 512;
  return num_columns + kLargestBlock + 2 * (num_columns / kSmallestBlock) + 16;
}

void softmax_fused(const SoftmaxFusedTask& task, std::int64_t first, std::int64_t last,
                   float* workspace) noexcept {
  static const SoftmaxFusedKernel kernel = softmax_fused_kernel(active_isa());
  kernel(task, first, last, workspace);
}

}  // namespace tessera::kernels
