#include "kernels/id_lines.h"

namespace tessera::kernels {

// Defined by the copies of cpu/id_lines.cpp, one per instruction set.
extern const IdLineKernels kIdLinesDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const IdLineKernels kIdLinesAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const IdLineKernels kIdLinesAvx512;
#endif

const IdLineKernels* id_line_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kIdLinesAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kIdLinesAvx512;
#endif
  return isa == Isa::kDefault ? &kIdLinesDefault : nullptr;
}

const IdLineKernels& id_line_kernels() noexcept {
  static const IdLineKernels& kernels = *id_line_kernels(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
