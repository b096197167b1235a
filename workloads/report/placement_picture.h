// report/placement_picture.h — which part of which table lies on which rank, drawn by bytes.

#pragma once

#include <string>
#include <vector>

#include "report/run_record.h"

namespace tessera::workloads::report {

/// A place in a unit square.
struct Tile {
  double left = 0;
  double top = 0;
  double width = 0;
  double height = 0;
};

/// Tiles of the unit square with areas in the ratios of `sizes`, as square as rows of tiles allow.
/// `aspect` is the width of the square divided by its height as it will be shown. `sizes` are
/// positive, largest first.
std::vector<Tile> squarify(const std::vector<double>& sizes, double aspect);

/// One picture per rank, area by bytes, and all shards as a table. Empty without tables.
std::string placement_section(const RunRecord& run);

}  // namespace tessera::workloads::report
