// Reads rows of few bits on CUDA. The lanes of a bag each hold one 32-bit word of a row, and
// several rows are on their way at once. A lane adds the rows of its bag in their order, and
// products are rounded before they are added: the bits are those of the CPU.

#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/quantised_launch.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// Rows on their way per lane; a position has one.
template <bool kIsSequence>
constexpr int kFlight = kIsSequence ? 1 : 4;

// What a word of a row holds.
template <RowType kType>
struct Word;
template <>
struct Word<RowType::kFloat32> {
  static constexpr int kCount = 1;
  __device__ static void widen(std::uint32_t word, float* to) { to[0] = __uint_as_float(word); }
};
template <>
struct Word<RowType::kFloat16> {
  static constexpr int kCount = 2;
  __device__ static void widen(std::uint32_t word, float* to) {
    to[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xFFFF)));
    to[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
};
template <>
struct Word<RowType::kBFloat16> {
  static constexpr int kCount = 2;
  __device__ static void widen(std::uint32_t word, float* to) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xFFFF0000U);
  }
};
template <int kBits>
struct Codes {
  static constexpr int kCount = 32 / kBits;
  __device__ static void widen(std::uint32_t word, float* to) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = static_cast<float>((word >> (i * kBits)) & ((1U << kBits) - 1U));
    }
  }
};
template <>
struct Word<RowType::kInt8> : Codes<8> {};
template <>
struct Word<RowType::kInt4> : Codes<4> {};
template <>
struct Word<RowType::kInt2> : Codes<2> {};
template <>
struct Word<RowType::kFloat8> {
  static constexpr int kCount = 4;
  // e4m3 without infinities: 1 bit sign, 4 exponent (bias 7), 3 mantissa; 0x7F and 0xFF are NaN.
  __device__ static float one(std::uint32_t code) {
    const std::uint32_t magnitude = code & 0x7FU;
    float value;
    if (magnitude == 0x7FU) {
      value = __uint_as_float(0x7FC00000U);
    } else if (magnitude < 8) {
      value = static_cast<float>(magnitude) * 0x1p-9F;  // subnormal
    } else {
      value = __uint_as_float((magnitude << 20) + (120U << 23));
    }
    return (code & 0x80U) != 0 ? -value : value;
  }
  __device__ static void widen(std::uint32_t word, float* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = one((word >> (8 * i)) & 0xFFU);
  }
};

template <RowType kType>
constexpr bool kIsPlain =
    kType == RowType::kFloat32 || kType == RowType::kFloat16 || kType == RowType::kBFloat16;
template <RowType kType>
constexpr bool kHasBias = !kIsPlain<kType> && kType != RowType::kFloat8;
template <RowType kType>
constexpr int kHead = kIsPlain<kType> ? 0 : 4;

__host__ __device__ inline int lanes_of(std::int64_t num_words) {
  int lanes = 1;
  while (lanes < 32 && lanes < num_words) lanes *= 2;
  return lanes;
}

template <RowType kType>
__host__ __device__ std::int64_t words_of(std::int64_t num_columns) {
  return (num_columns + Word<kType>::kCount - 1) / Word<kType>::kCount;
}

// A word of a row; bytes behind the row's end read as 0.
__device__ __forceinline__ std::uint32_t load_word(const std::uint8_t* row, std::int64_t place,
                                                   std::int64_t row_bytes, bool is_aligned) {
  if (is_aligned) return __ldg(reinterpret_cast<const unsigned int*>(row + place));
  std::uint32_t word = 0;
  for (int i = 0; i < 4 && place + i < row_bytes; ++i) {
    word |= static_cast<std::uint32_t>(__ldg(row + place + i)) << (8 * i);
  }
  return word;
}

__device__ __forceinline__ float half_of(std::uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits & 0xFFFFU)));
}

/// Bags of the features of this type; gridDim.y counts all features. Without pooling a bag is a
/// position.
template <RowType kType, bool kIsSequence>
__global__ void __launch_bounds__(kThreads,
                                  (kIsSequence ? 6 : 4) - (Word<kType>::kCount > 8 ? 2 : 0))
    lookup_kernel(QuantisedCall call, float* output) {
  using Form = Word<kType>;
  constexpr int kCount = Form::kCount;
  constexpr int kRows = kFlight<kIsSequence>;
  const QuantisedFeature& feature = call.features[blockIdx.y];
  if (feature.rows.type != kType) return;
  const std::int64_t columns = feature.rows.num_columns;
  const std::int64_t num_words = words_of<kType>(columns);
  const int lanes = lanes_of(num_words);
  const int shift = 31 - __clz(lanes);
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const std::int64_t per_block = kThreads >> shift;
  const std::int64_t* offsets = call.offsets + blockIdx.y * call.num_bags;
  const std::int64_t begin = kIsSequence ? offsets[0] : 0;
  const std::int64_t count = kIsSequence ? offsets[call.num_bags] - begin : call.num_bags;
  const std::uint8_t* data = feature.rows.data;
  const std::int64_t row_bytes = feature.rows.row_bytes;
  const auto num_rows = static_cast<std::uint64_t>(feature.rows.num_rows);
  const bool is_aligned = row_bytes % 4 == 0 && reinterpret_cast<std::uintptr_t>(data) % 4 == 0;
  for (std::int64_t bag = blockIdx.x * per_block + (threadIdx.x >> shift); bag < count;
       bag += static_cast<std::int64_t>(gridDim.x) * per_block) {
    const std::int64_t first = kIsSequence ? begin + bag : offsets[bag];
    const std::int64_t last = kIsSequence ? first + 1 : offsets[bag + 1];
    float* to = output + (kIsSequence ? first : bag) * call.stride + feature.column;
    const float factor =
        !kIsSequence && feature.is_mean && last > first
            ? __frcp_rn(static_cast<float>(last - first))  // 1 / x, rounded to the nearest
            : 1.0F;
    for (std::int64_t word = lane; word < num_words; word += lanes) {
      float sums[kCount] = {};
      float biases = 0;
      for (std::int64_t base = first; base < last; base += kRows) {
        std::uint32_t heads[kRows];
        std::uint32_t words[kRows];
        float weights[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          const std::int64_t k = base + u < last ? base + u : last - 1;
          auto id = static_cast<std::uint64_t>(call.ids[k]);
          if (id >= num_rows) id = 0;
          const std::uint8_t* row = data + static_cast<std::int64_t>(id) * row_bytes;
          weights[u] = call.weights == nullptr ? 1.0F : call.weights[k];
          heads[u] =
              kHead<kType> > 0 && num_rows > 0 ? load_word(row, 0, row_bytes, is_aligned) : 0;
          words[u] =
              num_rows > 0 ? load_word(row, kHead<kType> + 4 * word, row_bytes, is_aligned) : 0;
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (base + u >= last) continue;
          float codes[kCount];
          Form::widen(words[u], codes);
          const float scale =
              kIsPlain<kType> ? weights[u] : __fmul_rn(weights[u], half_of(heads[u]));
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const float product = __fmul_rn(scale, codes[i]);
            sums[i] = kIsSequence ? product : __fadd_rn(sums[i], product);
          }
          if constexpr (kHasBias<kType>) {
            const float bias = __fmul_rn(weights[u], half_of(heads[u] >> 16));
            biases = kIsSequence ? bias : __fadd_rn(biases, bias);
          }
        }
      }
      const bool has_bias = kHasBias<kType> && last > first;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const std::int64_t column = word * kCount + i;
        if (column >= columns) continue;
        const float sum = has_bias ? __fadd_rn(sums[i], biases) : sums[i];
        to[column] = kIsSequence ? sum : __fmul_rn(factor, sum);
      }
    }
  }
}

__global__ void set_kernel(std::int64_t* result, std::int64_t value) { *result = value; }

/// One thread per bag of any feature.
__global__ void __launch_bounds__(kThreads) check_kernel(QuantisedCall call, std::int64_t* result) {
  const std::int64_t bag = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (bag >= call.num_bags * call.num_features) return;
  auto* smallest = reinterpret_cast<long long*>(result);
  const std::int64_t first = call.offsets[bag];
  const std::int64_t last = call.offsets[bag + 1];
  if (first < 0 || first > last || last > call.num_positions) {
    atomicMin(smallest, -2LL);
    return;
  }
  const auto num_rows =
      static_cast<std::uint64_t>(call.features[bag / call.num_bags].rows.num_rows);
  for (std::int64_t k = first; k < last; ++k) {
    if (static_cast<std::uint64_t>(call.ids[k]) >= num_rows) {
      atomicMin(smallest, static_cast<long long>(k));
      return;
    }
  }
}

template <RowType kType>
int launch(const QuantisedCall& call, const QuantisedFeature* features, float* output,
           cudaStream_t stream) {
  std::int64_t most = 0;  // threads that the widest feature of this type wants
  for (int f = 0; f < call.num_features; ++f) {
    if (features[f].rows.type != kType) continue;
    const std::int64_t lanes = lanes_of(words_of<kType>(features[f].rows.num_columns));
    most = std::max(most, lanes * (call.is_sequence ? call.num_positions : call.num_bags));
  }
  if (most == 0) return 0;
  const auto blocks = static_cast<unsigned>(
      std::min<std::int64_t>((most + kThreads - 1) / kThreads, std::int64_t{1} << 20));
  const dim3 grid(blocks, static_cast<unsigned>(call.num_features));
  if (call.is_sequence) {
    lookup_kernel<kType, true><<<grid, kThreads, 0, stream>>>(call, output);
  } else {
    lookup_kernel<kType, false><<<grid, kThreads, 0, stream>>>(call, output);
  }
  return cudaGetLastError();
}

}  // namespace

int quantised_check(const QuantisedCall& call, std::int64_t* result, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  set_kernel<<<1, 1, 0, on>>>(result, call.num_positions);
  const std::int64_t bags = call.num_bags * call.num_features;
  if (bags > 0) {
    const auto blocks = static_cast<unsigned>((bags + kThreads - 1) / kThreads);
    check_kernel<<<blocks, kThreads, 0, on>>>(call, result);
  }
  return cudaGetLastError();
}

int quantised_lookup(const QuantisedCall& call, const QuantisedFeature* host_features,
                     float* output, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  using Launch = int (*)(const QuantisedCall&, const QuantisedFeature*, float*, cudaStream_t);
  constexpr Launch kLaunches[] = {launch<RowType::kFloat32>,  launch<RowType::kFloat16>,
                                  launch<RowType::kBFloat16>, launch<RowType::kInt8>,
                                  launch<RowType::kInt4>,     launch<RowType::kInt2>,
                                  launch<RowType::kFloat8>};
  for (const Launch one : kLaunches) {
    const int error = one(call, host_features, output, on);
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace tessera::kernels::cuda
