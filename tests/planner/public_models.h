// planner/public_models.h — tables of public models, for tests and benchmarks.
//
// Numbers of tables, ids per sample, rows and columns of NVIDIA's synthetic models (version 3 of
// their configuration: tiny to colossal) and of MLPerf's DLRM v2.

#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/planner/cost.h"
#include "tessera/planner/problem.h"

namespace tessera::planner::models {

struct Group {
  int tables;
  double more_ids;  // a second feature of the same table has so many ids; 0: there is one feature
  std::int64_t rows;
  std::int64_t dim;
};

struct Model {
  const char* name;
  std::vector<Group> groups;
};

inline const std::vector<Model>& synthetic() {
  static const std::vector<Model> kModels = {
      {"tiny",
       {{1, 10, 10'000, 8},
        {1, 10, 1'000'000, 16},
        {1, 10, 25'000'000, 16},
        {1, 0, 25'000'000, 16},
        {16, 0, 10, 8},
        {10, 0, 1000, 8},
        {4, 0, 10'000, 8},
        {2, 0, 100'000, 16},
        {19, 0, 1'000'000, 16}}},
      {"small",
       {{5, 30, 10'000, 16},
        {3, 30, 4'000'000, 32},
        {1, 30, 50'000'000, 32},
        {1, 0, 50'000'000, 32},
        {30, 0, 10, 16},
        {30, 0, 1000, 16},
        {5, 0, 10'000, 16},
        {5, 0, 100'000, 32},
        {27, 0, 4'000'000, 32}}},
      {"medium",
       {{20, 50, 100'000, 64},
        {5, 50, 10'000'000, 64},
        {1, 50, 100'000'000, 128},
        {1, 0, 100'000'000, 128},
        {80, 0, 10, 32},
        {60, 0, 1000, 32},
        {80, 0, 100'000, 64},
        {24, 0, 200'000, 64},
        {40, 0, 10'000'000, 64}}},
      {"large",
       {{40, 100, 100'000, 64},
        {16, 100, 15'000'000, 64},
        {1, 100, 200'000'000, 128},
        {1, 0, 200'000'000, 128},
        {100, 0, 10, 32},
        {100, 0, 10'000, 32},
        {160, 0, 100'000, 64},
        {50, 0, 500'000, 64},
        {144, 0, 15'000'000, 64}}},
      {"jumbo",
       {{50, 200, 100'000, 128},
        {24, 200, 20'000'000, 128},
        {1, 200, 400'000'000, 256},
        {1, 0, 400'000'000, 256},
        {100, 0, 10, 32},
        {200, 0, 10'000, 64},
        {350, 0, 100'000, 128},
        {80, 0, 1'000'000, 128},
        {216, 0, 20'000'000, 128}}},
      {"colossal",
       {{100, 300, 100'000, 128},
        {50, 300, 40'000'000, 256},
        {1, 300, 2'000'000'000, 256},
        {1, 0, 1'000'000'000, 256},
        {100, 0, 10, 32},
        {400, 0, 10'000, 128},
        {100, 0, 100'000, 128},
        {800, 0, 1'000'000, 128},
        {450, 0, 40'000'000, 256}}},
  };
  return kModels;
}

/// Tables of one of the models, or of "mlperf"; empty for another name.
inline std::vector<Table> tables_of(const std::string& name) {
  std::vector<Table> tables;
  const auto add = [&](std::vector<Feature> features, std::int64_t rows, std::int64_t dim) {
    std::string number = std::to_string(tables.size());
    number.insert(0, 4 - number.size(), '0');
    Table table;
    table.name = "t" + number;
    table.rows = rows;
    table.dim = dim;
    table.features = std::move(features);
    tables.push_back(std::move(table));
  };
  if (name == "mlperf") {
    static constexpr std::int64_t kRows[] = {
        40000000, 39060,    17295,    7424,     20265,  3,     7122, 1543, 63,
        40000000, 3067956,  405282,   10,       2209,   11938, 155,  4,    976,
        14,       40000000, 40000000, 40000000, 590152, 12973, 108,  36};
    static constexpr double kIds[] = {3, 2, 1, 2, 6, 1, 1,  1,   1,  7,  3, 8, 1,
                                      6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1};
    for (std::size_t i = 0; i < std::size(kRows); ++i) add({{kIds[i]}}, kRows[i], 128);
  }
  for (const Model& model : synthetic()) {
    if (model.name != name) continue;
    for (const Group& group : model.groups) {
      for (int i = 0; i < group.tables; ++i) {
        if (group.more_ids > 0) {
          add({{1}, {group.more_ids}}, group.rows, group.dim);
        } else {
          add({{1}}, group.rows, group.dim);
        }
      }
    }
  }
  return tables;
}

/// A global batch of 65,536 on hosts of 8 ranks. Memory for tables: 64 GB a rank, or 115 % of what
/// whole tables need, whichever is more.
inline Problem problem_of(const std::string& name, int ranks, bool is_gpu, double room = 1.15) {
  Problem problem;
  problem.tables = tables_of(name);
  problem.batch = 65536 / ranks;
  problem.ranks_per_host = std::min(ranks, 8);
  Rank rank;
  if (is_gpu) rank.speeds = {1200e9, 235e9, 20e9};
  problem.ranks.assign(static_cast<std::size_t>(ranks), rank);
  problem.reserved_percent = 0;
  const CostModel model(problem);
  double bytes = 0;
  double own = 0;
  for (const Table& table : problem.tables) {
    const CostModel::TableLoad load = model.load_of(table);
    bytes += model.cost(table, load, Cut::kTableWise, Kernel::kFused, table.rows, table.dim, 0)
                 .bytes.total();
    own += 2 * load.outputs / ranks * static_cast<double>(table.dim) * 4;
  }
  const double needed = room * bytes / ranks;
  for (Rank& one : problem.ranks)
    one.memory = own + (room < 1.15 ? needed : std::max(64e9, needed));
  return problem;
}

}  // namespace tessera::planner::models
