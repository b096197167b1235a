#include "kernels/softmax_statistics.h"

namespace tessera::kernels {

// Defined by the copies of cpu/softmax_statistics.cpp, one per instruction set.
extern const SoftmaxStatisticsKernel kSoftmaxStatisticsDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const SoftmaxStatisticsKernel kSoftmaxStatisticsAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const SoftmaxStatisticsKernel kSoftmaxStatisticsAvx512;
#endif

SoftmaxStatisticsKernel softmax_statistics_kernel(Isa isa) noexcept {
  switch (isa) {
    case Isa::kDefault:
      return kSoftmaxStatisticsDefault;
    case Isa::kAvx2:
#if defined(TESSERA_HAVE_ISA_AVX2)
      return kSoftmaxStatisticsAvx2;
#else
      return nullptr;
#endif
    case Isa::kAvx512:
#if defined(TESSERA_HAVE_ISA_AVX512)
      return kSoftmaxStatisticsAvx512;
#else
      return nullptr;
#endif
  }
  return nullptr;
}

void softmax_statistics(const SoftmaxStatisticsTask& task, std::int64_t first,
                        std::int64_t last) noexcept {
  static const SoftmaxStatisticsKernel kernel = softmax_statistics_kernel(active_isa());
  kernel(task, first, last);
}

}  // namespace tessera::kernels
