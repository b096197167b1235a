// The meaning of kernels/quantised_rows.h as plain loops: slow, obvious, and the judge of the
// others.

#include "kernels/quantised_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace tessera::kernels {
namespace {

float half_to_float(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  float value = 0;
  if (exponent == 31) {
    value = fraction == 0 ? std::numeric_limits<float>::infinity()
                          : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

// To the nearest, halves to even, as every conversion here.
std::uint16_t float_to_half(float x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::abs(x);
  if (std::isnan(x)) return sign | 0x7E00;
  if (magnitude >= 65520.0F) return sign | 0x7C00;
  const int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<std::uint16_t>(sign + ((exponent + 14) << 10) + steps);
}

float brain_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t float_to_brain(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// e4m3: 4 bits of exponent with bias 7, 3 of fraction, no infinities; 448 is the largest.
float eighth_to_float(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int fraction = bits & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                              : std::ldexp(static_cast<float>(fraction + 8), exponent - 10);
  if ((bits & 0x7F) == 0x7F) value = std::numeric_limits<float>::quiet_NaN();
  return (bits & 0x80) != 0 ? -value : value;
}

std::uint8_t float_to_eighth(float x) {
  if (std::isnan(x)) return 0;
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::min(std::abs(x), 448.0F);
  const int exponent = magnitude == 0 ? -6 : std::max(std::ilogb(magnitude), -6);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return static_cast<std::uint8_t>(sign + ((exponent + 6) << 3) + steps);
}

int bits_of(RowType type) { return type == RowType::kInt8 ? 8 : (type == RowType::kInt4 ? 4 : 2); }

std::uint16_t read_half(const std::uint8_t* from) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

void write_half(std::uint8_t* to, std::uint16_t bits) { std::memcpy(to, &bits, sizeof(bits)); }

// A scale that its inverse can be made of.
float usable_scale(float wanted) {
  const float scale = half_to_float(float_to_half(wanted));
  return scale == 0 || std::isinf(1.0F / scale) ? 1.0F : scale;
}

std::uint8_t quantise_codes(int bits, const float* values, std::int64_t num_columns,
                            std::uint8_t* row, std::uint8_t faults) {
  float least = std::numeric_limits<float>::infinity();
  float largest = -least;
  for (std::int64_t c = 0; c < num_columns; ++c) {
    if (values[c] < least) least = values[c];
    if (values[c] > largest) largest = values[c];
  }
  if (least > largest) least = largest = 0;
  const std::uint16_t bias_bits = float_to_half(least);
  const float bias = half_to_float(bias_bits);
  const float range = largest - bias;
  const auto most = static_cast<float>((1 << bits) - 1);
  const float wanted = range == 0 ? 1.0F : range / most;
  const float scale = usable_scale(wanted);
  if (std::isinf(bias) || std::isinf(scale) || std::isnan(scale)) faults |= kRowOverflow;
  if (largest > least && half_to_float(float_to_half(wanted)) == 0) faults |= kRowTinyRange;
  write_half(row, float_to_half(scale));
  write_half(row + 2, bias_bits);
  std::uint8_t* codes = row + 4;
  const int per_byte = 8 / bits;
  std::fill(codes, codes + (num_columns + per_byte - 1) / per_byte, std::uint8_t{0});
  const float inverse = 1.0F / scale;
  for (std::int64_t c = 0; c < num_columns; ++c) {
    const float level = std::nearbyint((values[c] - bias) * inverse);
    const float kept = level > 0 ? std::min(level, most) : 0.0F;
    codes[c / per_byte] |= static_cast<std::uint8_t>(static_cast<int>(kept)
                                                     << (static_cast<int>(c % per_byte) * bits));
  }
  return faults;
}

std::uint8_t quantise_eighths(const float* values, std::int64_t num_columns, std::uint8_t* row,
                              std::uint8_t faults) {
  float largest = 0;
  for (std::int64_t c = 0; c < num_columns; ++c) {
    if (std::abs(values[c]) > largest) largest = std::abs(values[c]);
  }
  const float wanted = largest == 0 ? 1.0F : largest / 448.0F;
  const float scale = usable_scale(wanted);
  if (std::isinf(scale)) faults |= kRowOverflow;
  if (largest > 0 && half_to_float(float_to_half(wanted)) == 0) faults |= kRowTinyRange;
  write_half(row, float_to_half(scale));
  write_half(row + 2, 0);
  const float inverse = 1.0F / scale;
  for (std::int64_t c = 0; c < num_columns; ++c) row[4 + c] = float_to_eighth(values[c] * inverse);
  return faults;
}

std::uint8_t quantise(RowType type, const float* values, std::int64_t num_columns,
                      std::uint8_t* row) {
  std::uint8_t faults = kRowFine;
  for (std::int64_t c = 0; c < num_columns; ++c) {
    if (std::isnan(values[c])) faults |= kRowNan;
    if (std::isinf(values[c])) faults |= kRowOverflow;
  }
  switch (type) {
    case RowType::kFloat32:
      std::memcpy(row, values, static_cast<std::size_t>(num_columns) * sizeof(float));
      return faults;
    case RowType::kFloat16:
      for (std::int64_t c = 0; c < num_columns; ++c) {
        const std::uint16_t bits = float_to_half(values[c]);
        if ((bits & 0x7FFF) == 0x7C00) faults |= kRowOverflow;
        write_half(row + 2 * c, bits);
      }
      return faults;
    case RowType::kBFloat16:
      for (std::int64_t c = 0; c < num_columns; ++c) {
        const std::uint16_t bits = float_to_brain(values[c]);
        if ((bits & 0x7FFF) == 0x7F80) faults |= kRowOverflow;
        write_half(row + 2 * c, bits);
      }
      return faults;
    case RowType::kFloat8:
      return quantise_eighths(values, num_columns, row, faults);
    default:
      return quantise_codes(bits_of(type), values, num_columns, row, faults);
  }
}

// The number in front of the scale, and what it is multiplied with and added to.
struct Row {
  Row(RowType type, const std::uint8_t* row) : type(type), codes(row + head_bytes(type)) {
    if (head_bytes(type) == 0) return;
    scale = half_to_float(read_half(row));
    if (type != RowType::kFloat8) bias = half_to_float(read_half(row + 2));
  }
  float code(std::int64_t c) const {
    float number = 0;
    switch (type) {
      case RowType::kFloat32:
        std::memcpy(&number, codes + 4 * c, sizeof(number));
        return number;
      case RowType::kFloat16:
        return half_to_float(read_half(codes + 2 * c));
      case RowType::kBFloat16:
        return brain_to_float(read_half(codes + 2 * c));
      case RowType::kFloat8:
        return eighth_to_float(codes[c]);
      default: {
        const int bits = bits_of(type);
        const int per_byte = 8 / bits;
        const int shifted = codes[c / per_byte] >> (static_cast<int>(c % per_byte) * bits);
        return static_cast<float>(shifted & ((1 << bits) - 1));
      }
    }
  }
  bool has_bias() const { return head_bytes(type) > 0 && type != RowType::kFloat8; }

  RowType type;
  const std::uint8_t* codes;
  float scale = 1;
  float bias = 0;
};

void dequantise(RowType type, const std::uint8_t* row, std::int64_t num_columns, float* values) {
  const Row from(type, row);
  for (std::int64_t c = 0; c < num_columns; ++c) {
    const float product = from.code(c) * from.scale;
    values[c] = from.has_bias() ? product + from.bias : product;
  }
}

std::int64_t pooled(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                    std::int64_t stride) {
  for (std::int64_t b = 0; b < bags.num_bags; ++b) {
    float* to = output + b * stride;
    std::fill(to, to + rows.num_columns, 0.0F);
    const std::int64_t first = bags.offsets[b];
    const std::int64_t last = bags.offsets[b + 1];
    float biases = 0;
    bool has_bias = false;
    for (std::int64_t k = first; k < last; ++k) {
      const std::int64_t id = bags.ids[k];
      if (id < 0 || id >= rows.num_rows) return k;
      const Row row(rows.type, rows.data + id * rows.row_bytes);
      const float weight = bags.weights == nullptr ? 1.0F : bags.weights[k];
      const float scale = weight * row.scale;
      for (std::int64_t c = 0; c < rows.num_columns; ++c) {
        const float product = scale * row.code(c);
        to[c] += product;
      }
      const float bias = weight * row.bias;
      biases += bias;
      has_bias = row.has_bias();
    }
    const float factor = bags.is_mean && last > first ? 1.0F / static_cast<float>(last - first) : 1;
    for (std::int64_t c = 0; c < rows.num_columns; ++c) {
      const float sum = has_bias ? to[c] + biases : to[c];
      to[c] = factor * sum;
    }
  }
  return -1;
}

std::int64_t sequence(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                      std::int64_t stride) {
  const std::int64_t first = bags.offsets[0];
  for (std::int64_t k = first; k < bags.offsets[bags.num_bags]; ++k) {
    const std::int64_t id = bags.ids[k];
    if (id < 0 || id >= rows.num_rows) return k;
    const Row row(rows.type, rows.data + id * rows.row_bytes);
    const float weight = bags.weights == nullptr ? 1.0F : bags.weights[k];
    const float scale = weight * row.scale;
    const float bias = weight * row.bias;
    float* to = output + (k - first) * stride;
    for (std::int64_t c = 0; c < rows.num_columns; ++c) {
      const float product = scale * row.code(c);
      to[c] = row.has_bias() ? product + bias : product;
    }
  }
  return -1;
}

}  // namespace

const QuantisedRowKernels& quantised_row_reference() noexcept {
  static const QuantisedRowKernels kernels{quantise, dequantise, pooled, sequence};
  return kernels;
}

}  // namespace tessera::kernels
