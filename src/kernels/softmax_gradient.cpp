#include "kernels/softmax_gradient.h"

namespace tessera::kernels {

// Defined by the copies of cpu/softmax_gradient.cpp, one per instruction set.
extern const SoftmaxGradientKernel kSoftmaxGradientDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const SoftmaxGradientKernel kSoftmaxGradientAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const SoftmaxGradientKernel kSoftmaxGradientAvx512;
#endif

SoftmaxGradientKernel softmax_gradient_kernel(Isa isa) noexcept {
  switch (isa) {
    case Isa::kDefault:
      return kSoftmaxGradientDefault;
    case Isa::kAvx2:
#if defined(TESSERA_HAVE_ISA_AVX2)
      return kSoftmaxGradientAvx2;
#else
      return nullptr;
#endif
    case Isa::kAvx512:
#if defined(TESSERA_HAVE_ISA_AVX512)
      return kSoftmaxGradientAvx512;
#else
      return nullptr;
#endif
  }
  return nullptr;
}

void softmax_gradient(const SoftmaxGradientTask& task, std::int64_t first,
                      std::int64_t last) noexcept {
  static const SoftmaxGradientKernel kernel = softmax_gradient_kernel(active_isa());
  kernel(task, first, last);
}

}  // namespace tessera::kernels
