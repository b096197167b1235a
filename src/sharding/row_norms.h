// src/sharding/row_norms.h — numbers of rows, summed over the ranks that hold their columns.
//
// All parts of a row's columns are looked up with the same ids, so their gradients have the same
// rows in the same order: what is exchanged needs no row numbers.

#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "sharding/table_layout.h"
#include "tessera/comm/group.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::sharding {

class RowNorms {
 public:
  /// Collective over `group`, which is cut down to the ranks that hold parts of rows. `shards[i]`
  /// is the place of the i-th table this rank sums for (its table and its number among the table's
  /// shards). Throws ValueError for a table whose parts have different rows.
  RowNorms(const TableLayout& layout, const comm::Group& group,
           std::vector<std::pair<std::size_t, std::size_t>> shards);

  /// Whether the plan cuts columns of some table at all.
  static bool has_cut_columns(const TableLayout& layout);

  /// Sums one number per row over the parts of each row, in order of the columns: all parts get the
  /// same bits. Collective over the ranks that hold parts.
  void sum(std::vector<at::Tensor>& numbers) const;

 private:
  /// A part of this rank's i-th table on another rank, or here.
  struct Pair {
    std::size_t table = 0;    // of `numbers`
    std::int64_t column = 0;  // of the other part
  };

  std::optional<comm::Group> group_;        // of the ranks that hold parts, if this one does
  std::vector<std::vector<Pair>> send_;     // to each rank: which numbers
  std::vector<std::vector<Pair>> receive_;  // from each rank: for which numbers
};

}  // namespace tessera::sharding
