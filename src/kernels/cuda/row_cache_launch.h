// src/kernels/cuda/row_cache_launch.h — brings the rows of a call into a cache in device memory. No
// torch header, no CUDA header; pointers are device pointers and `stream` is a cudaStream_t. Each
// function returns a cudaError_t (0 is success) and waits for nothing.
//
// Keys number the rows of all cached tables, slots the places of all caches; both table by table. A
// row is in one slot or in none.
//
//   admit:  for every key of the call: it is marked as used by call `number`, if it has a slot
//           keys without one are missing, in ascending order
//           slots of each table in order: empty ones, then those that the policy gives away first;
//           slots used by call `oldest_live` or a later one are not given away
//           missing key i of a table gets slot i of this order: the row there goes home, its own
//           comes. If the missing keys of a table are more than there are slots to give, nothing
//           moves at all.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/table_launch.h"

namespace tessera::kernels::cuda {

/// What moves with a row: its weights, and what its optimizer keeps.
struct CachedPiece {
  char* home = nullptr;    // [rows], in memory that the device can reach
  char* cached = nullptr;  // [slots]
  std::int64_t bytes = 0;  // of one row; a multiple of 2
};

struct CachedTable {
  static constexpr int kPieces = 3;
  CachedPiece pieces[kPieces];  // those without bytes are not there
  std::uint32_t first_key = 0;
  std::uint32_t num_keys = 0;
  std::uint32_t first_slot = 0;
  std::uint32_t num_slots = 0;
};

struct RowCacheArrays {
  static constexpr std::uint32_t kNoKey = ~0U;
  std::int32_t* slot_of = nullptr;    // by key: number among its table's slots, or -1
  std::uint32_t* key_of = nullptr;    // by slot; kNoKey: empty
  std::uint32_t* used = nullptr;      // by slot: the last call
  std::uint32_t* num_used = nullptr;  // by slot: by how many calls since it came
  const CachedTable* tables = nullptr;
  int num_tables = 0;
  std::uint32_t num_keys = 0;
  std::uint32_t num_slots = 0;
};

struct CacheCall {
  std::uint32_t number = 0;
  std::uint32_t oldest_live = 0;
  bool least_frequent = false;  // else the least recent goes first
};

/// Tables that fit.
constexpr int kMostCachedTables = 4096;
/// Numbers of a table's report.
constexpr int kCacheReport = 3;

std::size_t admit_bytes(std::int64_t num_positions, std::int64_t num_keys, std::int64_t num_slots);

/// Finds out what is missing. `call` has no rows for features whose table is not cached. `report`:
/// per table (kCacheReport) the missing keys, the slots that cannot be given away and, among them,
/// those of this call.
int find_rows(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* first_keys,
              const RowCacheArrays& cache, const CacheCall& how, std::uint32_t* report, void* work,
              void* stream);
/// Moves rows as find_rows found, with the same work memory. `slots`: one per position; ids of
/// tables that are not cached stay as they are.
int bring_rows(const TableCall& call, const RowCacheArrays& cache, const CacheCall& how,
               std::int32_t* slots, void* work, void* stream);

/// Copies every cached row home; with `is_emptied`, no row is cached any more.
int write_back(const RowCacheArrays& cache, bool is_emptied, void* stream);

}  // namespace tessera::kernels::cuda
