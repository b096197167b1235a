#include "kernels/table_lookup.h"

namespace tessera::kernels {

// Defined by the copies of cpu/table_lookup.cpp, one per instruction set.
extern const TableLookupKernels kTableLookupDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const TableLookupKernels kTableLookupAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const TableLookupKernels kTableLookupAvx512;
#endif

const TableLookupKernels* table_lookup_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kTableLookupAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kTableLookupAvx512;
#endif
  return isa == Isa::kDefault ? &kTableLookupDefault : nullptr;
}

const TableLookupKernels& table_lookup_kernels() noexcept {
  static const TableLookupKernels& kernels = *table_lookup_kernels(active_isa());
  return kernels;
}

}  // namespace tessera::kernels
