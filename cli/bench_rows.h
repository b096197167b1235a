// cli/bench_rows.h — rows that a benchmark printed, beside their peer's, for people and programs.

#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::cli {

/// One row of a collective, and LibTorch's Gloo on the same tensors.
struct BenchRow {
  nlohmann::ordered_json line;  // as the benchmark printed it
  std::string operation;        // all_reduce
  std::string variant;          // shm
  std::string state;            // near, far
  double bytes = 0;
  double median_us = 0;
  double peer_us = 0;         // 0: there is none
  double floor_share = 0;     // time of the bytes that must move over the median; 0: no floor
  bool is_disturbed = false;  // other programs took more than a tenth of the cores
};

/// Reads the lines of JSON in `text`, other lines are skipped, and finds each row's peer: of the
/// same shape, in the same state of the cores if there is one. Rows without the keys of a row are
/// skipped too.
std::vector<BenchRow> read_bench_rows(const std::string& text);

/// Lines of at most 100 columns; the peer has no lines of its own.
std::string bench_table(const std::vector<BenchRow>& rows);
nlohmann::ordered_json bench_json(const std::vector<BenchRow>& rows);

}  // namespace tessera::cli
