// src/kernels/cuda/logit_pack.cuh — sixteen bytes of logits, for the softmax kernels of this
// folder.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/reduce.h"

namespace tessera::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634F;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// k (x - center) log2(e) as a difference first: for 16-bit logits it is exact, so large logits
/// lose nothing. `factor` is k log2(e).
__device__ __forceinline__ float exponent_of(float x, float center, float factor) {
  return __fmul_rn(x - center, factor);
}

/// Lets the next kernel of the stream, if it was started for that, take its place while this one
/// runs; it then waits in wait_for_previous().
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/// Until the kernel before is done and its results are there.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// How a type is stored. kCount elements make a pack of 16 bytes.
template <typename T>
struct Form;

template <>
struct Form<float> {
  static constexpr int kCount = 4;
  static constexpr uint32_t kPadding = 0xff800000U;
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float narrow(float x) { return x; }
  static __device__ __forceinline__ float get(const uint4& pack, int i) {
    const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
    return __uint_as_float(words[i]);
  }
  static __device__ __forceinline__ float largest(const uint4& pack) {
    return fmaxf(fmaxf(get(pack, 0), get(pack, 1)), fmaxf(get(pack, 2), get(pack, 3)));
  }
  static __device__ __forceinline__ uint4 pack(const float (&v)[4]) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
  }
};

template <>
struct Form<__nv_bfloat16> {
  static constexpr int kCount = 8;
  static constexpr uint32_t kPadding = 0xff80ff80U;
  static __device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float x) { return __float2bfloat16(x); }
  static __device__ __forceinline__ float get(const uint4& pack, int i) {
    const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
    return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000U);
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ float largest(const uint4& pack) {
    const uint32_t top = larger(larger(pack.x, pack.y), larger(pack.z, pack.w));
    return fmaxf(__uint_as_float(top << 16), __uint_as_float(top & 0xffff0000U));
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ uint4 pack(const float (&v)[8]) {
    return make_uint4(pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7]));
  }
};

template <>
struct Form<__half> {
  static constexpr int kCount = 8;
  static constexpr uint32_t kPadding = 0xfc00fc00U;
  static __device__ __forceinline__ float widen(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ float get(const uint4& pack, int i) {
    const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
    const uint32_t word = words[i / 2];
    return __half2float(
        __ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? word : word >> 16)));
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ float largest(const uint4& pack) {
    const uint32_t top = larger(larger(pack.x, pack.y), larger(pack.z, pack.w));
    return fmaxf(__half2float(__ushort_as_half(static_cast<unsigned short>(top))),
                 __half2float(__ushort_as_half(static_cast<unsigned short>(top >> 16))));
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ uint4 pack(const float (&v)[8]) {
    return make_uint4(pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7]));
  }
};

template <typename T>
__device__ __forceinline__ uint4 padding_pack() {
  constexpr uint32_t word = Form<T>::kPadding;
  return make_uint4(word, word, word, word);
}

/// Calls body.operator()<T>() with the type T of the logits.
template <typename Body>
void with_type_of(Element element, const Body& body) {
  switch (element) {
    case Element::kBFloat16:
      body.template operator()<__nv_bfloat16>();
      break;
    case Element::kFloat16:
      body.template operator()<__half>();
      break;
    default:
      body.template operator()<float>();
  }
}

/// A row cut at 16-byte boundaries: `head` elements, `num_packs` packs, `tail` elements.
struct Cut {
  int head;
  int num_packs;
  int tail;
};

template <typename T>
__device__ __forceinline__ Cut cut_row(const T* row, int64_t num_columns) {
  constexpr int kCount = Form<T>::kCount;
  const int misaligned = static_cast<int>((reinterpret_cast<uintptr_t>(row) & 15U) / sizeof(T));
  Cut cut;
  cut.head = misaligned == 0 ? 0 : kCount - misaligned;
  if (cut.head > num_columns) cut.head = static_cast<int>(num_columns);
  cut.num_packs = static_cast<int>((num_columns - cut.head) / kCount);
  cut.tail = static_cast<int>(num_columns - cut.head) - cut.num_packs * kCount;
  return cut;
}

}  // namespace tessera::kernels::cuda
