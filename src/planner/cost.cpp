#include "tessera/planner/cost.h"

#include <algorithm>
#include <cmath>

namespace tessera::planner {
namespace {

constexpr double kIdBytes = 8;
constexpr double kLengthBytes = 4;
constexpr double kWireBytes = 4;   // rows, gradients and weights of ids travel as float32
constexpr double kCacheLine = 64;  // a narrower row costs as much
constexpr double kSortBytes = 16;  // an id, in the fused step
constexpr double kBatchesInFlight = 2;
constexpr double kDenseGradients = 3;  // a new one, the last one, and what ranks sum it in

// Share of the rows that `lookups` even ids touch: 1 - (1 - 1/rows)^lookups. By doubling, since
// the library's pow() may round otherwise on another machine.
double even_share(double rows, double lookups) {
  auto count = static_cast<std::uint64_t>(std::min(lookups, 9e15));
  double share = 0;
  double power = 1 / rows;  // share of 2^k lookups
  for (; count > 0 && share < 1; count >>= 1) {
    if ((count & 1) != 0) share = share + power - share * power;
    power = power * (2 - power);
  }
  return std::min(share, 1.0);
}

// Distinct ids among `lookups`: straight lines between what was measured, and through zero.
double measured_distinct(const std::vector<std::pair<double, double>>& curve, double lookups) {
  double x = 0;
  double y = 0;
  double slope = 1;
  for (const auto& [next_x, next_y] : curve) {
    slope = (next_y - y) / (next_x - x);
    if (lookups <= next_x) break;
    x = next_x;
    y = next_y;
  }
  return std::min(lookups, y + slope * (lookups - x));
}

// Share of a table's ids that are of rows below `row`.
double share_below(const Table& table, double row) {
  double x = 0;
  double y = 0;
  for (const auto& [next_x, next_y] : table.ids_below) {
    if (row <= next_x) return y + (next_y - y) * ((row - x) / (next_x - x));
    x = next_x;
    y = next_y;
  }
  return y;
}

double touched_share(const Table& table, double samples) {
  const auto rows = static_cast<double>(table.rows);
  double even = 0;
  double measured = 0;
  for (const Feature& feature : table.features) {
    const double lookups = samples * feature.ids;
    if (feature.distinct.empty()) {
      even += lookups;
    } else {
      measured += measured_distinct(feature.distinct, lookups);
    }
  }
  return std::min(1.0, even_share(rows, even) + measured / rows);
}

ShardCost& operator+=(ShardCost& sum, const ShardCost& one) {
  sum.seconds.ids += one.seconds.ids;
  sum.seconds.lookup += one.seconds.lookup;
  sum.seconds.rows += one.seconds.rows;
  sum.seconds.gradients += one.seconds.gradients;
  sum.seconds.step += one.seconds.step;
  sum.bytes.weights += one.bytes.weights;
  sum.bytes.optimizer += one.bytes.optimizer;
  sum.bytes.input += one.bytes.input;
  sum.bytes.activations += one.bytes.activations;
  sum.bytes.sort += one.bytes.sort;
  return sum;
}

}  // namespace

CostModel::CostModel(const Problem& problem)
    : world_(problem.num_ranks()), batch_(static_cast<double>(problem.batch)) {
  const double local = problem.ranks_per_host;
  for (const Table& table : problem.tables) {
    double rows = 0;
    for (const Feature& feature : table.features) rows += table.is_pooled ? 1 : feature.ids;
    own_bytes_ += 2 * batch_ * rows * static_cast<double>(table.dim) * kWireBytes;
  }
  for (const Rank& rank : problem.ranks) {
    const Speeds& speeds = rank.speeds;
    speeds_.push_back(speeds);
    links_.push_back(
        {((local - 1) / speeds.host + (world_ - local) / speeds.network) / world_,
         (local - 1) / local / speeds.host + (world_ - local) / world_ / local / speeds.network,
         2 * (world_ - 1) / world_ / (world_ > local ? speeds.network : speeds.host)});
    capacities_.push_back(rank.memory == kNoLimit
                              ? kNoLimit
                              : rank.memory * (1 - problem.reserved_percent / 100) -
                                    problem.reserved_bytes - own_bytes_);
  }
}

CostModel::TableLoad CostModel::load_of(const Table& table) const {
  TableLoad load;
  const double samples = batch_ * world_;
  for (const Feature& feature : table.features) {
    const double ids = samples * feature.ids;
    load.ids += ids;
    load.id_bytes += ids * (kIdBytes + (feature.is_weighted ? kWireBytes : 0));
    load.lengths += samples * kLengthBytes;
    load.outputs += table.is_pooled ? samples : ids;
  }
  load.touched = touched_share(table, samples);
  load.touched_here = touched_share(table, batch_);
  return load;
}

ShardCost CostModel::cost(const Table& table, const TableLoad& load, Cut cut, Kernel kernel,
                          std::int64_t rows, std::int64_t columns, int rank,
                          std::int64_t row) const {
  ShardCost cost;
  if (rows == 0 || columns == 0) return cost;
  const auto r = static_cast<std::size_t>(rank);
  const auto height = static_cast<double>(rows);
  const auto width = static_cast<double>(columns);
  const double memory = speeds_[r].memory;
  const bool is_replica = cut == Cut::kDataParallel;
  const bool is_dense = kernel == Kernel::kDense;
  const double row_bytes = width * table.element_bytes;
  const double state = table.state_bytes_per_row + table.state_bytes_per_element * width;
  const bool is_row_cut = !is_replica && rows < table.rows;
  const bool is_uneven = is_row_cut && !table.ids_below.empty();
  const auto first = static_cast<double>(row);
  const double share = is_uneven ? share_below(table, first + height) - share_below(table, first)
                                 : height / static_cast<double>(table.rows);
  const double ids = load.ids * (is_replica ? 1 / world_ : share);  // looked up here
  const double stepped_ids = load.ids * share;
  // Of rows with ids of their own at most as many as of all, and as even ids would touch.
  const double touched = is_uneven ? std::min(static_cast<double>(table.rows) * load.touched,
                                              height * even_share(height, stepped_ids))
                                   : height * load.touched;

  cost.bytes.weights = height * row_bytes;
  cost.bytes.optimizer =
      height * state + (is_dense ? kDenseGradients * height * width * kWireBytes : 0);
  const double bags = load.outputs * (is_replica ? 1 / world_ : table.is_pooled ? 1 : share);
  cost.seconds.lookup = ids * (std::max(row_bytes, kCacheLine) / memory + speeds_[r].row_seconds) +
                        bags * speeds_[r].bag_seconds + speeds_[r].part_seconds;
  cost.seconds.ids = ids * (speeds_[r].sent_seconds + (is_row_cut ? speeds_[r].cut_seconds : 0.0));
  if (is_replica) {
    const double sent = height * load.touched_here * (kIdBytes + width * kWireBytes);
    cost.seconds.gradients = is_dense ? height * width * kWireBytes * links_[r].all_reduce
                                      : sent * world_ * links_[r].spread;
    cost.bytes.activations = is_dense ? 0 : world_ * sent;
    cost.bytes.input = kBatchesInFlight * (load.id_bytes + load.lengths) / world_;
  } else {
    const double id_bytes = load.id_bytes * share + load.lengths;
    const double output_bytes = load.outputs * (table.is_pooled ? 1 : share) * width * kWireBytes;
    const bool sums_in_host = table.is_pooled && (cut == Cut::kTableRowWise || cut == Cut::kGrid);
    const double there = output_bytes * (sums_in_host ? links_[r].in_host : links_[r].spread);
    cost.seconds.ids += id_bytes * links_[r].spread;
    cost.seconds.rows = there;
    cost.seconds.gradients = there;
    cost.bytes.input = kBatchesInFlight * id_bytes;
    cost.bytes.activations = 2 * output_bytes;
  }
  cost.bytes.sort = is_dense ? 0 : kSortBytes * stepped_ids;
  // Every id reads the gradient of its bag; every touched row and its state are read and written.
  const double stepped = is_dense ? height : touched;
  cost.seconds.step = (stepped_ids * width * kWireBytes + 2 * stepped * (row_bytes + state)) /
                          (speeds_[r].step > 0 ? speeds_[r].step : memory) +
                      (is_dense ? 0 : stepped_ids * speeds_[r].id_seconds);
  // Gradients of rows that ranks exchange before the step are summed first.
  const bool is_merged = is_replica || (table.has_exact_norms && columns < table.dim);
  if (is_merged && !is_dense) {
    cost.seconds.step +=
        touched * (speeds_[r].merge_seconds + width * kWireBytes * speeds_[r].merge_byte_seconds);
  }
  return cost;
}

std::vector<std::int64_t> rows_of_equal_load(const Table& table, int count) {
  std::vector<std::int64_t> heights;
  std::int64_t begin = 0;
  for (int i = 1; i <= count; ++i) {
    const double wanted = static_cast<double>(i) / count;
    double x = 0;
    double y = 0;
    double end = static_cast<double>(table.rows);
    for (const auto& [next_x, next_y] : table.ids_below) {
      if (i < count && next_y >= wanted) {
        end = x + (next_x - x) * ((wanted - y) / (next_y - y));
        break;
      }
      x = next_x;
      y = next_y;
    }
    const auto place = std::clamp(static_cast<std::int64_t>(end + 0.5), begin, table.rows);
    heights.push_back(place - begin);
    begin = place;
  }
  return heights;
}

std::vector<ShardCost> cost_of(const Problem& problem, const Plan& plan) {
  const CostModel model(problem);
  std::map<std::string_view, const Table*> tables;
  for (const Table& table : problem.tables) tables[table.name] = &table;
  std::vector<ShardCost> costs(problem.ranks.size());
  for (const TablePlan& one : plan) {
    const Table& table = *tables.at(one.name);
    const CostModel::TableLoad load = model.load_of(table);
    for (const Shard& shard : one.shards) {
      costs[static_cast<std::size_t>(shard.rank)] += model.cost(
          table, load, one.cut, one.kernel, shard.rows, shard.columns, shard.rank, shard.row);
    }
  }
  return costs;
}

double step_seconds(const Problem& problem, const std::vector<ShardCost>& costs) {
  double links = 0;
  double local = 0;
  double total = 0;
  for (const ShardCost& cost : costs) {
    links = std::max(links, cost.seconds.links());
    local = std::max(local, cost.seconds.local());
    total = std::max(total, cost.seconds.total());
  }
  return problem.objective == Objective::kPhases ? links + local : total;
}

}  // namespace tessera::planner
