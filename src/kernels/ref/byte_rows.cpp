// The meaning of kernels/byte_rows.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/byte_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::kernels {
namespace {

void range(const float* values, std::int64_t count, float* low, float* high) {
  *low = 0;
  *high = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isnan(values[i])) {
      *low = *high = values[i];
      return;
    }
    *low = std::min(*low, values[i]);
    *high = std::max(*high, values[i]);
  }
}

void pack(const float* values, std::int64_t count, float scale, float zero, std::uint8_t* bytes) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float level = std::nearbyint(values[i] / scale) + zero;
    bytes[i] = std::isnan(level) ? 0 : static_cast<std::uint8_t>(std::clamp(level, 0.0F, 255.0F));
  }
}

void add(const std::uint8_t* bytes, std::int64_t count, float scale, float zero, float* sum) {
  for (std::int64_t i = 0; i < count; ++i) {
    sum[i] += (static_cast<float>(bytes[i]) - zero) * scale;
  }
}

float carry(const float* values, const float* before, std::int64_t count, float* sum) {
  float largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    sum[i] = before == nullptr ? values[i] : values[i] + before[i];
    if (std::isnan(sum[i]) || std::isnan(largest)) {
      largest = std::numeric_limits<float>::quiet_NaN();
    } else {
      largest = std::max(largest, std::abs(sum[i]));
    }
  }
  return largest;
}

void pack_signed(float* values, std::int64_t count, float scale, std::int8_t* bytes) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float level = std::nearbyint(values[i] / scale);
    const float kept = std::isnan(level) ? 0.0F : std::clamp(level, -127.0F, 127.0F);
    bytes[i] = static_cast<std::int8_t>(kept);
    values[i] -= kept * scale;
  }
}

void add_signed(const std::int8_t* bytes, std::int64_t count, float scale, float* sum) {
  for (std::int64_t i = 0; i < count; ++i) sum[i] += static_cast<float>(bytes[i]) * scale;
}

}  // namespace

const ByteRowKernels& byte_row_reference() noexcept {
  static const ByteRowKernels kernels{range, pack, add, carry, pack_signed, add_signed};
  return kernels;
}

}  // namespace tessera::kernels
