#include "kernels/softmax_fused.h"

namespace tessera::kernels {

// Defined by the copies of cpu/softmax_fused.cpp, one per instruction set.
extern const SoftmaxFusedKernel kSoftmaxFusedDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const SoftmaxFusedKernel kSoftmaxFusedAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const SoftmaxFusedKernel kSoftmaxFusedAvx512;
#endif

SoftmaxFusedKernel softmax_fused_kernel(Isa isa) noexcept {
  switch (isa) {
    case Isa::kDefault:
      return kSoftmaxFusedDefault;
    case Isa::kAvx2:
#if defined(TESSERA_HAVE_ISA_AVX2)
      return kSoftmaxFusedAvx2;
#else
      return nullptr;
#endif
    case Isa::kAvx512:
#if defined(TESSERA_HAVE_ISA_AVX512)
      return kSoftmaxFusedAvx512;
#else
      return nullptr;
#endif
  }
  return nullptr;
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
