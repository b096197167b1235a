// The kernels that are one function over rows of logits: the one of an instruction set, and that of
// the process.

#include "kernels/levels.h"
#include "kernels/softmax_fused.h"
#include "kernels/softmax_gradient.h"
#include "kernels/softmax_statistics.h"

namespace tessera::kernels {

/// Defines the form of a kernel's header that is asked for an instruction set.
#define TESSERA_KERNEL_OF_ISA(Kernel, name, function)  \
  TESSERA_KERNEL_LEVELS(Kernel, name);                 \
  Kernel function(Isa isa) noexcept {                  \
    const Kernel* const kernel = name##Levels.at(isa); \
    return kernel == nullptr ? nullptr : *kernel;      \
  }

TESSERA_KERNEL_OF_ISA(SoftmaxFusedKernel, kSoftmaxFused, softmax_fused_kernel)
TESSERA_KERNEL_OF_ISA(SoftmaxGradientKernel, kSoftmaxGradient, softmax_gradient_kernel)
TESSERA_KERNEL_OF_ISA(SoftmaxStatisticsKernel, kSoftmaxStatistics, softmax_statistics_kernel)

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

void softmax_gradient(const SoftmaxGradientTask& task, std::int64_t first,
                      std::int64_t last) noexcept {
  static const SoftmaxGradientKernel kernel = softmax_gradient_kernel(active_isa());
  kernel(task, first, last);
}

void softmax_statistics(const SoftmaxStatisticsTask& task, std::int64_t first,
                        std::int64_t last) noexcept {
  static const SoftmaxStatisticsKernel kernel = softmax_statistics_kernel(active_isa());
  kernel(task, first, last);
}

}  // namespace tessera::kernels
