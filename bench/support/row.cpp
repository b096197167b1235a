#include "support/row.h"

#include <algorithm>
#include <cstdio>

namespace tessera::bench {

double quantile_of(const std::vector<double>& sorted, double quantile) {
  return sorted[static_cast<std::size_t>(quantile * static_cast<double>(sorted.size() - 1) + 0.5)];
}

void print_row(const RowLabel& label, std::vector<double> times_us) {
  if (times_us.empty()) return;
  std::sort(times_us.begin(), times_us.end());
  std::printf(
      "{\"name\": \"%s\", \"ranks\": %d, \"threads\": %d, \"isa\": \"%s\", \"device\": \"cpu\", "
      "\"state\": \"%s\", \"median_us\": %.3f, \"p10_us\": %.3f, \"p90_us\": %.3f, "
      "\"bytes\": %zu, \"repetitions\": %zu, \"others\": %.3f",
      label.name.c_str(), label.ranks, label.threads, label.isa.c_str(), label.state.c_str(),
      quantile_of(times_us, 0.5), quantile_of(times_us, 0.1), quantile_of(times_us, 0.9),
      label.bytes, times_us.size(), label.others);
  if (label.floor_us > 0) {
    std::printf(", \"floor_us\": %.3f, \"copy_gbps\": %.2f", label.floor_us, label.copy_gbps);
  }
  std::printf("}\n");
  std::fflush(stdout);
}

}  // namespace tessera::bench
