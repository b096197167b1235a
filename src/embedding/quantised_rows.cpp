#include "tessera/embedding/quantised_rows.h"

#include <array>

#include "kernels/quantised_rows.h"

namespace tessera::embedding {
namespace {

constexpr std::array<std::string_view, 7> kNames = {"fp32", "fp16", "bf16", "int8",
                                                    "int4", "int2", "fp8"};

kernels::RowType kernel_type(RowType type) {
  using Kernel = kernels::RowType;
  constexpr std::array kTypes = {Kernel::kFloat32, Kernel::kFloat16, Kernel::kBFloat16,
                                 Kernel::kInt8,    Kernel::kInt4,    Kernel::kInt2,
                                 Kernel::kFloat8};
  return kTypes[static_cast<std::size_t>(type)];
}

kernels::QuantisedRows rows_of(const RowTable& table) {
  return {kernel_type(table.type), table.data, table.num_rows, table.num_columns, table.row_bytes};
}

kernels::QuantisedBags bags_of(const RowBags& bags) {
  return {bags.ids, bags.offsets.data(), bags.weights,
          static_cast<std::int64_t>(bags.offsets.size()) - 1, bags.is_mean};
}

std::optional<std::int64_t> unless_fine(std::int64_t position) {
  return position < 0 ? std::nullopt : std::optional(position);
}

}  // namespace

std::string_view name_of(RowType type) noexcept { return kNames[static_cast<std::size_t>(type)]; }

std::optional<RowType> row_type_of(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<RowType>(i);
  }
  return std::nullopt;
}

std::vector<std::string> row_type_names() { return {kNames.begin(), kNames.end()}; }

std::int64_t row_head_bytes(RowType type) noexcept {
  return kernels::head_bytes(kernel_type(type));
}

std::int64_t row_bytes(RowType type, std::int64_t num_columns, std::int64_t alignment) noexcept {
  const std::int64_t bytes =
      row_head_bytes(type) + kernels::code_bytes(kernel_type(type), num_columns);
  return (bytes + alignment - 1) / alignment * alignment;
}

RowFaults quantise_row(RowType type, std::span<const float> values, std::uint8_t* row) {
  const std::uint8_t bits = kernels::quantised_row_kernels().quantise(
      kernel_type(type), values.data(), static_cast<std::int64_t>(values.size()), row);
  return {(bits & kernels::kRowNan) != 0, (bits & kernels::kRowOverflow) != 0,
          (bits & kernels::kRowTinyRange) != 0};
}

void dequantise_row(RowType type, const std::uint8_t* row, std::span<float> values) {
  kernels::quantised_row_kernels().dequantise(
      kernel_type(type), row, static_cast<std::int64_t>(values.size()), values.data());
}

std::optional<std::int64_t> pool_rows(const RowTable& table, const RowBags& bags, float* output,
                                      std::int64_t stride) {
  return unless_fine(
      kernels::quantised_row_kernels().pooled(rows_of(table), bags_of(bags), output, stride));
}

std::optional<std::int64_t> copy_rows(const RowTable& table, const RowBags& bags, float* output,
                                      std::int64_t stride) {
  return unless_fine(
      kernels::quantised_row_kernels().sequence(rows_of(table), bags_of(bags), output, stride));
}

}  // namespace tessera::embedding
