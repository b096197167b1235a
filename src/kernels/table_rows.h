// src/kernels/table_rows.h — embedding tables, ids and optimizer rules, as the table kernels see
// them. Read by the CPU and the CUDA kernels.

#pragma once

#include <cstdint>

#include "kernels/reduce.h"

#if defined(__CUDACC__)
#define TESSERA_TABLE_INLINE __host__ __device__ __forceinline__
#else
// Never a function of its own: its copies for different instruction sets would share a name.
#define TESSERA_TABLE_INLINE inline __attribute__((always_inline))
#endif

namespace tessera::kernels {

/// Rows of float32, float16 or bfloat16, behind each other.
struct TableRows {
  Element element = Element::kFloat32;
  void* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
};

/// The ids of a call, as tessera/embedding/table_batch.h lays them out. A bag is one sample of one
/// feature; bag i owns the positions offset(i) to offset(i + 1) - 1.
struct LookupIds {
  const void* ids = nullptr;
  const void* offsets = nullptr;
  const float* weights = nullptr;  // one per position; null: all 1
  bool wide_ids = true;            // int64, not int32
  bool wide_offsets = true;

  TESSERA_TABLE_INLINE std::int64_t id(std::int64_t position) const {
    return wide_ids ? static_cast<const std::int64_t*>(ids)[position]
                    : static_cast<const std::int32_t*>(ids)[position];
  }
  TESSERA_TABLE_INLINE std::int64_t offset(std::int64_t bag) const {
    return wide_offsets ? static_cast<const std::int64_t*>(offsets)[bag]
                        : static_cast<const std::int32_t*>(offsets)[bag];
  }
};

/// One feature of a call.
struct TableFeature {
  TableRows rows;
  std::int64_t first_bag = 0;
  std::int64_t num_bags = 0;
  /// Element of the output where bag `first_bag` begins, and how far apart bags are. For sequences:
  /// where position offset(first_bag) begins; positions are num_columns apart.
  std::int64_t output = 0;
  std::int64_t output_stride = 0;
  bool is_mean = false;
};

/// The gradient of one looked-up row: where the gradient of the output it went to lies.
///
/// Sources are bags (pooled) or positions (sequence). Source s of the last segment with first <= s
/// has its gradient at data + base + (s - first) * stride.
struct GradientSegment {
  std::int64_t first = 0;
  std::int64_t base = 0;
  std::int64_t stride = 0;
};
struct RowGradients {
  const float* data = nullptr;
  const GradientSegment* segments = nullptr;
  int num_segments = 0;
  /// If set, an entry's source is a position, and this is its bag.
  const std::uint32_t* bag_of = nullptr;
  /// If set, what the gradient of position s is multiplied with; sources are positions then.
  const float* weights = nullptr;
  /// If set, the gradient is divided by the number of ids of its bag.
  const LookupIds* bags = nullptr;
  /// Elements beyond it are moved to it; infinity: none are.
  float limit = __builtin_inff();
};

/// A looked-up row and its source. Sorted: equal rows are together, in the order of positions.
using RowEntry = std::uint64_t;
TESSERA_TABLE_INLINE RowEntry make_entry(std::uint64_t row, std::uint64_t source) {
  return row << 32 | source;
}
TESSERA_TABLE_INLINE std::int64_t row_of(RowEntry entry) {
  return static_cast<std::int64_t>(entry >> 32);
}
TESSERA_TABLE_INLINE std::int64_t source_of(RowEntry entry) {
  return static_cast<std::int64_t>(entry & 0xFFFFFFFFU);
}

/// The rules of tessera/embedding/optimizer.h.
enum class RowRule : std::uint8_t {
  kSgd,
  kAdagrad,
  kRowWiseAdagrad,
  kAdam,
  kPartialRowWiseAdam,
  kLamb,
  kPartialRowWiseLamb,
  kLarsSgd,
};

/// A rule with the numbers of one step.
struct RowStep {
  RowRule rule = RowRule::kSgd;
  bool is_decoupled = false;  // weight decay beside the step; not for LAMB and LARS
  bool is_stochastic = false;
  float rate = 0;
  float eps = 0;
  float beta1 = 0;
  float beta2 = 0;
  // 1 - beta, taken in double: of a beta near 1, float32 has too few digits for the difference.
  float rest1 = 1;
  float rest2 = 1;
  float correction1 = 1;  // 1 / (1 - beta1^t)
  float correction2 = 1;
  float decay = 0;
  float momentum = 0;
  float eta = 0;
  std::uint64_t key = 0;  // of the random bits: seed, step and table
};

/// What a rule keeps: null, one number per row, or one per element.
struct RowState {
  float* momentum1 = nullptr;
  float* momentum2 = nullptr;
  /// If set, rows are slots of a cache, and key_of[slot] - first_key is the row there.
  const std::uint32_t* key_of = nullptr;
  std::uint32_t first_key = 0;

  /// The row whose random bits a step takes.
  TESSERA_TABLE_INLINE std::int64_t named_row(std::int64_t row) const {
    return key_of == nullptr ? row : static_cast<std::int64_t>(key_of[row] - first_key);
  }
};

TESSERA_TABLE_INLINE bool has_full_momentum1(RowRule rule) {
  return rule != RowRule::kSgd && rule != RowRule::kRowWiseAdagrad;
}
TESSERA_TABLE_INLINE bool has_momentum2(RowRule rule) {
  return rule == RowRule::kAdam || rule == RowRule::kPartialRowWiseAdam || rule == RowRule::kLamb ||
         rule == RowRule::kPartialRowWiseLamb;
}
TESSERA_TABLE_INLINE bool has_full_momentum2(RowRule rule) {
  return rule == RowRule::kAdam || rule == RowRule::kLamb;
}

/// Random bits of a row, then of one of its columns: a counter through a mixer, so that they do not
/// depend on who computes them.
TESSERA_TABLE_INLINE std::uint32_t row_seed(std::uint64_t key, std::int64_t row) {
  std::uint64_t mixed = key + static_cast<std::uint64_t>(row) * 0x9E3779B97F4A7C15U;
  mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93U;
  mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93U;
  return static_cast<std::uint32_t>(mixed ^ mixed >> 32);
}
TESSERA_TABLE_INLINE std::uint32_t column_bits(std::uint32_t seed, std::uint32_t column) {
  std::uint32_t mixed = seed + column * 0x9E3779B9U;
  mixed = (mixed ^ mixed >> 16) * 0x7FEB352DU;
  mixed = (mixed ^ mixed >> 15) * 0x846CA68BU;
  return mixed ^ mixed >> 16;
}

/// The bfloat16 below or above `value`: above with the probability of what is cut off.
TESSERA_TABLE_INLINE std::uint16_t stochastic_brain(float value, std::uint32_t random) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  if ((bits & 0x7F800000U) == 0x7F800000U) {  // a NaN stays one even if its low half is cut off
    return static_cast<std::uint16_t>((bits >> 16) | ((bits & 0x7FFFFFU) != 0 ? 0x40U : 0U));
  }
  return static_cast<std::uint16_t>((bits + (random & 0xFFFFU)) >> 16);
}

/// The same for float16. Below 2^-14 the steps are 2^-24; from 65520 on it is infinity.
TESSERA_TABLE_INLINE std::uint16_t stochastic_half(float value, std::uint32_t random) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);
  if (magnitude < 0x38800000U) {
    const float steps = __builtin_bit_cast(float, magnitude) * 0x1p24F;
    const float moved = steps + static_cast<float>(random & 0x1FFFU) * 0x1p-13F;
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(moved));
  }
  const std::uint32_t moved = (magnitude + (random & 0x1FFFU)) >> 13;
  const std::uint32_t half = moved - (112U << 10);
  return static_cast<std::uint16_t>(sign | (half > 0x7BFFU ? 0x7BFFU : half));
}

}  // namespace tessera::kernels
