#include "kernels/quantised_rows.h"

namespace tessera::kernels {

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
