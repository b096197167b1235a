// tessera/planner/cost.h — what shards ask of a rank: seconds and bytes, by part.
//
// The one cost function: options, bound, packing and report use it.

#pragma once

#include <vector>

#include "tessera/core/export.h"
#include "tessera/planner/problem.h"

namespace tessera::planner {

/// Seconds of a step.
struct Seconds {
  double ids = 0;        // to the ranks that have their rows
  double lookup = 0;     // of the rows
  double rows = 0;       // to the ranks that have the samples
  double gradients = 0;  // back to the rows
  double step = 0;       // of the touched rows

  double links() const noexcept { return ids + rows + gradients; }
  double local() const noexcept { return lookup + step; }
  double total() const noexcept { return links() + local(); }
};

struct Bytes {
  double weights = 0;
  double optimizer = 0;    // state, and gradients of the kernel `dense`
  double input = 0;        // ids and lengths, of this batch and the next
  double activations = 0;  // rows that leave, and their gradients
  double sort = 0;         // work space of the fused step

  double total() const noexcept { return weights + optimizer + input + activations + sort; }
};

struct ShardCost {
  Seconds seconds;
  Bytes bytes;
};

/// Rows [row, row + rows) and columns [column, column + columns) on `rank`.
struct Shard {
  std::int64_t row = 0;
  std::int64_t column = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int rank = 0;

  bool operator==(const Shard&) const = default;
};

struct TablePlan {
  std::string name;
  Cut cut = Cut::kTableWise;
  Kernel kernel = Kernel::kFused;
  std::vector<Shard> shards;  // in order of columns, then rows; data parallel: of ranks
};

/// Rows that every one of `count` ranks has, such that each gets the same share of the ids; of a
/// table whose `ids_below` are known. A row that is asked for more than that leaves others none.
TESSERA_API std::vector<std::int64_t> rows_of_equal_load(const Table& table, int count);

/// In order of names.
using Plan = std::vector<TablePlan>;

/// Costs of one problem, whose ranks and load it keeps.
class TESSERA_API CostModel {
 public:
  explicit CostModel(const Problem& problem);

  /// Of one table: what does not depend on how it is cut.
  struct TableLoad {
    double ids = 0;           // per step, of all ranks
    double id_bytes = 0;      // of those, with their weights
    double lengths = 0;       // bytes, of all ranks
    double outputs = 0;       // rows per step, of all ranks
    double touched = 0;       // share of the rows that a step touches
    double touched_here = 0;  // the same by the ids of one rank
  };
  TableLoad load_of(const Table& table) const;

  /// Of rows from `row` on.
  ShardCost cost(const Table& table, const TableLoad& load, Cut cut, Kernel kernel,
                 std::int64_t rows, std::int64_t columns, int rank, std::int64_t row = 0) const;

  /// Bytes of `rank` that tables may have: less the reservation, and the rows and gradients of the
  /// rank's own samples, which every plan has.
  double capacity(int rank) const { return capacities_[static_cast<std::size_t>(rank)]; }
  /// Bytes of those rows and gradients.
  double own_bytes() const { return own_bytes_; }

 private:
  struct Links {
    double spread = 0;      // seconds a byte that is for all ranks alike
    double in_host = 0;     // the same, summed inside the host first
    double all_reduce = 0;  // seconds a byte
  };
  double world_;
  double batch_;
  double own_bytes_ = 0;
  std::vector<Speeds> speeds_;
  std::vector<Links> links_;
  std::vector<double> capacities_;
};

/// Cost of every rank. `plan` must cover the tables of `problem`.
TESSERA_API std::vector<ShardCost> cost_of(const Problem& problem, const Plan& plan);

/// Seconds of a step by the problem's objective.
TESSERA_API double step_seconds(const Problem& problem, const std::vector<ShardCost>& costs);

}  // namespace tessera::planner
