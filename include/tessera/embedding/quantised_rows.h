// tessera/embedding/quantised_rows.h — table rows in few bits: made, read, pooled. No LibTorch.
//
// A row of int8, int4 or int2 is a float16 scale, a float16 bias and the codes, the earliest code
// of a byte lowest; a number is code * scale + bias. A row of fp8 is a float16 scale, two bytes of
// 0 and codes in e4m3. The others are the numbers themselves. docs/serving.md has the rules of
// rounding.
//
// Nothing here communicates.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/export.h"

namespace tessera::embedding {

enum class RowType : std::uint8_t { kFp32, kFp16, kBf16, kInt8, kInt4, kInt2, kFp8 };

/// "fp32", "fp16", "bf16", "int8", "int4", "int2" or "fp8".
TESSERA_API std::string_view name_of(RowType type) noexcept;
/// The type of a name, if there is one.
TESSERA_API std::optional<RowType> row_type_of(std::string_view name) noexcept;
/// All names, for texts.
TESSERA_API std::vector<std::string> row_type_names();

/// Bytes in front of the codes: 4 for types with a scale, else 0.
TESSERA_API std::int64_t row_head_bytes(RowType type) noexcept;
/// Bytes of a row of `num_columns`, rounded up to a multiple of `alignment`.
TESSERA_API std::int64_t row_bytes(RowType type, std::int64_t num_columns,
                                   std::int64_t alignment = 1) noexcept;

/// What became of a row.
struct RowFaults {
  bool has_nan = false;      // a number is NaN; its code is 0
  bool is_overflow = false;  // a number, the scale or the bias is infinite in the type
  bool is_constant =
      false;  // numbers that differ became one: a float16 scale is too coarse for them
};

/// Writes one row; `row` has row_bytes(type, values.size()) bytes, those behind are left alone.
TESSERA_API RowFaults quantise_row(RowType type, std::span<const float> values, std::uint8_t* row);
TESSERA_API void dequantise_row(RowType type, const std::uint8_t* row, std::span<float> values);

/// Rows in memory of somebody else, `row_bytes` apart.
struct RowTable {
  RowType type = RowType::kFp32;
  const std::uint8_t* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  std::int64_t row_bytes = 0;
};

/// Bags of one feature: bag b owns the positions offsets[b] to offsets[b + 1] - 1 of `ids`.
struct RowBags {
  const std::int64_t* ids = nullptr;
  std::span<const std::int64_t> offsets;  // one more than there are bags, ascending
  const float* weights = nullptr;         // one per position; null: all 1
  bool is_mean = false;                   // over the number of ids; an empty bag is zero
};

/// Writes the pooled rows of bag b to output + b * stride. Returns the first position whose id is
/// not a row, and what is written is then of no use. Any instruction set gives the same bits, and a
/// bag's result does not depend on the others.
TESSERA_API std::optional<std::int64_t> pool_rows(const RowTable& table, const RowBags& bags,
                                                  float* output, std::int64_t stride);
/// The same without pooling: position k, counted from the first, to output + k * stride.
TESSERA_API std::optional<std::int64_t> copy_rows(const RowTable& table, const RowBags& bags,
                                                  float* output, std::int64_t stride);

}  // namespace tessera::embedding
