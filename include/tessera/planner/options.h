// tessera/planner/options.h — every allowed way to cut every table, with its costs.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/planner/cost.h"
#include "tessera/planner/problem.h"

namespace tessera::planner {

/// What a part adds to its rank.
struct Load {
  double links = 0;
  double local = 0;
  double bytes = 0;

  double seconds() const noexcept { return links + local; }
};

/// Ranks that are alike.
struct RankKind {
  Rank rank;
  double capacity = 0;  // bytes for tables
  std::vector<int> ranks;
};

/// Loads of a part of u units of columns, for every kind of rank: [kind][u], u from 0 on.
using PartLoads = std::vector<std::vector<Load>>;

/// Parts on ranks cut by rows: `count` ranks have full height, at most one has what is left.
struct RowParts {
  int count = 0;
  PartLoads full;
  bool has_rest = false;
  PartLoads rest;
  /// Where it is known how ids are spread over the rows, ranks differ: rows and loads of each. Then
  /// `full` has the most that any of them has, and there is no rest.
  std::vector<std::int64_t> heights;
  std::vector<PartLoads> each;

  /// Loads of the `i`-th rank; null if it has no rows.
  const PartLoads* on(int i) const noexcept {
    if (!each.empty())
      return heights[static_cast<std::size_t>(i)] > 0 ? &each[static_cast<std::size_t>(i)]
                                                      : nullptr;
    if (i < count) return &full;
    return i == count && has_rest ? &rest : nullptr;
  }
};

/// On every rank the same way: row_wise or data_parallel.
struct UniformOption {
  Cut cut = Cut::kRowWise;
  Kernel kernel = Kernel::kFused;
  RowParts parts;       // of one unit: all columns
  bool is_even = true;  // rows; else as many as get the same share of the ids
};

/// Tables that have the same numbers and rules, and their options.
struct TableClass {
  std::vector<int> tables;  // places in Options::tables
  TableRules rules;
  std::vector<char> is_rank_allowed;  // empty: all
  int num_ranks_allowed = 0;
  std::int64_t unit = 0;  // columns
  int units = 0;

  bool has_parts = false;    // table_wise, column_wise or table_column_wise
  bool can_cut = false;      // into several parts
  bool in_one_host = false;  // table_column_wise only
  bool is_single = false;    // lies with or apart from others: a class of its own
  Cut whole_cut = Cut::kTableWise;
  Cut cut = Cut::kColumnWise;
  PartLoads parts;

  bool has_hosts = false;  // table_row_wise, grid_shard
  bool can_cut_hosts = false;
  Cut whole_host_cut = Cut::kTableRowWise;
  RowParts host_parts;
  std::vector<int> hosts;  // allowed

  std::vector<UniformOption> uniform;
};

struct Options {
  /// In order of names. Of tables that lie together the first is there, with the load of all.
  std::vector<Table> tables;
  std::vector<std::vector<Table>> company;  // by table: those that lie with it
  std::vector<std::vector<int>> apart;      // by table: those that it must not meet
  std::vector<int> class_of;
  std::vector<TableClass> classes;
  std::vector<RankKind> kinds;
  std::vector<int> kind_of;  // of each rank
  int ranks_per_host = 1;
  std::vector<std::vector<int>> host_kinds;  // kinds of the ranks of a host; each such list once

  int num_ranks() const noexcept { return static_cast<int>(kind_of.size()); }
  double capacity(int rank) const noexcept {
    return kinds[static_cast<std::size_t>(kind_of[static_cast<std::size_t>(rank)])].capacity;
  }
};

/// Columns of the narrowest part: the smallest divisor of the width that is at least `min_columns`
/// (0: four), so that parts of whole units always fill the table.
TESSERA_API std::int64_t unit_of(std::int64_t dim, std::int64_t min_columns);

/// Throws PlanError: kBadProblem by check(), kRules where rules leave a table no option.
TESSERA_API Options enumerate(const Problem& problem);

/// Loads of a table cut into `count` parts as even as units allow: the least there is, since costs
/// are convex in the width. Of kind 0.
TESSERA_API Load even_parts(const PartLoads& parts, int units, int count);
/// The same of all ranks together that have rows.
TESSERA_API Load even_parts(const RowParts& rows, int units, int count);

}  // namespace tessera::planner
