#include "kernels/neighbour_sum.h"

namespace tessera::kernels {

// Defined by the copies of cpu/neighbour_sum.cpp, one per instruction set.
extern const NeighbourSumKernels<float> kNeighbourSumFloatDefault;
extern const NeighbourSumKernels<double> kNeighbourSumDoubleDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const NeighbourSumKernels<float> kNeighbourSumFloatAvx2;
extern const NeighbourSumKernels<double> kNeighbourSumDoubleAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const NeighbourSumKernels<float> kNeighbourSumFloatAvx512;
extern const NeighbourSumKernels<double> kNeighbourSumDoubleAvx512;
#endif

template <>
const NeighbourSumKernels<float>* neighbour_sum_kernels<float>(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kNeighbourSumFloatAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kNeighbourSumFloatAvx512;
#endif
  return isa == Isa::kDefault ? &kNeighbourSumFloatDefault : nullptr;
}

template <>
const NeighbourSumKernels<double>* neighbour_sum_kernels<double>(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kNeighbourSumDoubleAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kNeighbourSumDoubleAvx512;
#endif
  return isa == Isa::kDefault ? &kNeighbourSumDoubleDefault : nullptr;
}

template <>
const NeighbourSumKernels<float>& neighbour_sum_kernels<float>() noexcept {
  static const NeighbourSumKernels<float>& kernels = *neighbour_sum_kernels<float>(active_isa());
  return kernels;
}

template <>
const NeighbourSumKernels<double>& neighbour_sum_kernels<double>() noexcept {
  static const NeighbourSumKernels<double>& kernels = *neighbour_sum_kernels<double>(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
