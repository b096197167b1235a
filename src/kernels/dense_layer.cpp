#include "kernels/dense_layer.h"

namespace tessera::kernels {

// Defined by the copies of cpu/dense_layer.cpp, one per instruction set.
extern const DenseLayerKernels kDenseLayerDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const DenseLayerKernels kDenseLayerAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const DenseLayerKernels kDenseLayerAvx512;
#endif

const DenseLayerKernels* dense_layer_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kDenseLayerAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kDenseLayerAvx512;
#endif
  return isa == Isa::kDefault ? &kDenseLayerDefault : nullptr;
}

const DenseLayerKernels& dense_layer_kernels() noexcept {
  static const DenseLayerKernels& kernels = *dense_layer_kernels(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
