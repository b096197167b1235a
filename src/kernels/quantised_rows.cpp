#include "kernels/quantised_rows.h"

namespace tessera::kernels {

// Defined by the copies of cpu/quantised_rows.cpp, one per instruction set.
extern const QuantisedRowKernels kQuantisedRowsDefault;
#if defined(TESSERA_HAVE_ISA_AVX2)
extern const QuantisedRowKernels kQuantisedRowsAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
extern const QuantisedRowKernels kQuantisedRowsAvx512;
#endif

const QuantisedRowKernels* quantised_row_kernels(Isa isa) noexcept {
#if defined(TESSERA_HAVE_ISA_AVX2)
  if (isa == Isa::kAvx2) return &kQuantisedRowsAvx2;
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
  if (isa == Isa::kAvx512) return &kQuantisedRowsAvx512;
#endif
  return isa == Isa::kDefault ? &kQuantisedRowsDefault : nullptr;
}

const QuantisedRowKernels& quantised_row_kernels() noexcept {
  static const QuantisedRowKernels& kernels = *quantised_row_kernels(active_isa());
  return kernels;
}

std::int64_t code_bytes(RowType type, std::int64_t num_columns) noexcept {
  switch (type) {
    case RowType::kFloat32:
      return 4 * num_columns;
    case RowType::kFloat16:
    case RowType::kBFloat16:
      return 2 * num_columns;
    case RowType::kInt4:
      return (num_columns + 1) / 2;
    case RowType::kInt2:
      return (num_columns + 3) / 4;
    default:
      return num_columns;
  }
}

std::int64_t head_bytes(RowType type) noexcept {
  const bool is_plain =
      type == RowType::kFloat32 || type == RowType::kFloat16 || type == RowType::kBFloat16;
  return is_plain ? 0 : 4;
}

}  // namespace tessera::kernels
