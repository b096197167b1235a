#include "kernels/combine.h"

namespace tessera::kernels {

// Defined by the copies of cpu/combine.cpp, one per instruction set.
extern const CombineKernels kCombineDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const CombineKernels kCombineAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const CombineKernels kCombineAvx512;
#endif

const CombineKernels* combine_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kCombineAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kCombineAvx512;
#endif
  return isa == Isa::kDefault ? &kCombineDefault : nullptr;
}

const CombineKernels& combine_kernels() noexcept {
  static const CombineKernels& kernels = *combine_kernels(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
