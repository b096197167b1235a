// src/kernels/cpu/row_vector.h — vectors of the numbers of a table's row, for the table kernels of
// this folder. Unlike the forms of logit_vector.h they keep the order of the elements, because rows
// meet float32 gradients.

#pragma once

#include "kernels/cpu/logit_vector.h"
#include "kernels/table_rows.h"

namespace tessera::kernels {

namespace {

typedef std::uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef Shorts LooseShorts __attribute__((aligned(1), may_alias));

struct SingleRow {
  using Stored = float;
  static float widen(Stored x) { return x; }
  static Floats load(const Stored* from) { return *reinterpret_cast<const LooseFloats*>(from); }
};

struct BrainRow {
  using Stored = std::uint16_t;
  static float widen(Stored x) { return BrainForm::widen(x); }
  static Floats load(const Stored* from) {
    const Shorts shorts = *reinterpret_cast<const LooseShorts*>(from);
    return bits_as<Floats>(__builtin_convertvector(shorts, Words) << 16);
  }
  static Stored narrow(float x) {
    const std::uint32_t bits = bits_as<std::uint32_t>(x);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<Stored>((bits >> 16) | 0x40U);
    return static_cast<Stored>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
  }
  static Stored narrow_at_random(float x, std::uint32_t random) {
    return stochastic_brain(x, random);
  }
};

struct HalfRow {
  using Stored = std::uint16_t;
  static float widen(Stored x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    return HalfForm::widen(x);
#endif
  }
  static Floats load(const Stored* from) {
#if defined(__AVX512F__)
    return bits_as<Floats>(
        _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__) && defined(__AVX2__)
    return bits_as<Floats>(
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    const Shorts shorts = *reinterpret_cast<const LooseShorts*>(from);
    return HalfForm::widened(__builtin_convertvector(shorts, Words));
#endif
  }
  static Stored narrow(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    return static_cast<Stored>(HalfForm::rounded(splat(x))[0]);
#endif
  }
  static Stored narrow_at_random(float x, std::uint32_t random) {
    return stochastic_half(x, random);
  }
};

inline void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof(value)); }

/// Calls `body(row)` for the form of the element type.
template <typename Body>
inline auto with_row(Element element, const Body& body) {
  switch (element) {
    case Element::kBFloat16:
      return body(BrainRow{});
    case Element::kFloat16:
      return body(HalfRow{});
    default:
      return body(SingleRow{});
  }
}

// GCC takes a function that only prefetches for one that does nothing, and drops calls of it: such
// functions are inlined before it looks.
#define TESSERA_INLINE_ALWAYS inline __attribute__((always_inline))

constexpr std::int64_t kLineBytes = 64;

/// How many rows ahead to fetch, so that about 128 lines are under way: more than one core can have
/// open, and few enough not to push each other out.
inline std::int64_t rows_ahead(std::int64_t bytes_per_row) {
  const std::int64_t lines = (bytes_per_row + kLineBytes - 1) / kLineBytes;
  const std::int64_t rows = 128 / (lines < 1 ? 1 : lines);
  return rows < 3 ? 3 : (rows > 32 ? 32 : rows);
}

/// Brings a line into the second-level cache and no further. Rows at random places are bound by how
/// many lines are awaited at once, and that cache can wait for more of them than the first.
TESSERA_INLINE_ALWAYS void prefetch_line(const void* line) {
  __builtin_prefetch(line, /*rw=*/0, /*locality=*/2);
}

TESSERA_INLINE_ALWAYS void prefetch(const void* from, std::int64_t bytes) {
  const char* first = static_cast<const char*>(from);
  constexpr std::int64_t kMost = 32 * kLineBytes;
  const std::int64_t count = bytes < kMost ? bytes : kMost;
#pragma GCC unroll 8
  for (std::int64_t at = 0; at < count; at += kLineBytes) prefetch_line(first + at);
  // A row that does not begin at a line ends in one more.
  if ((reinterpret_cast<std::uintptr_t>(first) & (kLineBytes - 1)) != 0 && count > 0) {
    prefetch_line(first + count - 1);
  }
}

typedef float FourFloats __attribute__((vector_size(16)));

/// The sum over the elements of two arrays: 16 sums, of which halves are added until one is left,
/// so that all levels add alike.
template <typename Row>
inline float dot(const typename Row::Stored* a, const float* b, std::int64_t count) {
  constexpr int kSums = 16 / kLanes;
  Floats sums[kSums] = {};
  const std::int64_t whole = count / 16 * 16;
  for (std::int64_t c = 0; c < whole; c += 16) {
    for (int i = 0; i < kSums; ++i) {
      sums[i] += Row::load(a + c + i * kLanes) * SingleRow::load(b + c + i * kLanes);
    }
  }
  FourFloats quarters[4];
  __builtin_memcpy(quarters, sums, sizeof(quarters));
  const FourFloats four = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
  float total = (four[0] + four[2]) + (four[1] + four[3]);
  for (std::int64_t c = whole; c < count; ++c) total += Row::widen(a[c]) * b[c];
  return total;
}

}  // namespace

}  // namespace tessera::kernels
