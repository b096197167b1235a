// The meaning of kernels/reduce.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tessera::kernels {

namespace {

struct Bool {
  std::uint8_t value;
};
struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

/// Value of a binary float with `exponent_bits` and `fraction_bits`, from its bits.
float value_of(std::uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const auto fraction = static_cast<float>(bits & ((1U << fraction_bits) - 1));
  const float sign = ((bits >> (exponent_bits + fraction_bits)) & 1U) != 0 ? -1.0F : 1.0F;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  const float hidden = std::ldexp(1.0F, fraction_bits);
  return sign * std::ldexp(hidden + fraction, exponent - bias - fraction_bits);
}

/// Bits of the nearest binary float with that format; ties go to the even fraction.
std::uint16_t bits_of(float value, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t infinity = ((1U << exponent_bits) - 1U) << fraction_bits;
  const std::uint32_t sign = std::signbit(value) ? 1U << (exponent_bits + fraction_bits) : 0U;
  if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (infinity >> 1) | 1U);
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  int exponent = 0;
  std::frexp(std::fabs(value), &exponent);
  const int unit = std::max(exponent - 1, 1 - bias) - fraction_bits;  // weight of the last place
  const double steps = std::nearbyint(std::ldexp(static_cast<double>(std::fabs(value)), -unit));
  if (steps == 0.0) return static_cast<std::uint16_t>(sign);
  // Counting in units of the last place, the bit patterns of the format are consecutive integers.
  const std::int64_t base = static_cast<std::int64_t>(unit + fraction_bits + bias - 1)
                            << fraction_bits;
  const std::int64_t bits = base + static_cast<std::int64_t>(steps);
  return static_cast<std::uint16_t>(sign | std::min<std::int64_t>(bits, infinity));
}

float widen(Half x) { return value_of(x.bits, 5, 10); }
float widen(Brain x) { return value_of(x.bits, 8, 7); }
bool widen(Bool x) { return x.value != 0; }
template <typename T>
T widen(T x) {
  return x;
}

void narrow(float x, Half& out) { out.bits = bits_of(x, 5, 10); }
void narrow(float x, Brain& out) { out.bits = bits_of(x, 8, 7); }
void narrow(bool x, Bool& out) { out.value = x ? 1 : 0; }
template <typename T>
void narrow(T x, T& out) {
  out = x;
}

template <typename W>
W combine(Reduction reduction, W a, W b) {
  if constexpr (std::is_floating_point_v<W>) {
    switch (reduction) {
      case Reduction::kMin:
        return std::isnan(a) || std::isnan(b) ? std::numeric_limits<W>::quiet_NaN()
                                              : (b < a ? b : a);
      case Reduction::kMax:
        return std::isnan(a) || std::isnan(b) ? std::numeric_limits<W>::quiet_NaN()
                                              : (b > a ? b : a);
      case Reduction::kProduct:
        return a * b;
      default:
        return a + b;
    }
  } else if constexpr (std::is_same_v<W, bool>) {
    switch (reduction) {
      case Reduction::kMin:
      case Reduction::kProduct:
      case Reduction::kBand:
        return a && b;
      case Reduction::kBxor:
        return a != b;
      default:
        return a || b;
    }
  } else {
    const auto x = static_cast<std::uint64_t>(a);
    const auto y = static_cast<std::uint64_t>(b);
    switch (reduction) {
      case Reduction::kMin:
        return b < a ? b : a;
      case Reduction::kMax:
        return b > a ? b : a;
      case Reduction::kProduct:
        return static_cast<W>(x * y);
      case Reduction::kBand:
        return static_cast<W>(x & y);
      case Reduction::kBor:
        return static_cast<W>(x | y);
      case Reduction::kBxor:
        return static_cast<W>(x ^ y);
      default:
        return static_cast<W>(x + y);
    }
  }
}

template <typename T>
T load(const void* array, std::int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(array) + i * static_cast<std::int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

template <typename T>
void reduce_loop(Reduction reduction, const void* const* sources, int num_sources,
                 void* const* destinations, int num_destinations, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    auto total = widen(load<T>(sources[0], i));
    for (int s = 1; s < num_sources; ++s) {
      total = combine(reduction, total, widen(load<T>(sources[s], i)));
    }
    if constexpr (std::is_floating_point_v<decltype(total)>) {
      if (reduction == Reduction::kAvg) total /= static_cast<decltype(total)>(num_sources);
    }
    T result;
    narrow(total, result);
    for (int d = 0; d < num_destinations; ++d) {
      std::memcpy(static_cast<char*>(destinations[d]) + i * static_cast<std::int64_t>(sizeof(T)),
                  &result, sizeof(T));
    }
  }
}

void reduce_plainly(Element element, Reduction reduction, const void* const* sources,
                    int num_sources, void* const* destinations, int num_destinations,
                    std::int64_t count, Store /*store*/) {
  const auto run = [&](auto zero) {
    reduce_loop<decltype(zero)>(reduction, sources, num_sources, destinations, num_destinations,
                                count);
  };
  switch (element) {
    case Element::kBool:
      return run(Bool{});
    case Element::kUInt8:
      return run(std::uint8_t{});
    case Element::kInt8:
      return run(std::int8_t{});
    case Element::kInt16:
      return run(std::int16_t{});
    case Element::kInt32:
      return run(std::int32_t{});
    case Element::kInt64:
      return run(std::int64_t{});
    case Element::kFloat16:
      return run(Half{});
    case Element::kBFloat16:
      return run(Brain{});
    case Element::kFloat32:
      return run(float{});
    case Element::kFloat64:
      return run(double{});
  }
}

void copy_plainly(void* destination, const void* source, std::size_t bytes, Store /*store*/) {
  if (bytes != 0) std::memcpy(destination, source, bytes);
}

}  // namespace

const ReduceKernels& reduce_reference() noexcept {
  static const ReduceKernels kernels{reduce_plainly, copy_plainly};
  return kernels;
}

}  // namespace tessera::kernels
