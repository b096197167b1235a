// First values of rows. Compiled once per instruction set; see kernels/CMakeLists.txt. A lane has a
// block of four numbers of a row, so that as many blocks are drawn at once as there are lanes.

#include "kernels/row_init.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#define TESSERA_HAS_WIDE_PRODUCTS 1
#endif

namespace tessera::kernels {
namespace {

#if defined(TESSERA_HAS_WIDE_PRODUCTS)

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef std::uint64_t Pairs __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Numbers __attribute__((vector_size(kLanes * 4)));
typedef float Floats __attribute__((vector_size(kLanes * 4)));

/// The products of the even lanes.
inline Pairs multiply_even(Pairs words, std::uint32_t factor) {
#if defined(__AVX512F__)
  // Without a mask GCC takes the lanes that are not written for uninitialised ones.
  constexpr __mmask8 kAll = 0xff;
  return reinterpret_cast<Pairs>(
      _mm512_maskz_mul_epu32(kAll, reinterpret_cast<__m512i>(words), _mm512_set1_epi64(factor)));
#else
  return reinterpret_cast<Pairs>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(words), _mm256_set1_epi64x(factor)));
#endif
}

/// Even lanes of the one, odd lanes of the other.
inline Words blend(Pairs even, Pairs odd) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_mask_blend_epi32(0xaaaa, reinterpret_cast<__m512i>(even),
                                                         reinterpret_cast<__m512i>(odd)));
#else
  return reinterpret_cast<Words>(
      _mm256_blend_epi32(reinterpret_cast<__m256i>(even), reinterpret_cast<__m256i>(odd), 0xaa));
#endif
}

/// Both halves of the product of every lane.
inline void multiply(Words words, std::uint32_t factor, Words& upper, Words& lower) {
  const auto pairs = reinterpret_cast<Pairs>(words);
  const Pairs even = multiply_even(pairs, factor);
  const Pairs odd = multiply_even(pairs >> 32, factor);
  lower = blend(even, odd << 32);
  upper = blend(even >> 32, odd);
}

inline void philox(Words (&counter)[4], std::uint64_t key) {
  auto low = static_cast<std::uint32_t>(key);
  auto high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    Words a[2];
    Words b[2];
    multiply(counter[0], kPhiloxFirst, a[1], a[0]);
    multiply(counter[2], kPhiloxSecond, b[1], b[0]);
    counter[0] = b[1] ^ counter[1] ^ low;
    counter[1] = b[0];
    counter[2] = a[1] ^ counter[3] ^ high;
    counter[3] = a[0];
    low += kPhiloxLow;
    high += kPhiloxHigh;
  }
}

inline Words words_of(const std::uint32_t (&numbers)[kLanes]) {
  Words words;
  __builtin_memcpy(&words, numbers, sizeof(words));
  return words;
}

void init_rows(const std::int64_t* ids, std::int64_t count, std::uint64_t seed,
               std::int64_t columns, float low, float high, float* values) {
  const float range = high - low;
  const std::int64_t blocks_per_row = (columns + 3) / 4;
  const std::int64_t num_blocks = count * blocks_per_row;
  std::int64_t row = 0;
  std::int64_t block = 0;  // of the row
  for (std::int64_t first = 0; first < num_blocks; first += kLanes) {
    std::uint32_t lower[kLanes];
    std::uint32_t upper[kLanes];
    std::uint32_t number[kLanes];
    float* places[kLanes];
    std::int64_t widths[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto id = static_cast<std::uint64_t>(ids[row]);
      lower[lane] = static_cast<std::uint32_t>(id);
      upper[lane] = static_cast<std::uint32_t>(id >> 32);
      number[lane] = static_cast<std::uint32_t>(block);
      places[lane] = values + row * columns + 4 * block;
      widths[lane] = columns - 4 * block;
      if (++block < blocks_per_row) continue;
      block = 0;
      if (row + 1 < count) ++row;  // lanes behind the last block draw for nobody
    }
    Words counter[4] = {words_of(lower), words_of(upper), words_of(number), Words{}};
    philox(counter, seed);
    float numbers[4][kLanes];
    for (int i = 0; i < 4; ++i) {
      const auto whole = reinterpret_cast<Numbers>(counter[i] >> 8);
      const Floats unit = __builtin_convertvector(whole, Floats) * 0x1p-24F;
      const Floats value = low + unit * range;
      __builtin_memcpy(numbers[i], &value, sizeof(value));
    }
    for (int lane = 0; lane < kLanes && first + lane < num_blocks; ++lane) {
      const float four[4] = {numbers[0][lane], numbers[1][lane], numbers[2][lane],
                             numbers[3][lane]};
      if (widths[lane] >= 4) {
        __builtin_memcpy(places[lane], four, sizeof(four));
      } else {
        for (std::int64_t i = 0; i < widths[lane]; ++i) places[lane][i] = four[i];
      }
    }
  }
}

#else

// One product after the other is as fast where lanes have no products of 64 bits.
void init_rows(const std::int64_t* ids, std::int64_t count, std::uint64_t seed,
               std::int64_t columns, float low, float high, float* values) {
  row_init_reference().init_rows(ids, count, seed, columns, low, high, values);
}

#endif

}  // namespace

extern const RowInitKernels TESSERA_KERNEL_TABLE(kRowInit);
const RowInitKernels TESSERA_KERNEL_TABLE(kRowInit){init_rows};

}  // namespace tessera::kernels
