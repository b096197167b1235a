// src/kernels/reduce.h — combines arrays element by element, and copies past the cache.
//
// The meaning, for every element i (`ref/reduce.cpp` is this text as code):
//
//   total = wide(sources[0][i])                     wide: float for float16 and bfloat16, else T
//   for s in 1 .. num_sources - 1:
//     total = reduction(total, wide(sources[s][i]))  in this order, so the bits are reproducible
//   if reduction is avg: total = total / num_sources
//   for d in 0 .. num_destinations - 1:
//     destinations[d][i] = narrow(total)            rounded once, to nearest even
//
// Integers wrap around. For bool, sum and max are "or", product and min are "and". Minimum and
// maximum of floating point values are NaN as soon as one source is NaN.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dispatch.h"

namespace tessera::kernels {

enum class Element : std::uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};
inline constexpr int kNumElements = 10;

enum class Reduction : std::uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor };
inline constexpr int kNumReductions = 8;

/// How the results are written: through the cache, or past it. Past it pays when nobody reads them
/// soon; the call then ends with a store fence.
enum class Store : std::uint8_t { kCached, kStreaming };

/// Whether `reduce` takes this pair: averages need floating point, bit operations need integers.
bool can_reduce(Element element, Reduction reduction) noexcept;

/// Combines `sources` (at least one) into every one of `destinations`.
///
/// A destination may be the same array as a source; arrays that overlap in any other way give
/// undefined values. Pointers need no alignment. The pair must satisfy can_reduce.
void reduce(Element element, Reduction reduction, std::span<const void* const> sources,
            std::span<void* const> destinations, std::int64_t count, Store store) noexcept;

/// Copies bytes between arrays that do not overlap.
void copy(void* destination, const void* source, std::size_t bytes, Store store) noexcept;

/// One instruction set's versions of the functions above.
struct ReduceKernels {
  void (*reduce)(Element element, Reduction reduction, const void* const* sources, int num_sources,
                 void* const* destinations, int num_destinations, std::int64_t count, Store store);
  void (*copy)(void* destination, const void* source, std::size_t bytes, Store store);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const ReduceKernels* reduce_kernels(Isa isa) noexcept;

/// The plain loops that judge the others.
const ReduceKernels& reduce_reference() noexcept;

}  // namespace tessera::kernels
