// src/kernels/cpu/logit_axis.h — exponentials of logits as powers of two, for the softmax kernels
// of this folder.
//
// exp(scale (x - maximum)) is 2^t up to a factor that all elements of a row have in common. t grows
// in steps: `rate` of them per unit of x, counted from a whole number. What lies between the steps
// is then x * rate less a whole number, which a fused multiply-add rounds once, however large x is;
// so nothing but the choice of the whole number depends on the maximum, and sums about different
// ones are joined in double.
//
// Where the instruction set has no fused multiply-add, the distance from the maximum goes first.

#pragma once

#include "kernels/cpu/logit_vector.h"

#if defined(__AVX2__) && defined(__FMA__)
#define TESSERA_FUSED_POWERS 1
#else
#define TESSERA_FUSED_POWERS 0
#endif

namespace tessera::kernels {

namespace {

constexpr double kLog2OfE = 1.4426950408889634;
constexpr double kLargestFloat = 0x1.fffffep127;

/// The number of steps per unit of x. `scale` is 1 over a temperature; if it is so large that no
/// float holds the rate, the largest serves as well: any distance but 0 is then out of reach.
inline double rate_of(float scale, int steps) {
  const double rate = steps * kLog2OfE * static_cast<double>(scale);
  if (!TESSERA_FUSED_POWERS) return rate;
  return static_cast<double>(static_cast<float>(rate < kLargestFloat ? rate : kLargestFloat));
}

/// Where t lies on the axis of the logits: kSteps t = (x - from) * rate - origin.
template <int kSteps>
struct Axis {
  double rate = 0.0;
  float from = 0.0F;
  double origin = 0.0;  // a whole number, below 2^22

  /// The axis on which t is next to `t_at_top` where x = top, which must be finite. `*above` gets
  /// the difference: what t_at_top is above t.
  static Axis about(float top, double rate, double t_at_top, double* above) {
    const double product = static_cast<double>(top) * rate;
    const bool near = TESSERA_FUSED_POWERS && product < 0x1p21 && product > -0x1p21;
    const double exact = (near ? product : 0.0) - kSteps * t_at_top;
    constexpr double kRounder = 0x1.8p52;  // leaves the nearest whole number
    const double origin = (exact + kRounder) - kRounder;
    *above = (origin - exact) / kSteps;
    return {rate, near ? 0.0F : top, origin};
  }
  static Axis about(float top, double rate) {
    double above = 0.0;
    return about(top, rate, 0.0, &above);
  }

  /// Whether x * rate needs no subtraction before it.
  bool starts_at_zero() const { return TESSERA_FUSED_POWERS && from == 0.0F; }
  double at(float x) const { return (static_cast<double>(x - from) * rate - origin) / kSteps; }
  /// What t is below the t of an axis with nothing taken off.
  double offset() const { return (static_cast<double>(from) * rate + origin) / kSteps; }
};

#if TESSERA_FUSED_POWERS

#if defined(__AVX512F__)
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_maskz_fmadd_ps(0xFFFF, a, b, c); }
inline Floats fused_less(Floats a, Floats b, Floats c) {
  return _mm512_maskz_fmsub_ps(0xFFFF, a, b, c);
}
#else
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats fused_less(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
#endif

/// An axis in every lane. kFar: it does not start at zero.
template <int kSteps, bool kFar>
class Steps {
 public:
  explicit Steps(const Axis<kSteps>& axis)
      : rate_(splat(static_cast<float>(axis.rate))), from_(splat(axis.from)) {
    constexpr double kLowest = -127.0 * kSteps;  // the bits of 2^-127 are those of 0
    // The quotient is rounded by less than a quarter of a step: it still means the lowest.
    const double lowest = (axis.origin + kLowest) / axis.rate;
    lowest_ = splat(static_cast<float>(lowest > -kLargestFloat ? lowest : -kLargestFloat));
    // Adding it leaves the number of steps above the lowest in the low bits.
    rounder_ = splat(static_cast<float>(0x1.8p23 - (axis.origin + kLowest)));
  }

  /// x, or its distance from `from`, no lower than the lowest step. NaN stays NaN.
  Floats limited(Floats x) const {
    if constexpr (kFar) return larger(x - from_, lowest_);
    return larger(x, lowest_);
  }
  Floats shifted(Floats limit) const { return fused(limit, rate_, rounder_); }
  /// From -1/2 to 1/2 of a step.
  Floats rest(Floats limit, Floats shifted) const {
    return fused_less(limit, rate_, shifted - rounder_);
  }

 private:
  Floats rate_;
  Floats from_;
  Floats lowest_;
  Floats rounder_;
};

/// 2^t for t below 128, relative error below 2e-7. From t = -127 down it is exactly 0, which makes
/// it right for -inf; below 2^-126 it may be wrong by as much. NaN stays NaN.
template <bool kFar>
class Powers {
 public:
  /// kSteps is 8, so that a polynomial of degree 3 serves between the steps.
  using Line = Axis<8>;

  /// Makes all results `by` times as large; |by| is about 1.
  explicit Powers(const Line& axis, double by = 1.0) : steps_(axis) {
    // The bits of 2^(k/8), less those of 1 and less k/8 of an exponent, which the shift below adds.
    constexpr std::uint32_t kTable[8] = {0x00000000U, 0xFFFB95C2U, 0xFFF837F0U, 0xFFF5FED7U,
                                         0xFFF504F3U, 0xFFF5672AU, 0xFFF744FDU, 0xFFFAC0C7U};
    Words table{};
    for (int lane = 0; lane < kLanes; ++lane) table[lane] = kTable[lane % 8];
    table_ = bits_as<Floats>(table);
    constexpr double kCoefficients[4] = {1.0, 0.0866433978, 0.00375412614, 0.000108396292};
    for (int i = 0; i < 4; ++i) coefficients_[i] = splat(static_cast<float>(by * kCoefficients[i]));
  }

  /// The logit, or its distance from the axis, as the powers take it.
  Floats limited(Floats x) const { return steps_.limited(x); }

  /// 2^t + term, for what `limited` gave.
  Floats plus(Floats limit, Floats term) const {
    const Floats shifted = steps_.shifted(limit);
    const Floats rest = steps_.rest(limit, shifted);
    Floats fraction = fused(rest, coefficients_[3], coefficients_[2]);
    fraction = fused(fraction, rest, coefficients_[1]);
    fraction = fused(fraction, rest, coefficients_[0]);
    const Words power = bits_as<Words>(entry(shifted)) + (bits_as<Words>(shifted) << 20);
    return fused(fraction, bits_as<Floats>(power), term);
  }

 private:
  /// Of the table, the one that the low three bits name.
  Floats entry(Floats shifted) const {
#if defined(__AVX512F__)
    return _mm512_maskz_permutexvar_ps(0xFFFF, bits_as<__m512i>(shifted), table_);
#else
    return _mm256_permutevar8x32_ps(table_, bits_as<__m256i>(shifted));
#endif
  }

  Steps<8, kFar> steps_;
  Floats table_;
  Floats coefficients_[4];
};

#else

/// 2^t by the exponential, for t below 115.
template <bool kFar>
class Powers {
 public:
  using Line = Axis<8>;

  explicit Powers(const Line& axis) : from_(splat(axis.from)) {
    const double scale = axis.rate / (8.0 * kLog2OfE);
    const double lowest = -88.0 / scale;
    scale_ = splat(static_cast<float>(scale));
    lowest_ = splat(static_cast<float>(lowest > -kLargestFloat ? lowest : -kLargestFloat));
  }
  Floats limited(Floats x) const { return larger(x - from_, lowest_); }
  Floats plus(Floats limit, Floats term) const { return exponential(limit * scale_) + term; }

 private:
  Floats from_;
  Floats scale_;
  Floats lowest_;
};

#endif

/// Calls `body(lanes)` with the axis in every lane; `further` goes to the constructor.
template <typename Body, typename... Further>
inline void with_powers(const Axis<8>& axis, const Body& body, Further... further) {
  if (axis.starts_at_zero()) {
    body(Powers<false>(axis, further...));
  } else {
    body(Powers<true>(axis, further...));
  }
}

}  // namespace

}  // namespace tessera::kernels
