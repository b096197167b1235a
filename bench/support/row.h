// bench/support/row.h — one measured line: its name, its spread, its JSON.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::bench {

/// What is known of a row besides its times. `name` is module/operation/variant/shape.
struct RowLabel {
  std::string name;
  int ranks = 1;
  int threads = 1;
  std::string isa;
  std::string state;       // near, far, or empty if nobody asked
  std::size_t bytes = 0;   // what the caller hands in
  double floor_us = 0.0;   // time of the bytes that must move; 0 if it has no meaning
  double others = 0.0;     // share of the cores that other programs took; rows above 0.1 are void
  double copy_gbps = 0.0;  // the bandwidth behind it
};

/// Prints one line of JSON with median, p10 and p90 of `times_us`; nothing if there are none.
void print_row(const RowLabel& label, std::vector<double> times_us);

/// The value below which the share `quantile` of the sorted values lies.
double quantile_of(const std::vector<double>& sorted, double quantile);

}  // namespace tessera::bench
