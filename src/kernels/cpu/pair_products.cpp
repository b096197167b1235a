// Products of pairs of short vectors. Compiled once per instruction set; see kernels/CMakeLists.txt
// and the note at the top of reduce.cpp.
//
// A sample's vectors stay in the first cache. One vector meets eight others at a time, so that
// eight sums are in flight and are added up across their lanes together. In the gradient a pair is
// visited once and adds to both of its vectors: one of them in registers, the other in place.

#include "kernels/pair_products.h"

#include "kernels/cpu/row_vector.h"

namespace tessera::kernels {
namespace {

constexpr int kTogether = 8;

/// The vectors of a sample.
struct Places {
  const float* at[kMostPairVectors + 1 + kTogether];

  Places(const SampleVectors& vectors, std::int64_t sample) {
    const float* parts = vectors.parts + sample * vectors.parts_stride;
    at[0] = vectors.first + sample * vectors.first_stride;
    for (std::int64_t i = 0; i < vectors.count; ++i) at[i + 1] = parts + vectors.offsets[i];
    // Blocks of eight run past the end: what they find there is not used.
    for (int t = 0; t < kTogether; ++t) at[vectors.count + 1 + t] = at[0];
  }
};

/// sums[t] = the sum of the lanes of parts[t].
inline void add_lanes(const Floats* parts, float* sums) {
#if defined(__AVX2__)
  typedef float Octet __attribute__((vector_size(32)));
  Octet part[kTogether];
#pragma GCC unroll 8
  for (int t = 0; t < kTogether; ++t) {
#if defined(__AVX512F__)
    part[t] = __builtin_shufflevector(parts[t], parts[t], 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(parts[t], parts[t], 8, 9, 10, 11, 12, 13, 14, 15);
#else
    part[t] = parts[t];
#endif
  }
  const auto four = [](Octet a, Octet b, Octet c, Octet d) {
    return _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  };
  const __m256 left = four(part[0], part[1], part[2], part[3]);
  const __m256 right = four(part[4], part[5], part[6], part[7]);
  _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_permute2f128_ps(left, right, 0x20),
                                       _mm256_permute2f128_ps(left, right, 0x31)));
#else
  for (int t = 0; t < kTogether; ++t) {
    sums[t] = 0;
    for (int lane = 0; lane < kLanes; ++lane) sums[t] += parts[t][lane];
  }
#endif
}

void products(const SampleVectors& vectors, std::int64_t begin, std::int64_t end, float* output) {
  const std::int64_t dim = vectors.dim;
  const std::int64_t whole = dim / kLanes * kLanes;
  for (std::int64_t b = begin; b < end; ++b) {
    const Places places(vectors, b);
    float* out = output + b * vectors.num_outputs();
    const float* out_end = out + vectors.num_outputs();
    for (std::int64_t c = 0; c < dim; ++c) out[c] = places.at[0][c];
    out += dim;
    for (std::int64_t i = 1; i <= vectors.count; ++i) {
      const float* x = places.at[i];
      for (std::int64_t j = 0; j < i; j += kTogether) {
        const float* const* others = places.at + j;
        Floats parts[kTogether] = {};
        for (std::int64_t c = 0; c < whole; c += kLanes) {
          const Floats mine = SingleRow::load(x + c);
#pragma GCC unroll 8
          for (int t = 0; t < kTogether; ++t) parts[t] += mine * SingleRow::load(others[t] + c);
        }
        float sums[kTogether];
        add_lanes(parts, sums);
        for (std::int64_t c = whole; c < dim; ++c) {
          for (int t = 0; t < kTogether; ++t) sums[t] += x[c] * others[t][c];
        }
        // What is written beyond the row is written over by the next one.
        const std::int64_t left = i - j < kTogether ? i - j : kTogether;
        if (out + kTogether <= out_end) {
          __builtin_memcpy(out, sums, sizeof(sums));
        } else {
          for (std::int64_t t = 0; t < left; ++t) out[t] = sums[t];
        }
        out += left;
      }
    }
  }
}

/// The gradients of one sample in kVectors * kLanes columns from `column` on.
template <int kVectors>
inline void add_block(const Places& places, std::int64_t count, std::int64_t column,
                      const float* gradient, float* const* to) {
  for (std::int64_t i = 1; i <= count; ++i) {
    const float* x = places.at[i] + column;
    Floats mine[kVectors];
    Floats sums[kVectors] = {};
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) mine[v] = SingleRow::load(x + v * kLanes);
    for (std::int64_t j = 0; j < i; ++j) {
      const Floats factor = splat(*gradient++);
      const float* other = places.at[j] + column;
      float* sum = to[j] + column;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[v] += factor * SingleRow::load(other + v * kLanes);
        store(sum + v * kLanes, SingleRow::load(sum + v * kLanes) + factor * mine[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(to[i] + column + v * kLanes, sums[v]);
  }
}

inline void add_column(const Places& places, std::int64_t count, std::int64_t column,
                       const float* gradient, float* const* to) {
  for (std::int64_t i = 1; i <= count; ++i) {
    float sum = 0;
    for (std::int64_t j = 0; j < i; ++j) {
      const float factor = *gradient++;
      sum += factor * places.at[j][column];
      to[j][column] += factor * places.at[i][column];
    }
    to[i][column] = sum;
  }
}

void gradients(const SampleVectors& vectors, std::int64_t begin, std::int64_t end,
               const float* gradient, float* first_gradient, float* parts_gradient) {
  const std::int64_t dim = vectors.dim;
  for (std::int64_t b = begin; b < end; ++b) {
    const Places places(vectors, b);
    float* to[kMostPairVectors + 1];
    to[0] = first_gradient + b * dim;
    for (std::int64_t i = 0; i < vectors.count; ++i) {
      to[i + 1] = parts_gradient + b * vectors.parts_stride + vectors.offsets[i];
    }
    const float* row = gradient + b * vectors.num_outputs();
    for (std::int64_t c = 0; c < dim; ++c) to[0][c] = row[c];
    row += dim;
    std::int64_t column = 0;
    const auto left = [&] { return (dim - column) / kLanes; };
    for (; left() >= 4; column += 4 * kLanes) add_block<4>(places, vectors.count, column, row, to);
    for (; left() >= 1; column += kLanes) add_block<1>(places, vectors.count, column, row, to);
    for (; column < dim; ++column) add_column(places, vectors.count, column, row, to);
  }
}

}  // namespace

extern const PairProductKernels TESSERA_KERNEL_TABLE(kPairProducts);
const PairProductKernels TESSERA_KERNEL_TABLE(kPairProducts){products, gradients};

}  // namespace tessera::kernels
