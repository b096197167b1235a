#include "tessera/comm/codec.h"

#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/ATen.h>

#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

// Scale and smallest value (kInt8), or scale and padding (kFp8), as float32.
constexpr std::int64_t kRowExtra = 8;
constexpr double kLargestFp8 = 448;
constexpr double kLargestBf16 = 3.3895313892515355e38;

bool has_rows(WireFormat format) {
  return format == WireFormat::kInt8 || format == WireFormat::kFp8;
}

std::int64_t num_rows(std::int64_t count, std::int64_t row_size) {
  return (count + row_size - 1) / row_size;
}

// [rows, row_size] of all parts, each part filled up to whole rows by its last value, so that the
// filling does not widen a row's range.
at::Tensor as_rows(const at::Tensor& values, const std::vector<std::int64_t>& parts,
                   std::int64_t row_size) {
  bool is_even = true;
  for (const std::int64_t part : parts) is_even &= part % row_size == 0;
  if (is_even) return values.view({-1, row_size});
  std::vector<at::Tensor> pieces;
  std::int64_t begin = 0;
  for (const std::int64_t part : parts) {
    if (part > 0) {
      pieces.push_back(values.narrow(0, begin, part));
      const std::int64_t missing = num_rows(part, row_size) * row_size - part;
      if (missing > 0) pieces.push_back(values.narrow(0, begin + part - 1, 1).expand({missing}));
    }
    begin += part;
  }
  return pieces.empty() ? values.view({0, row_size}) : at::cat(pieces).view({-1, row_size});
}

at::Tensor without_filling(const at::Tensor& rows, const std::vector<std::int64_t>& parts,
                           std::int64_t row_size) {
  const at::Tensor flat = rows.reshape({-1});
  std::vector<at::Tensor> pieces;
  std::int64_t begin = 0;
  for (const std::int64_t part : parts) {
    pieces.push_back(flat.narrow(0, begin, part));
    begin += num_rows(part, row_size) * row_size;
  }
  return pieces.empty() ? flat : at::cat(pieces);
}

at::Tensor bytes_of(const at::Tensor& column) { return column.contiguous().view(at::kByte); }

at::Tensor floats_at(const at::Tensor& rows, std::int64_t begin) {
  return rows.narrow(1, begin, 4).contiguous().view(at::kFloat);
}

at::Tensor encode_rows(const at::Tensor& rows, WireFormat format) {
  if (rows.size(0) == 0) return at::empty({0}, rows.options().dtype(at::kByte));
  const at::Tensor values = rows.to(at::kFloat);
  if (format == WireFormat::kInt8) {
    const at::Tensor low = values.amin(1, /*keepdim=*/true);
    const at::Tensor width = values.amax(1, true) - low;
    // A row of equal values has no width; any scale will do.
    const at::Tensor scale = at::where(width > 0, width / 255, at::ones_like(width));
    const at::Tensor steps = ((values - low) / scale).round().clamp(0, 255).to(at::kByte);
    return at::cat({steps, bytes_of(scale), bytes_of(low)}, 1).view({-1});
  }
  const at::Tensor largest = values.abs().amax(1, true);
  const at::Tensor scale = at::where(largest > 0, largest / kLargestFp8, at::ones_like(largest));
  const at::Tensor small = (values / scale).clamp(-kLargestFp8, kLargestFp8).to(at::kFloat8_e4m3fn);
  return at::cat({small.view(at::kByte), bytes_of(scale), bytes_of(at::zeros_like(scale))}, 1)
      .view({-1});
}

at::Tensor decode_rows(const at::Tensor& wire, WireFormat format, std::int64_t row_size) {
  const at::Tensor rows = wire.view({-1, row_size + kRowExtra});
  const at::Tensor values = rows.narrow(1, 0, row_size);
  const at::Tensor scale = floats_at(rows, row_size);
  if (format == WireFormat::kInt8) {
    return values.to(at::kFloat) * scale + floats_at(rows, row_size + 4);
  }
  return values.contiguous().view(at::kFloat8_e4m3fn).to(at::kFloat) * scale;
}

}  // namespace

Codec::Codec(const CodecOptions& options) : options_(options) {
  TESSERA_CHECK_VALUE(options.row_size >= 1, "comm.Codec: row_size is ", options.row_size,
                      "; a row has at least one value.");
  TESSERA_CHECK_VALUE(options.loss_scale > 0 && std::isfinite(options.loss_scale),
                      "comm.Codec: loss_scale is ", options.loss_scale,
                      "; give a positive number.");
}

bool Codec::is_linear() const noexcept { return !has_rows(options_.format); }

at::ScalarType Codec::wire_type(at::ScalarType dtype) const {
  switch (options_.format) {
    case WireFormat::kFp16:
      return at::kHalf;
    case WireFormat::kBf16:
      return at::kBFloat16;
    case WireFormat::kInt8:
    case WireFormat::kFp8:
      return at::kByte;
    default:
      return dtype;
  }
}

std::int64_t Codec::wire_size(std::int64_t count) const {
  if (!has_rows(options_.format)) return count;
  return num_rows(count, options_.row_size) * (options_.row_size + kRowExtra);
}

at::Tensor Codec::encode(const at::Tensor& values, const std::vector<std::int64_t>& parts) const {
  TESSERA_CHECK_VALUE(
      values.dim() == 1 &&
          std::accumulate(parts.begin(), parts.end(), std::int64_t{0}) == values.numel(),
      "comm.Codec.encode: the parts ", parts, " do not add up to the ", values.numel(), " values.");
  TESSERA_CHECK_TYPE(is_identity() || at::isFloatingType(values.scalar_type()),
                     "comm.Codec.encode: only floating values are compressed, not ",
                     values.scalar_type(), ".");
  if (is_identity()) return values;
  const at::Tensor scaled = options_.loss_scale == 1 ? values : values * options_.loss_scale;
  switch (options_.format) {
    case WireFormat::kFp16: {
      constexpr double kLargest = 65504;
      return scaled.clamp(-kLargest, kLargest).to(at::kHalf);
    }
    case WireFormat::kBf16:
      return scaled.clamp(-kLargestBf16, kLargestBf16).to(at::kBFloat16);
    default:
      return encode_rows(as_rows(scaled.contiguous(), parts, options_.row_size), options_.format);
  }
}

at::Tensor Codec::decode(const at::Tensor& wire, const std::vector<std::int64_t>& parts,
                         at::ScalarType dtype) const {
  if (is_identity()) return wire;
  at::Tensor values = is_linear()
                          ? wire.to(dtype)
                          : without_filling(decode_rows(wire, options_.format, options_.row_size),
                                            parts, options_.row_size)
                                .to(dtype);
  return options_.loss_scale == 1 ? values : values.div_(options_.loss_scale);
}

}  // namespace tessera::comm
