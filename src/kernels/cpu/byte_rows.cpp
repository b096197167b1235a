// Numbers as bytes. Compiled once per instruction set; see kernels/CMakeLists.txt and the note at
// the top of reduce.cpp. `range` and `carry` apart, they
// are left to the compiler's vectoriser.

#include "kernels/byte_rows.h"

#include "kernels/cpu/logit_vector.h"

namespace tessera::kernels {
namespace {

void range(const float* values, std::int64_t count, float* low, float* high) {
  constexpr int kChains = 4;
  Floats top[kChains] = {};
  Floats bottom[kChains] = {};  // of the negated values
  Ints is_nan{};
  std::int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      const Floats x = *reinterpret_cast<const LooseFloats*>(values + i + chain * kLanes);
      top[chain] = larger(top[chain], x);
      bottom[chain] = larger(bottom[chain], -x);
      is_nan |= x != x;
    }
  }
  float most = 0;
  float least = 0;
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan = has_nan || is_nan[lane] != 0;
  for (int chain = 0; chain < kChains; ++chain) {
    const float above = largest_of(top[chain]);
    const float below = -largest_of(bottom[chain]);
    most = above > most ? above : most;
    least = below < least ? below : least;
  }
  for (; i < count; ++i) {
    most = values[i] > most ? values[i] : most;
    least = values[i] < least ? values[i] : least;
    has_nan = has_nan || values[i] != values[i];
  }
  *low = has_nan ? __builtin_nanf("") : least;
  *high = has_nan ? __builtin_nanf("") : most;
}

void pack(const float* __restrict__ values, std::int64_t count, float scale, float zero,
          std::uint8_t* __restrict__ bytes) {
  constexpr float kRounder = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
  for (std::int64_t i = 0; i < count; ++i) {
    float level = (values[i] / scale + kRounder) - kRounder + zero;
    level = level > 0.0F ? level : 0.0F;  // a NaN becomes 0; the scale then tells
    level = level < 255.0F ? level : 255.0F;
    bytes[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(level));
  }
}

void add(const std::uint8_t* __restrict__ bytes, std::int64_t count, float scale, float zero,
         float* __restrict__ sum) {
  for (std::int64_t i = 0; i < count; ++i) {
    sum[i] += (static_cast<float>(static_cast<std::int32_t>(bytes[i])) - zero) * scale;
  }
}

float carry(const float* values, const float* before, std::int64_t count, float* sum) {
  constexpr int kChains = 4;
  Floats top[kChains] = {};
  Ints is_nan{};
  std::int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      const std::int64_t place = i + chain * kLanes;
      Floats x = *reinterpret_cast<const LooseFloats*>(values + place);
      if (before != nullptr) x += *reinterpret_cast<const LooseFloats*>(before + place);
      *reinterpret_cast<LooseFloats*>(sum + place) = x;
      const Floats magnitude = bits_as<Floats>(bits_as<Words>(x) & 0x7FFFFFFFU);
      top[chain] = larger(top[chain], magnitude);
      is_nan |= x != x;
    }
  }
  float largest = 0;
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan = has_nan || is_nan[lane] != 0;
  for (int chain = 0; chain < kChains; ++chain) {
    const float above = largest_of(top[chain]);
    largest = above > largest ? above : largest;
  }
  for (; i < count; ++i) {
    sum[i] = before != nullptr ? values[i] + before[i] : values[i];
    const float magnitude = __builtin_fabsf(sum[i]);
    largest = magnitude > largest ? magnitude : largest;
    has_nan = has_nan || sum[i] != sum[i];
  }
  return has_nan ? __builtin_nanf("") : largest;
}

void pack_signed(float* __restrict__ values, std::int64_t count, float scale,
                 std::int8_t* __restrict__ bytes) {
  constexpr float kRounder = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
  for (std::int64_t i = 0; i < count; ++i) {
    float level = (values[i] / scale + kRounder) - kRounder;
    level = level == level ? level : 0.0F;
    level = level > -127.0F ? level : -127.0F;
    level = level < 127.0F ? level : 127.0F;
    bytes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(level));
    values[i] -= level * scale;
  }
}

void add_signed(const std::int8_t* __restrict__ bytes, std::int64_t count, float scale,
                float* __restrict__ sum) {
  for (std::int64_t i = 0; i < count; ++i) {
    sum[i] += static_cast<float>(static_cast<std::int32_t>(bytes[i])) * scale;
  }
}

}  // namespace

extern const ByteRowKernels TESSERA_KERNEL_TABLE(kByteRows);
const ByteRowKernels TESSERA_KERNEL_TABLE(kByteRows){range, pack,        add,
                                                     carry, pack_signed, add_signed};

}  // namespace tessera::kernels
