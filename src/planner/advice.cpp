#include "planner/advice.h"

#include <algorithm>
#include <cstdio>

#include "tessera/planner/plan_error.h"

namespace tessera::planner {

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  std::size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 || bytes >= 99.95 ? "%.0f %s" : "%.3g %s", bytes,
                kUnits[unit]);
  return text;
}

void throw_fits_nowhere(const Options& options, const TableClass& one) {
  const Table& table = options.tables[static_cast<std::size_t>(one.tables[0])];
  double smallest = kNoLimit;
  std::string way;
  const auto consider = [&](const PartLoads& loads, int units, const std::string& words) {
    const double bytes = loads[0][static_cast<std::size_t>(units)].bytes;
    if (bytes >= smallest) return;
    smallest = bytes;
    way = words;
  };
  if (one.has_parts) {
    const int limit = one.can_cut ? std::min(one.num_ranks_allowed, one.units) : 1;
    consider(one.parts, (one.units + limit - 1) / limit,
             limit == 1
                 ? std::string(name_of(one.whole_cut))
                 : std::string(name_of(one.cut)) + " in " + std::to_string(limit) + " parts");
  }
  if (one.has_hosts) {
    const int limit =
        one.can_cut_hosts ? std::min(static_cast<int>(one.hosts.size()), one.units) : 1;
    consider(one.host_parts.full, (one.units + limit - 1) / limit,
             limit == 1 ? std::string(name_of(one.whole_host_cut))
                        : "grid_shard over " + std::to_string(limit) + " hosts");
  }
  for (const UniformOption& option : one.uniform) {
    consider(option.parts.full, 1,
             std::string(name_of(option.cut)) + " over " + std::to_string(options.num_ranks()) +
                 " ranks");
  }
  double most = 0;
  for (const RankKind& kind : options.kinds) most = std::max(most, kind.capacity);
  const double whole =
      static_cast<double>(table.rows) *
      (static_cast<double>(table.dim) * (table.element_bytes + table.state_bytes_per_element) +
       table.state_bytes_per_row);
  throw PlanError(PlanErrorKind::kTooLarge,
                  "plan: table '" + table.name + "' (" + bytes_text(whole) +
                      " with state) fits no rank in any allowed way",
                  "its smallest shard is " + bytes_text(smallest) + " (" + way + "); ranks have " +
                      bytes_text(most) + " for tables");
}

void throw_all_too_large(const Options& options, double needed, double memory) {
  throw PlanError(PlanErrorKind::kTooLarge,
                  "plan: " + std::to_string(options.tables.size()) + " tables need " +
                      bytes_text(needed) + ", and " + std::to_string(options.num_ranks()) +
                      " ranks have " + bytes_text(memory) + " for them",
                  "however they are cut, they need that much with their optimizer and one batch");
}

void throw_not_packed(const Options& options) {
  throw PlanError(PlanErrorKind::kTooLarge,
                  "plan: " + std::to_string(options.tables.size()) +
                      " tables could not be laid on " + std::to_string(options.num_ranks()) +
                      " ranks",
                  "together they are small enough, but their parts do not fill the ranks' memory "
                  "so evenly");
}

}  // namespace tessera::planner
