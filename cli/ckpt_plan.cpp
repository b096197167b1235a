#include "ckpt_plan.h"

#include <algorithm>

#include "tessera/checkpoint/error.h"

namespace tessera::cli {
namespace {

using checkpoint::PlacedRegion;
using checkpoint::TensorInfo;

// Names are paths: "tables.embedding_bags.cat_0.weight" is of the table cat_0.
bool is_of(const std::string& tensor, const std::string& table) {
  return ("." + tensor + ".").find("." + table + ".") != std::string::npos;
}

std::string size_text(std::int64_t rows, std::int64_t columns) {
  return std::to_string(rows) + " x " + std::to_string(columns);
}

}  // namespace

PlannedTensors planned_tensors(const planner::Plan& plan, const checkpoint::Reader& source) {
  PlannedTensors found;
  for (const planner::TablePlan& table : plan) {
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    for (const planner::Shard& shard : table.shards) {
      found.num_ranks = std::max(found.num_ranks, shard.rank + 1);
      rows = std::max(rows, shard.row + shard.rows);
      columns = std::max(columns, shard.column + shard.columns);
    }
    bool has_weight = false;
    for (const TensorInfo& tensor : source.tensors()) {
      const auto& shape = tensor.shape;
      if (!is_of(tensor.name, table.name) || shape.empty() || shape.size() > 2) continue;
      const bool is_whole = shape.size() == 2 && shape[0] == rows && shape[1] == columns;
      if (tensor.name.ends_with(".weight") && !is_whole) {
        throw checkpoint::Error(checkpoint::ErrorKind::kInvalid,
                                "the plan's table " + table.name + " is " +
                                    size_text(rows, columns) + ", and " + tensor.name + " is " +
                                    size_text(shape[0], shape.size() == 2 ? shape[1] : 1) + ".");
      }
      has_weight = has_weight || is_whole;
      const bool is_per_row = shape[0] == rows && (shape.size() == 1 || shape[1] == 1);
      if (!is_whole && !is_per_row) continue;
      auto& places = found.places[tensor.name];
      for (const planner::Shard& shard : table.shards) {
        // Numbers of whole rows go with the rows' first columns.
        if (!is_whole && shard.column > 0) continue;
        PlacedRegion place{{{shard.row}, {shard.rows}}, shard.rank};
        if (shape.size() == 2) {
          place.region.offsets.push_back(is_whole ? shard.column : 0);
          place.region.lengths.push_back(is_whole ? shard.columns : 1);
        }
        places.push_back(std::move(place));
        if (table.cut == planner::Cut::kDataParallel) break;
      }
    }
    if (!has_weight) {
      throw checkpoint::Error(checkpoint::ErrorKind::kInvalid,
                              source.folder() + ": has no table " + table.name + " of " +
                                  size_text(rows, columns) + ", which the plan has.");
    }
  }
  return found;
}

}  // namespace tessera::cli
