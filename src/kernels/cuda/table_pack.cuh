// src/kernels/cuda/table_pack.cuh — parts of rows in registers, for the table kernels.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/table_launch.h"

namespace tessera::kernels::cuda {

/// Numbers of a row as they are stored, and back.
template <Element kElement>
struct Stored;
template <>
struct Stored<Element::kFloat32> {
  using Type = float;
  static __device__ float widen(Type x) { return x; }
  static __device__ Type narrow(float x) { return x; }
  static __device__ Type narrow_at_random(float x, std::uint32_t) { return x; }
};
template <>
struct Stored<Element::kFloat16> {
  using Type = std::uint16_t;
  static __device__ float widen(Type x) { return __half2float(__ushort_as_half(x)); }
  static __device__ Type narrow(float x) { return __half_as_ushort(__float2half_rn(x)); }
  static __device__ Type narrow_at_random(float x, std::uint32_t random) {
    return stochastic_half(x, random);
  }
};
template <>
struct Stored<Element::kBFloat16> {
  using Type = std::uint16_t;
  static __device__ float widen(Type x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
  static __device__ Type narrow(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  static __device__ Type narrow_at_random(float x, std::uint32_t random) {
    return stochastic_brain(x, random);
  }
};

/// `kCount` numbers that lie together, read and written at once.
template <typename Type, int kCount>
struct alignas(sizeof(Type) * kCount) Pack {
  Type values[kCount];
};

template <int kCount, typename Type>
__device__ __forceinline__ Pack<Type, kCount> load_pack(const Type* from) {
  return *reinterpret_cast<const Pack<Type, kCount>*>(from);
}
template <int kCount, typename Type>
__device__ __forceinline__ void store_pack(Type* to, const Pack<Type, kCount>& pack) {
  *reinterpret_cast<Pack<Type, kCount>*>(to) = pack;
}
/// Through the read-only path, for what nobody writes meanwhile.
template <int kCount>
__device__ __forceinline__ void load_floats(const float* from, bool is_aligned, float* to) {
  if constexpr (kCount % 4 == 0) {
    if (is_aligned) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = __ldg(from + i);
}
template <int kCount>
__device__ __forceinline__ void store_floats(float* to, bool is_aligned, const float* from) {
  if constexpr (kCount % 4 == 0) {
    if (is_aligned) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        *reinterpret_cast<float4*>(to + i) =
            make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = from[i];
}

/// Lanes that share a row: a power of two, at most a warp.
__host__ __device__ constexpr int lanes_for(std::int64_t num_columns, int per_lane) {
  int lanes = 1;
  while (lanes < 32 && lanes * per_lane < num_columns) lanes *= 2;
  return lanes;
}

/// Numbers a lane reads at once: 16 bytes if rows begin at such places, else one.
inline int per_lane_of(const TableRows& rows) {
  const int wide = rows.element == Element::kFloat32 ? 4 : 8;
  const bool fits =
      rows.num_columns % wide == 0 && reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
  return fits ? wide : 1;
}

__device__ __forceinline__ int feature_of_bag(const TableCall& call, std::int64_t bag) {
  if (call.bags_per_feature > 0) {
    // In 32 bits where it can be: a division in 64 takes five times as long.
    if (call.num_bags >> 32 == 0) {
      return static_cast<int>(static_cast<std::uint32_t>(bag) /
                              static_cast<std::uint32_t>(call.bags_per_feature));
    }
    return static_cast<int>(bag / call.bags_per_feature);
  }
  int low = 0;
  int high = call.num_features - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (call.features[middle].first_bag <= bag) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// The last feature whose first position is not behind `position`.
__device__ __forceinline__ int feature_of_position(const TableCall& call, std::int64_t position) {
  int low = 0;
  int high = call.num_features - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (call.ids.offset(call.features[middle].first_bag) <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Where the output (or its gradient) of a position lies.
__device__ __forceinline__ std::int64_t place_of(const TableCall& call, const TableFeature& feature,
                                                 std::int64_t bag, std::int64_t position) {
  if (!call.is_sequence) return feature.output + (bag - feature.first_bag) * feature.output_stride;
  if (feature.output < 0) return position * feature.rows.num_columns;
  return feature.output +
         (position - call.ids.offset(feature.first_bag)) * feature.rows.num_columns;
}

}  // namespace tessera::kernels::cuda
