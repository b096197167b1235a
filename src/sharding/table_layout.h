// src/sharding/table_layout.h — a plan as lists: what goes to whom, and where results come out.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/embedding/config.h"
#include "tessera/sharding/plan.h"

namespace tessera::sharding {

/// Whether every rank has the whole table, and its ids stay at home.
inline bool is_local(const ParameterSharding& sharding) {
  return sharding.type == ShardingType::kDataParallel;
}

/// One feature looked up in one shard: the unit that travels. Ids go there, rows come back.
struct Route {
  std::size_t table = 0;
  std::size_t feature = 0;  // number among the features
  std::size_t output = 0;   // number among the outputs
  std::size_t shard = 0;    // number among the table's shards
};

/// One table for one feature, as it comes out.
struct Output {
  std::string name;
  std::size_t table = 0;
  std::size_t feature = 0;
  std::int64_t columns = 0;
};

/// The lists that every rank makes from the same plan, and so has alike.
struct TableLayout {
  /// Throws ValueError for configs or a plan that cannot be; `operation` begins the text. With
  /// `sums_in_hosts`, tables whose rows lie over the ranks of a host are marked as hosted if there
  /// are several hosts.
  TableLayout(std::string operation, std::vector<embedding::EmbeddingTableConfig> tables,
              ModulePlan plan, const Topology& topology, bool is_pooled,
              bool sums_in_hosts = false);

  const ParameterSharding& sharding(std::size_t table) const { return *shardings[table]; }
  const Shard& shard(const Route& route) const { return sharding(route.table).shards[route.shard]; }
  /// Whether the rows of the table lie in several shards.
  bool is_row_cut(std::size_t table) const;
  /// Whether the rows of the table are summed inside their host before they leave it. All ranks of
  /// a host then have the same hosted routes, also for shards without rows.
  bool is_hosted(std::size_t table) const;

  std::string operation;
  Topology topology;
  bool sums_in_hosts = false;
  bool has_hosted = false;
  bool has_routes = false;  // whether anything travels at all
  /// Rows are shard buckets (kernels/id_lines.h): any id is legal, goes to the shard that has the
  /// bucket of its hash, and arrives as it is.
  bool cuts_by_hash = false;
  std::vector<embedding::EmbeddingTableConfig> tables;
  ModulePlan plan;
  std::vector<const ParameterSharding*> shardings;  // of each table
  /// Every feature once, and the smallest table it is looked up in.
  std::vector<std::string> features;
  std::vector<std::size_t> smallest_table;
  /// What goes to each rank: shard by shard, feature by feature, those of hosted tables last.
  /// Shards without rows get nothing.
  std::vector<std::vector<Route>> routes;
  /// What stays here: features of data-parallel tables.
  std::vector<Route> local;
  /// Types in order of their first table; in a type by the lowest rank, then as configured.
  std::vector<Output> outputs;
};

/// Throws the same ValueError on all ranks, naming the first table whose config or plan differs (or
/// the `options`, as words), unless all ranks have the same. Collective.
void check_same_layout(const TableLayout& layout, const comm::Group& group,
                       const std::string& options = {});

}  // namespace tessera::sharding
