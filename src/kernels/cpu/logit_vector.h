// src/kernels/cpu/logit_vector.h — vectors of logits for the softmax kernels of this folder.
//
// Written with the compilers' vector types, so that the width follows the flags of the file that
// includes it. Everything is in an anonymous namespace and calls no inline function of the standard
// library: see the note at the top of cpu/reduce.cpp.

#pragma once

#include "kernels/reduce.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace tessera::kernels {

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));
typedef double HalfDoubles __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));

typedef Floats LooseFloats __attribute__((aligned(1), may_alias));
typedef Words LooseWords __attribute__((aligned(1), may_alias));

constexpr float kMinusInfinity = -__builtin_inff();

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

inline Floats splat(float value) { return value - Floats{}; }

/// Lanes of `b` that are not greater keep `a`, so a NaN in `b` is passed over and one in `a` stays.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xFFFF, b, a);  // GCC 12 warns about its own plain form
#elif defined(__AVX2__)
  return _mm256_max_ps(b, a);
#else
  return b > a ? b : a;
#endif
}

/// exp for arguments up to 80, relative error below 2e-7. Below -87.7 the result is exactly 0,
/// which makes exp(-inf) right; NaN stays NaN.
inline Floats exponential(Floats x) {
  constexpr float kRounder = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
  // From here on the power of two below is 2^-127, which its bits spell as 0.
  x = larger(x, splat(-88.0F));
  const Floats shifted = x * 1.44269504F + kRounder;
  const Floats whole = shifted - kRounder;
#if defined(__FMA__)
  const Floats rest = x - whole * 0.693147182F;
#else
  const Floats rest = (x - whole * 0.693359375F) + whole * 2.12194440e-4F;
#endif
  Floats value = rest * 0.00829027221F + 0.0418981612F;
  value = value * rest + 0.166676387F;
  value = value * rest + 0.499991477F;
  value = value * rest + 0.999999702F;
  value = value * rest + 1.0F;
  const Words power = (bits_as<Words>(shifted) << 23) + 0x3F800000U;
  return value * bits_as<Floats>(power);
}

/// Sums in double, one per lane.
class DoubleLanes {
 public:
  void operator+=(Floats x) {
    const auto halves = bits_as<Halves>(x);
    low_ += __builtin_convertvector(halves.low, HalfDoubles);
    high_ += __builtin_convertvector(halves.high, HalfDoubles);
  }
  double total() const {
    const HalfDoubles sums = low_ + high_;
    double total = 0.0;
    for (int lane = 0; lane < kLanes / 2; ++lane) total += sums[lane];
    return total;
  }

 private:
  struct Halves {
    HalfFloats low;
    HalfFloats high;
  };
  HalfDoubles low_{};
  HalfDoubles high_{};
};

/// Whether any lane of `a` is greater than that of `b`.
inline bool any_greater(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
#else
  const Ints greater = a > b;
  std::int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= greater[lane];
  return any != 0;
#endif
}

inline float largest_of(Floats x) {
  float result = x[0];
  for (int lane = 1; lane < kLanes; ++lane) result = x[lane] > result ? x[lane] : result;
  return result;
}

/// Two vectors of logits. Which lane holds which element is the affair of the form that loads them:
/// `store` puts every element back where `load` found it.
struct Pair {
  Floats a;
  Floats b;
};
constexpr int kPair = 2 * kLanes;

template <typename Vector>
inline void store_vector(void* to, Vector value, bool streaming) {
#if defined(__SSE2__)
  if (streaming) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(to), bits_as<__m512i>(value));
#elif defined(__AVX2__)
    _mm256_stream_si256(static_cast<__m256i*>(to), bits_as<__m256i>(value));
#else
    _mm_stream_si128(static_cast<__m128i*>(to), bits_as<__m128i>(value));
#endif
    return;
  }
#endif
  (void)streaming;
  __builtin_memcpy(to, &value, sizeof(value));
}

inline void store_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

struct SingleForm {
  using Stored = float;
  static constexpr Stored kPadding = kMinusInfinity;
  static constexpr int kBlock = 1024;
  static float widen(Stored x) { return x; }
  static Pair load(const Stored* from) {
    return {*reinterpret_cast<const LooseFloats*>(from),
            *reinterpret_cast<const LooseFloats*>(from + kLanes)};
  }
  static void store(Stored* to, Pair pair, bool streaming) {
    store_vector(to, pair.a, streaming);
    store_vector(to + kLanes, pair.b, streaming);
  }
};

struct BrainForm {
  using Stored = std::uint16_t;
  static constexpr Stored kPadding = 0xFF80;
  static constexpr int kBlock = 1024;
  static float widen(Stored x) { return bits_as<float>(static_cast<std::uint32_t>(x) << 16); }
  static Pair load(const Stored* from) {
    const Words words = *reinterpret_cast<const LooseWords*>(from);
    return {bits_as<Floats>(words << 16), bits_as<Floats>(words & 0xFFFF0000U)};
  }
  static Words rounded(Floats x) {
    const Words bits = bits_as<Words>(x);
    // A NaN stays one without a check: what arithmetic on 16-bit inputs makes has a low half of 0.
    return bits + 0x7FFFU + ((bits >> 16) & 1U);
  }
  static void store(Stored* to, Pair pair, bool streaming) {
    store_high(to, rounded(pair.a), rounded(pair.b), streaming);
  }
  static void store_high(Stored* to, Words a, Words b, bool streaming) {
    const Words low = a >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
    store_vector(to, _mm256_blend_epi16(bits_as<__m256i>(low), bits_as<__m256i>(b), 0xAA),
                 streaming);
#else
    store_vector(to, low | (b & 0xFFFF0000U), streaming);
#endif
  }
};

struct HalfForm {
  using Stored = std::uint16_t;
  static constexpr Stored kPadding = 0xFC00;
  static constexpr int kBlock = 1024;
  // Exponent and fraction move to their places in a float whose exponent is 112 too small; the
  // product with 2^112 sets it right, subnormals included. Infinity and NaN take the last exponent.
  static Floats widened(Words bits) {
    const Words magnitude = (bits & 0x7FFFU) << 13;
    const Words sign = (bits & 0x8000U) << 16;
    const Words scaled = bits_as<Words>(bits_as<Floats>(magnitude) * 0x1p112F);
    const Words finite = magnitude >= (0x7C00U << 13) ? (magnitude | 0x7F800000U) : scaled;
    return bits_as<Floats>(finite | sign);
  }
  static float widen(Stored x) { return widened(Words{} + static_cast<std::uint32_t>(x))[0]; }
#if defined(__AVX512F__)
  static Pair load(const Stored* from) {
    const auto* halves = reinterpret_cast<const __m256i*>(from);
    return {_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(halves)),
            _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(halves + 1))};
  }
  static void store(Stored* to, Pair pair, bool streaming) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i low = _mm512_castsi256_si512(_mm512_maskz_cvtps_ph(0xFFFF, pair.a, kNearest));
    const __m256i high = _mm512_maskz_cvtps_ph(0xFFFF, pair.b, kNearest);
    store_vector(to, _mm512_maskz_inserti64x4(0xFF, low, high, 1), streaming);
  }
#elif defined(__F16C__)
  static Pair load(const Stored* from) {
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  static void store(Stored* to, Pair pair, bool streaming) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    store_vector(
        to, _mm256_set_m128i(_mm256_cvtps_ph(pair.b, kNearest), _mm256_cvtps_ph(pair.a, kNearest)),
        streaming);
  }
#else
  static Pair load(const Stored* from) {
    const Words words = *reinterpret_cast<const LooseWords*>(from);
    return {widened(words & 0xFFFFU), widened(words >> 16)};
  }
  static Words rounded(Floats x) {
    const Words bits = bits_as<Words>(x);
    const Words sign = (bits >> 16) & 0x8000U;
    const Words magnitude = bits & 0x7FFFFFFFU;
    // Below 2^-14 the result is subnormal: adding 0.5 makes the float's own rounding drop the bits.
    const Words small = bits_as<Words>(bits_as<Floats>(magnitude) + 0.5F) - 0x3F000000U;
    const Words normal = (magnitude - (112U << 23) + 0x0FFFU + ((magnitude >> 13) & 1U)) >> 13;
    const Words finite = magnitude < 0x38800000U ? small : normal;
    const Words infinite = magnitude > 0x7F800000U ? Words{} + 0x7E00U : Words{} + 0x7C00U;
    // 65520 is the first value that rounds to infinity.
    return sign | (magnitude >= 0x477FF000U ? infinite : finite);
  }
  static void store(Stored* to, Pair pair, bool streaming) {
    store_vector(to, rounded(pair.a) | (rounded(pair.b) << 16), streaming);
  }
#endif
};

/// Calls `body(form)` for the form of the element type.
template <typename Body>
inline void with_form(Element element, const Body& body) {
  switch (element) {
    case Element::kBFloat16:
      return body(BrainForm{});
    case Element::kFloat16:
      return body(HalfForm{});
    default:
      return body(SingleForm{});
  }
}

/// Asks for what a later block reads, while this one computes: otherwise memory rests meanwhile.
template <typename Stored>
inline void prefetch_ahead(const Stored* from) {
  __builtin_prefetch(from, /*rw=*/0, /*locality=*/3);
}

/// Up to kPair elements, the rest filled up with -inf.
template <typename Form>
inline Pair load_part(const typename Form::Stored* from, std::int64_t count) {
  typename Form::Stored buffer[kPair];
  for (int i = 0; i < kPair; ++i) buffer[i] = i < count ? from[i] : Form::kPadding;
  return Form::load(buffer);
}

}  // namespace

}  // namespace tessera::kernels
