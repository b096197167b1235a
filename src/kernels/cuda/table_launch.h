// src/kernels/cuda/table_launch.h — starts the table kernels on CUDA. No torch header, no CUDA
// header; pointers are device pointers and `stream` is a cudaStream_t. Each function returns a
// cudaError_t (0 is success) and waits for nothing.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/table_rows.h"

namespace tessera::kernels::cuda {

/// One call of a batch of tables. `features` is on the device; a feature whose `output` is -1 has
/// the output of position k at k * num_columns (sequences of one width).
struct TableCall {
  LookupIds ids;
  const TableFeature* features = nullptr;
  int num_features = 0;
  std::int64_t num_bags = 0;
  std::int64_t num_positions = 0;
  std::int64_t bags_per_feature = 0;  // 0: features differ
  bool is_sequence = false;
  bool has_packs = false;  // all outputs begin at multiples of four numbers
};

/// *result = the smallest position whose id is outside its table, num_positions if there is none,
/// or -2 if the offsets do not ascend from 0 to num_positions.
int table_check(const TableCall& call, std::int64_t* result, void* stream);
/// `host_features` are the call's features, on the host: they choose the kernels.
int table_lookup(const TableCall& call, const TableFeature* host_features, float* output,
                 void* stream);
int table_weight_gradient(const TableCall& call, const float* gradient, float* output,
                          void* stream);

/// What becomes of the summed gradient of a row.
enum class RowTarget : std::uint8_t { kStep, kByRow, kByRun };

/// One table in backward, on the device.
struct TableSteps {
  TableRows rows;
  RowState state;
  RowStep step;
  RowTarget target = RowTarget::kStep;
  float* sums = nullptr;        // kByRow, kByRun
  std::uint32_t first_key = 0;  // keys of the table: first_key + row
  std::uint32_t first_run = 0;  // kByRun: number of the table's first run
  std::int32_t feature_table = 0;
};

/// Looked-up rows in order: entry i is row keys[i] of all tables, from source values[i].
struct SortedRows {
  const std::uint32_t* keys = nullptr;
  const std::uint32_t* values = nullptr;
  const std::uint32_t* run_starts = nullptr;  // where each row's entries begin
  const std::uint32_t* num_runs = nullptr;    // one number
  std::int64_t num_entries = 0;               // at most
  const std::uint32_t* count = nullptr;       // on the device: how many there are
  bool is_picked = false;                     // far fewer than num_entries, few of them alone
  const std::uint32_t* bag_of = nullptr;      // if set, values are positions
  std::uint32_t* spare = nullptr;             // num_entries / 2 + 1 numbers to work with
};

/// Bytes of the work memory of sort_rows.
std::size_t sort_bytes(std::int64_t num_positions);
/// Sorts the ids of a call by table and row. `table_of` is on the device, one per feature;
/// `first_keys`, on the device, one per table; `num_keys` is the number of rows of all tables.
/// With `keep_bags`, values are positions and bag_of is filled.
int sort_rows(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* first_keys,
              std::int64_t num_keys, bool keep_bags, void* work, SortedRows* sorted, void* stream);

/// Whether step_rows_apart can do a call, and is faster than sort_rows and step_sorted_rows:
/// pooled, with several ids a bag, and tables that are stepped.
bool steps_apart(const TableCall& call, const TableSteps* host_tables, int num_tables);
/// Bytes of its work memory.
std::size_t apart_bytes(std::int64_t num_positions, std::int64_t num_keys,
                        std::int64_t max_columns);
/// As sort_rows and step_sorted_rows after each other. Rows that occur once, most of them, are
/// stepped where they are looked up; only the others are sorted, on a stream beside.
int step_rows_apart(const TableCall& call, const std::int32_t* table_of,
                    const std::uint32_t* first_keys, std::int64_t num_keys, bool keep_bags,
                    const TableSteps* tables, const TableSteps* host_tables, int num_tables,
                    const float* gradient, float limit, void* work, void* stream);

/// Bytes of the work memory of step_sorted_rows, for tables of at most `max_columns`.
std::size_t step_bytes(std::int64_t num_entries, std::int64_t max_columns);
/// Hands the summed gradient of every run to its table. `host_tables` are the tables, on the host.
int step_sorted_rows(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                     const TableSteps* host_tables, int num_tables, const float* gradient,
                     float limit, void* work, void* stream);

}  // namespace tessera::kernels::cuda
