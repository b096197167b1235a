// src/kernels/cuda/table_marks.cuh — which rows of a call occur more than once, as bits.

#pragma once

#include "kernels/cuda/table_entries.cuh"

namespace tessera::kernels::cuda {

/// Two bits per key: it occurs, it occurs again. Of very many keys several share their bits, which
/// then say "again" of rows that occur once: those are sorted with the others, and come out right.
struct RowMarks {
  std::uint32_t* seen = nullptr;
  std::uint32_t* again = nullptr;
  int shift = 0;  // 0: every key has its own; else the key's hash shifted by so much

  __device__ __forceinline__ std::uint32_t place_of_key(std::uint32_t key) const {
    return shift == 0 ? key : (key * 0x9E3779B1U) >> shift;
  }
  /// Asked after all have been marked.
  __device__ __forceinline__ bool is_again(std::uint32_t key) const {
    const std::uint32_t place = place_of_key(key);
    return (__ldg(again + place / 32) >> (place % 32) & 1U) != 0;
  }
  /// Few rows occur very often: once they are known to, they are only read.
  __device__ __forceinline__ void mark(std::uint32_t key, bool counts_as_again) const {
    const std::uint32_t place = place_of_key(key);
    const std::uint32_t bit = 1U << (place % 32);
    std::uint32_t* const word = again + place / 32;
    if ((__ldcg(word) & bit) != 0) return;
    if (counts_as_again || (atomicOr(seen + place / 32, bit) & bit) != 0) atomicOr(word, bit);
  }
};

/// Whether rows that occur once can be stepped bag by bag: the step must depend on the gradient and
/// one number of the row.
__host__ __device__ inline bool is_once(const TableSteps& table) {
  return is_light(table) && has_packs(table.rows) &&
         (table.step.decay == 0.0F || table.step.is_decoupled);
}

/// Keys and sources of all positions; with marks, also those. `tables` only with marks.
int fill_keys(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* first_keys,
              bool keep_bags, std::uint32_t* keys, std::uint32_t* values, std::uint32_t* bag_of,
              const RowMarks& marks, const TableSteps* tables, cudaStream_t stream);

/// Steps the rows that occur once, of all tables that are is_once. `keys` are those of fill_keys.
int step_once_rows(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* keys,
                   const RowMarks& marks, const TableSteps* tables, const TableSteps* host_tables,
                   int num_tables, const float* gradient, float limit, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
