#include "kernels/pair_products.h"

namespace tessera::kernels {

// Defined by the copies of cpu/pair_products.cpp, one per instruction set.
extern const PairProductKernels kPairProductsDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const PairProductKernels kPairProductsAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const PairProductKernels kPairProductsAvx512;
#endif

const PairProductKernels* pair_product_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kPairProductsAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kPairProductsAvx512;
#endif
  return isa == Isa::kDefault ? &kPairProductsDefault : nullptr;
}

const PairProductKernels& pair_product_kernels() noexcept {
  static const PairProductKernels& kernels = *pair_product_kernels(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
