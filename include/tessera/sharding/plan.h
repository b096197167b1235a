// tessera/sharding/plan.h — which part of which table lies on which rank.
//
// A plan is decided before anything is communicated, and the same on every rank. Every way of
// cutting a table ends as a list of shards: boxes of rows and columns, each with its rank.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/embedding/config.h"

namespace tessera::sharding {

enum class ShardingType : std::uint8_t {
  kDataParallel,     // whole on every rank
  kTableWise,        // whole on one rank
  kColumnWise,       // columns cut over ranks
  kRowWise,          // rows cut over all ranks
  kTableRowWise,     // rows cut over the ranks of one host
  kTableColumnWise,  // columns cut over ranks of one host
  kGrid,             // columns cut over hosts, and in a host rows over its ranks
};

enum class ComputeKernel : std::uint8_t {
  kDense,  // backward leaves a gradient, whoever owns the module steps
  kFused,  // backward steps the rows
};

/// "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise",
/// "table_column_wise" or "grid_shard".
TESSERA_API std::string_view name_of(ShardingType type) noexcept;
/// Throws ValueError for another name.
TESSERA_API ShardingType sharding_type_of(std::string_view name);
TESSERA_API std::string_view name_of(ComputeKernel kernel) noexcept;
TESSERA_API ComputeKernel compute_kernel_of(std::string_view name);

/// Rows [row, row + rows) and columns [column, column + columns) of a table, on `rank`.
struct Shard {
  std::int64_t row = 0;
  std::int64_t column = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int rank = 0;

  bool operator==(const Shard&) const = default;
};

/// How one table lies. Shards cover the table once (data parallel: once per rank, in order of
/// ranks), in order of columns, then rows; a shard may have no rows.
struct ParameterSharding {
  ShardingType type = ShardingType::kTableWise;
  ComputeKernel kernel = ComputeKernel::kFused;
  /// The rank of each shard, in order.
  std::vector<int> ranks;
  std::vector<Shard> shards;

  bool operator==(const ParameterSharding&) const = default;
};

/// Table name to its sharding: the plan of one module.
using ModulePlan = std::map<std::string, ParameterSharding>;

/// Module path to its plan: the plan of a whole model.
struct TESSERA_API ShardingPlan {
  std::map<std::string, ModulePlan> modules;

  /// Null if the module is not in the plan.
  const ModulePlan* get_plan_for_module(const std::string& path) const;
  /// A table of tables, at most `width` wide.
  std::string str(int width = 100) const;
};

/// Ranks and how many of them share a host.
struct Topology {
  int world_size = 1;
  int local_size = 1;
  int num_hosts() const noexcept { return world_size / local_size; }
};

/// A wish for one table, before its size and the ranks are known; `place` makes it a sharding.
/// Made by the functions below.
class TESSERA_API Placement {
 public:
  /// Throws ValueError, naming `table`, for ranks outside the topology, columns that cannot be cut
  /// so, and a topology that the type cannot use.
  ParameterSharding place(const embedding::EmbeddingTableConfig& table,
                          const Topology& topology) const;
  ShardingType type() const noexcept { return type_; }
  /// The same with another kernel.
  Placement with_kernel(ComputeKernel kernel) const;

 private:
  friend TESSERA_API Placement data_parallel();
  friend TESSERA_API Placement table_wise(int rank);
  friend TESSERA_API Placement row_wise(std::vector<std::int64_t> rows_per_rank);
  friend TESSERA_API Placement column_wise(std::vector<int> ranks,
                                           std::vector<std::int64_t> columns);
  friend TESSERA_API Placement table_row_wise(int host);
  friend TESSERA_API Placement table_column_wise(std::vector<int> ranks,
                                                 std::vector<std::int64_t> columns);
  friend TESSERA_API Placement grid_shard(std::vector<int> hosts,
                                          std::vector<std::int64_t> columns);

  ShardingType type_ = ShardingType::kTableWise;
  ComputeKernel kernel_ = ComputeKernel::kFused;
  std::vector<int> ranks_;  // or hosts
  std::vector<std::int64_t>
      sizes_;  // rows per rank, or columns per shard; empty: as even as can be
};

/// Whole on every rank; dense, unless with_kernel says otherwise.
TESSERA_API Placement data_parallel();
/// Whole on `rank`.
TESSERA_API Placement table_wise(int rank);
/// Rank r holds ceil(rows / W) rows from r * ceil(rows / W) on, the last ones fewer or none; or as
/// many as `rows_per_rank` says.
TESSERA_API Placement row_wise(std::vector<std::int64_t> rows_per_rank = {});
/// One part of the columns per entry of `ranks`, in order of the columns; a rank may have several.
/// Parts are equal (the first ones one more if it does not divide), or as wide as `columns` says.
TESSERA_API Placement column_wise(std::vector<int> ranks, std::vector<std::int64_t> columns = {});
/// Rows over the ranks of `host`, ceil(rows / L) each.
TESSERA_API Placement table_row_wise(int host);
/// As column_wise; all ranks are of one host.
TESSERA_API Placement table_column_wise(std::vector<int> ranks,
                                        std::vector<std::int64_t> columns = {});
/// One part of the columns per entry of `hosts`, and each part's rows over that host's ranks.
TESSERA_API Placement grid_shard(std::vector<int> hosts, std::vector<std::int64_t> columns = {});

/// Places every table of `tables`. Throws ValueError for a table without a wish, a wish without a
/// table, and what `Placement::place` throws.
TESSERA_API ModulePlan make_module_plan(const std::vector<embedding::EmbeddingTableConfig>& tables,
                                        const std::map<std::string, Placement>& wishes,
                                        const Topology& topology);

/// Throws ValueError unless `plan` holds exactly these tables, each covered once by shards that are
/// in order, lie as the type says, and whose ranks exist. `operation` begins the text.
TESSERA_API void check_module_plan(std::string_view operation,
                                   const std::vector<embedding::EmbeddingTableConfig>& tables,
                                   const ModulePlan& plan, const Topology& topology);

/// Plans as JSON, for files and for people: {"version": 1, "modules": {path: {table: {"type",
/// "kernel", "ranks", "shards": [[row, column, rows, columns, rank], …]}}}}.
TESSERA_API std::string to_json(const ShardingPlan& plan);
/// Throws ValueError with the path of what is missing, unknown or of the wrong kind. Whether the
/// plan fits tables and ranks is for `check_module_plan`. Both throw NotImplementedError in a
/// library that was built without nlohmann-json.
TESSERA_API ShardingPlan plan_from_json(std::string_view text);

}  // namespace tessera::sharding
