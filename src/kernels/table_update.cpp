#include "kernels/table_update.h"

namespace tessera::kernels {

// Defined by the copies of cpu/table_update.cpp, one per instruction set.
extern const TableUpdateKernels kTableUpdateDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const TableUpdateKernels kTableUpdateAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const TableUpdateKernels kTableUpdateAvx512;
#endif

const TableUpdateKernels* table_update_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kTableUpdateAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kTableUpdateAvx512;
#endif
  return isa == Isa::kDefault ? &kTableUpdateDefault : nullptr;
}

const TableUpdateKernels& table_update_kernels() noexcept {
  static const TableUpdateKernels& kernels = *table_update_kernels(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
