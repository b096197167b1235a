#include "kernels/byte_rows.h"

namespace tessera::kernels {

// Defined by the copies of cpu/byte_rows.cpp, one per instruction set.
extern const ByteRowKernels kByteRowsDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const ByteRowKernels kByteRowsAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const ByteRowKernels kByteRowsAvx512;
#endif

const ByteRowKernels* byte_row_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kByteRowsAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kByteRowsAvx512;
#endif
  return isa == Isa::kDefault ? &kByteRowsDefault : nullptr;
}

const ByteRowKernels& byte_row_kernels() noexcept {
  static const ByteRowKernels& kernels = *byte_row_kernels(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
