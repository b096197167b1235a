#include "tessera/planner/replan.h"

#include <algorithm>
#include <map>
#include <set>

#include "planner/json.h"
#include "planner/places.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/options.h"

namespace tessera::planner {
namespace {

using json::Json;
using json::Place;

constexpr double kGood = 0.002;  // no move is looked for below this gap
constexpr int kMostMoves = 2000;

struct Size {
  std::int64_t rows = 0;
  std::int64_t dim = 0;
};

Size size_of(const TablePlan& plan) {
  Size size;
  for (const Shard& shard : plan.shards) {
    size.rows = std::max(size.rows, shard.row + shard.rows);
    size.dim = std::max(size.dim, shard.column + shard.columns);
  }
  return size;
}

// The part of `a` that `b` has too, on a's rank.
Shard common(const Shard& a, const Shard& b) {
  const std::int64_t row = std::max(a.row, b.row);
  const std::int64_t column = std::max(a.column, b.column);
  return {row, column, std::min(a.row + a.rows, b.row + b.rows) - row,
          std::min(a.column + a.columns, b.column + b.columns) - column, a.rank};
}

bool is_some(const Shard& shard) { return shard.rows > 0 && shard.columns > 0; }

void add_moves(const TablePlan& before, const TablePlan& after, std::vector<Move>& moves) {
  for (const Shard& shard : after.shards) {
    if (!is_some(shard)) continue;
    if (before.cut == Cut::kDataParallel) {
      // Whole wherever it was.
      const auto held = std::find_if(before.shards.begin(), before.shards.end(),
                                     [&](const Shard& one) { return one.rank == shard.rank; });
      const Shard part = common(shard, before.shards.front());
      if (held == before.shards.end() && is_some(part)) {
        moves.push_back({after.name, part, before.shards.front().rank});
      }
      continue;
    }
    for (const Shard& old : before.shards) {
      const Shard part = common(shard, old);
      if (old.rank != shard.rank && is_some(part)) moves.push_back({after.name, part, old.rank});
    }
  }
}

double area_of(const std::vector<Move>& moves) {
  double area = 0;
  for (const Move& move : moves) {
    area += static_cast<double>(move.part.rows) * static_cast<double>(move.part.columns);
  }
  return area;
}

class Replanning {
 public:
  Replanning(const Problem& problem, const Plan& previous, double max_moved, double steps_left)
      : problem_(problem), model_(problem), steps_left_(steps_left) {
    for (const Table& table : problem.tables) tables_[table.name] = &table;
    for (const TablePlan& one : previous) {
      if (!previous_.emplace(one.name, &one).second || one.shards.empty()) {
        throw PlanError(PlanErrorKind::kBadEvidence, "plan: the previous plan has table '" +
                                                         one.name + "' twice, or without a shard");
      }
    }
    best_ = plan(problem);  // throws where there is none
    for (const TablePlan& one : best_.plan) best_of_[one.name] = &one;
    start();
    for (const auto& [name, table] : tables_) {
      const auto found = previous_.find(name);
      if (found == previous_.end()) continue;
      const Size size = size_of(*found->second);
      if (size.dim != table->dim) continue;
      total_ += static_cast<double>(std::min(size.rows, table->rows)) *
                static_cast<double>(table->dim) * table->element_bytes *
                (found->second->cut == Cut::kDataParallel
                     ? static_cast<double>(found->second->shards.size())
                     : 1);
    }
    make_room();
    forced_ = moved_bytes();
    previous_seconds_ = seconds();
    budget_ = forced_ + max_moved * total_;
  }

  Replan run() {
    // A change that is not worth its moves may be, together with the next ones.
    double least = price();
    std::size_t worth = 0;
    taken_.clear();
    for (int i = 0; i < kMostMoves && improve(); ++i) {
      if (const double now = price(); now < least) {
        least = now;
        worth = taken_.size();
      }
    }
    for (; steps_left_ > 0 && taken_.size() > worth; taken_.pop_back()) put(taken_.back());
    if (over() > 0) return_to_best();
    Replan found;
    found.result = best_;
    found.result.plan.clear();
    for (const auto& [name, one] : laid_) found.result.plan.push_back(one);
    found.result.per_rank = cost_of(problem_, found.result.plan);
    found.result.seconds = step_seconds(problem_, found.result.per_rank);
    found.result.reasons.assign(found.result.plan.size(), {});
    found.moves = moves();
    found.moving_seconds = moving_seconds(found.moves);
    found.moved_bytes = moved_bytes();
    found.total_bytes = total_;
    found.previous_seconds = previous_seconds_;
    for (const auto& [name, table] : tables_) {
      if (previous_.count(name) == 0) found.appeared.push_back(name);
    }
    for (const auto& [name, one] : previous_) {
      const auto now = tables_.find(name);
      if (now == tables_.end()) {
        found.vanished.push_back(name);
        continue;
      }
      const Size was = size_of(*one);
      if (was.rows != now->second->rows || was.dim != now->second->dim) {
        found.changed.push_back(name);
      }
    }
    check_plan(problem_, found.result.plan);
    return found;
  }

 private:
  using Costs = std::vector<ShardCost>;

  // Every table as it was, where that is still possible.
  void start() {
    per_rank_.assign(at(problem_.num_ranks()), {});
    for (const auto& [name, table] : tables_) {
      const auto found = previous_.find(name);
      TablePlan one = *best_of_.at(name);
      if (found != previous_.end() && size_of(*found->second).dim == table->dim) {
        is_kept_.insert(name);
        TablePlan old = *found->second;
        if (adapt(old, *table)) one = std::move(old);
      }
      loads_[name] = model_.load_of(*table);
      add(one, 1);
      laid_[name] = std::move(one);
    }
  }

  // To the rows and ranks of today; false if it cannot lie so.
  bool adapt(TablePlan& one, const Table& table) const {
    const int world = problem_.num_ranks();
    if (!is_allowed(one, table)) return false;
    const auto recut = [&](std::vector<Shard>& shards, int first, int count, std::int64_t column,
                           std::int64_t columns) {
      const std::int64_t height = (table.rows + count - 1) / count;
      for (int i = 0; i < count; ++i) {
        const std::int64_t begin = std::min(table.rows, i * height);
        shards.push_back(
            {begin, column, std::min(table.rows, begin + height) - begin, columns, first + i});
      }
    };
    std::vector<Shard> shards;
    switch (one.cut) {
      case Cut::kDataParallel:
        for (int r = 0; r < world; ++r) shards.push_back({0, 0, table.rows, table.dim, r});
        break;
      case Cut::kRowWise:
        recut(shards, 0, world, 0, table.dim);
        // Rows of equal load stay where they are, but for those that are new or gone.
        if (!table.ids_below.empty() && static_cast<int>(one.shards.size()) == world) {
          for (int r = 0; r < world; ++r) {
            const Shard& old = one.shards[at(r)];
            const std::int64_t begin = std::min(old.row, table.rows);
            const std::int64_t end =
                r + 1 == world ? table.rows : std::min(old.row + old.rows, table.rows);
            shards[at(r)] = {begin, 0, end - begin, table.dim, r};
          }
        }
        break;
      case Cut::kTableRowWise:
      case Cut::kGrid: {
        std::set<std::int64_t> seen;
        for (const Shard& shard : one.shards) {
          if (!seen.insert(shard.column).second) continue;
          const int host = shard.rank / problem_.ranks_per_host;
          if ((host + 1) * problem_.ranks_per_host > world) return false;
          recut(shards, host * problem_.ranks_per_host, problem_.ranks_per_host, shard.column,
                shard.columns);
        }
        break;
      }
      default: {
        std::set<int> held;
        for (const Shard& shard : one.shards) {
          if (shard.rank < world) held.insert(shard.rank);
        }
        for (Shard shard : one.shards) {
          shard.rows = table.rows;
          // Its rank is gone: where the least is, and no other part, which is sent the same ids.
          if (shard.rank >= world) shard.rank = emptiest(one.name, held);
          held.insert(shard.rank);
          shards.push_back(shard);
        }
      }
    }
    one.shards = std::move(shards);
    const int host = one.shards[0].rank / problem_.ranks_per_host;
    for (const Shard& shard : one.shards) {
      if (!is_rank_allowed(one.name, shard.rank)) return false;
      const bool is_elsewhere = shard.rank / problem_.ranks_per_host != host;
      if (one.cut == Cut::kTableColumnWise && is_elsewhere) return false;
    }
    return true;
  }

  // A rank that holds none of the table, if there is one.
  int emptiest(const std::string& name, const std::set<int>& held) const {
    int best = 0;
    std::pair<bool, double> least{true, kNoLimit};
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      const std::pair here{held.count(r) != 0, per_rank_[at(r)].seconds.total()};
      if (here >= least || !is_rank_allowed(name, r)) continue;
      least = here;
      best = r;
    }
    return best;
  }

  bool is_rank_allowed(const std::string& name, int rank) const {
    const auto rules = problem_.rules.find(name);
    if (rules == problem_.rules.end() || rules->second.ranks.empty()) return true;
    const auto& ranks = rules->second.ranks;
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }

  std::int64_t unit_of_table(const Table& table) const {
    const auto rules = problem_.rules.find(table.name);
    return unit_of(table.dim, rules == problem_.rules.end() ? 0 : rules->second.min_columns);
  }

  bool is_allowed(const TablePlan& one, const Table& table) const {
    const std::int64_t unit = unit_of_table(table);
    for (const Shard& shard : one.shards) {
      if (shard.columns % unit != 0) return false;
    }
    if (one.kernel == Kernel::kDense && one.cut != Cut::kDataParallel) return false;
    const auto rules = problem_.rules.find(one.name);
    if (rules == problem_.rules.end()) return true;
    const auto& [cuts, kernels, min_columns, ranks] = rules->second;
    return (cuts.empty() || std::find(cuts.begin(), cuts.end(), one.cut) != cuts.end()) &&
           (kernels.empty() ||
            std::find(kernels.begin(), kernels.end(), one.kernel) != kernels.end());
  }

  ShardCost cost(const TablePlan& one, const Shard& shard) const {
    return model_.cost(*tables_.at(one.name), loads_.at(one.name), one.cut, one.kernel, shard.rows,
                       shard.columns, shard.rank, shard.row);
  }

  static void add_to(ShardCost& sum, const ShardCost& one, double sign) {
    sum.seconds.ids += sign * one.seconds.ids;
    sum.seconds.lookup += sign * one.seconds.lookup;
    sum.seconds.rows += sign * one.seconds.rows;
    sum.seconds.gradients += sign * one.seconds.gradients;
    sum.seconds.step += sign * one.seconds.step;
    sum.bytes.weights += sign * one.bytes.total();  // together: only the sum is asked for
  }

  void add(const TablePlan& one, double sign) {
    for (const Shard& shard : one.shards) {
      add_to(per_rank_[at(shard.rank)], cost(one, shard), sign);
    }
  }

  double seconds() const { return step_seconds(problem_, per_rank_); }

  // Bytes that do not fit, of all ranks.
  double over() const {
    double sum = 0;
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      const double bytes = per_rank_[at(r)].bytes.weights;
      if (bytes > model_.capacity(r) && bytes > 1) {
        sum += bytes - std::max(0.0, model_.capacity(r));
      }
    }
    return sum;
  }

  double moved_of(const TablePlan& one) const {
    if (is_kept_.count(one.name) == 0) return 0;
    std::vector<Move> moves;
    add_moves(*previous_.at(one.name), one, moves);
    return area_of(moves) * tables_.at(one.name)->element_bytes;
  }
  double moved_bytes() const {
    double bytes = 0;
    for (const auto& [name, one] : laid_) bytes += moved_of(one);
    return bytes;
  }

  std::vector<Move> moves() const {
    std::vector<Move> found;
    for (const auto& [name, one] : laid_) {
      if (is_kept_.count(name) != 0) add_moves(*previous_.at(name), one, found);
    }
    return found;
  }

  // That the busiest rank's links are kept, by what leaves it or by what comes.
  double moving_seconds(const std::vector<Move>& list) const {
    std::vector<double> leaving(per_rank_.size());
    std::vector<double> coming(per_rank_.size());
    for (const Move& move : list) {
      const Table& table = *tables_.at(move.table);
      const auto rows = static_cast<double>(move.part.rows);
      const double bytes = rows * (static_cast<double>(move.part.columns) *
                                       (table.element_bytes + table.state_bytes_per_element) +
                                   table.state_bytes_per_row);
      const int local = problem_.ranks_per_host;
      const bool is_far = move.from / local != move.part.rank / local;
      const auto speed = [&](int rank) {
        const Speeds& speeds = problem_.ranks[at(rank)].speeds;
        return is_far ? speeds.network : speeds.host;
      };
      // A rank that is gone is as fast as the one that takes its rows.
      const bool is_there = move.from < problem_.num_ranks();
      const double slower =
          std::min(speed(move.part.rank), speed(is_there ? move.from : move.part.rank));
      if (is_there) leaving[at(move.from)] += bytes / slower;
      coming[at(move.part.rank)] += bytes / slower;
    }
    double most = 0;
    for (std::size_t r = 0; r < leaving.size(); ++r) {
      most = std::max({most, leaving[r], coming[r]});
    }
    return most;
  }

  // Seconds of all steps that are left, and of the moves before them.
  double price() const {
    return steps_left_ > 0 ? steps_left_ * seconds() + moving_seconds(moves()) : 0;
  }

  struct Candidate {
    double score = 0;  // less is better
    double moved = 0;  // bytes, more than now
    TablePlan plan;
  };

  // Whether laying `next` for one table helps, and how much: first memory, then the slowest rank,
  // then the sum of the ranks that are nearly as slow.
  void consider(TablePlan next, bool must_make_room, std::vector<Candidate>& found) {
    const TablePlan& now = laid_.at(next.name);
    const double moved = moved_of(next) - moved_of(now);
    if (!must_make_room && moved_now_ + moved > budget_) return;
    add(now, -1);
    add(next, 1);
    const double after = must_make_room ? over() : (over() > 0 ? kNoLimit : peak());
    add(next, -1);
    add(now, 1);
    if (after >= before_ * (1 - 1e-7)) return;
    // Per byte that it costs, unless it costs none.
    const double gain = before_ - after;
    const double per_byte = gain / (std::max(moved, 0.0) + 1e-3 * total_ / kMostMoves + 1);
    found.push_back({-(must_make_room ? per_byte : gain), moved, std::move(next)});
  }

  // The slowest rank's time, and a little of how many are nearly so slow.
  double peak() const {
    const double most = seconds();
    double near = 0;
    for (const ShardCost& cost : per_rank_) {
      near += std::max(0.0, cost.seconds.total() / std::max(most, 1e-300) - 0.999);
    }
    return most * (1 + 1e-3 * near);
  }

  void candidates_on(int rank, bool must_make_room, std::vector<Candidate>& found) {
    std::vector<int> others;
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      if (r != rank) others.push_back(r);
    }
    const auto key = [&](int r) {
      return must_make_room ? per_rank_[at(r)].bytes.weights - model_.capacity(r)
                            : per_rank_[at(r)].seconds.total();
    };
    std::stable_sort(others.begin(), others.end(), [&](int a, int b) { return key(a) < key(b); });
    if (others.size() > 4) others.resize(4);
    std::vector<std::string> names;
    for (const auto& [name, one] : laid_) {
      const bool is_here =
          std::any_of(one.shards.begin(), one.shards.end(),
                      [&](const Shard& shard) { return shard.rank == rank && is_some(shard); });
      if (is_here) names.push_back(name);
    }
    for (const std::string& name : names) {
      const TablePlan& one = laid_.at(name);
      consider(*best_of_.at(name), must_make_room, found);
      if (one.cut != Cut::kTableWise && one.cut != Cut::kColumnWise) continue;
      move_columns(one, rank, others, must_make_room, found);
    }
  }

  // Whole shards, or some of their columns, to other ranks.
  void move_columns(const TablePlan& one, int rank, const std::vector<int>& others,
                    bool must_make_room, std::vector<Candidate>& found) {
    const auto rules = problem_.rules.find(one.name);
    const std::int64_t unit = unit_of_table(*tables_.at(one.name));
    const bool may_cut = rules == problem_.rules.end() || rules->second.cuts.empty() ||
                         std::find(rules->second.cuts.begin(), rules->second.cuts.end(),
                                   Cut::kColumnWise) != rules->second.cuts.end();
    for (std::size_t s = 0; s < one.shards.size(); ++s) {
      if (one.shards[s].rank != rank) continue;
      for (const int to : others) {
        if (!is_rank_allowed(one.name, to)) continue;
        const bool holds = std::any_of(one.shards.begin(), one.shards.end(),
                                       [&](const Shard& shard) { return shard.rank == to; });
        if (!holds) {
          TablePlan next = one;
          next.shards[s].rank = to;
          consider(std::move(next), must_make_room, found);
        }
        if (!may_cut) continue;
        // The last columns: to a new part, or to the part beside it if that is there.
        const std::int64_t end = one.shards[s].column + one.shards[s].columns;
        const bool is_beside = s + 1 < one.shards.size() && one.shards[s + 1].rank == to &&
                               one.shards[s + 1].column == end;
        if (holds && !is_beside) continue;
        for (std::int64_t columns = unit; columns + unit <= one.shards[s].columns; columns *= 2) {
          TablePlan next = one;
          next.cut = Cut::kColumnWise;
          next.shards[s].columns -= columns;
          const std::int64_t column = next.shards[s].column + next.shards[s].columns;
          if (is_beside) {
            next.shards[s + 1].column = column;
            next.shards[s + 1].columns += columns;
          } else {
            next.shards.insert(next.shards.begin() + static_cast<std::ptrdiff_t>(s) + 1,
                               {0, column, next.shards[s].rows, columns, to});
          }
          consider(std::move(next), must_make_room, found);
        }
      }
    }
  }

  bool take_best(std::vector<Candidate>& found) {
    if (found.empty()) return false;
    const auto best =
        std::min_element(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
          return a.score != b.score ? a.score < b.score : a.moved < b.moved;
        });
    moved_now_ += best->moved;
    taken_.push_back(laid_.at(best->plan.name));
    put(best->plan);
    return true;
  }

  // Lays a table so instead.
  void put(const TablePlan& next) {
    TablePlan& now = laid_.at(next.name);
    add(now, -1);
    add(next, 1);
    now = next;
  }

  void make_room() {
    moved_now_ = moved_bytes();
    for (int i = 0; i < kMostMoves && over() > 0; ++i) {
      before_ = over();
      std::vector<Candidate> found;
      for (int r = 0; r < problem_.num_ranks(); ++r) {
        if (per_rank_[at(r)].bytes.weights > model_.capacity(r)) candidates_on(r, true, found);
      }
      if (!take_best(found)) break;
    }
    if (over() > 0) return_to_best();
    moved_now_ = moved_bytes();
  }

  // Nothing nearer was found that fits.
  void return_to_best() {
    for (auto& [name, one] : laid_) {
      add(one, -1);
      one = *best_of_.at(name);
      add(one, 1);
    }
    moved_now_ = moved_bytes();
  }

  bool improve() {
    const double now = seconds();
    if (now <= best_.certificate.seconds * (1 + kGood)) return false;
    before_ = peak();
    // Where every rank waits in each phase, the slowest in either counts.
    std::set<int> slowest;
    const auto slowest_by = [&](auto value) {
      int rank = 0;
      for (int r = 1; r < problem_.num_ranks(); ++r) {
        if (value(per_rank_[at(r)]) > value(per_rank_[at(rank)])) rank = r;
      }
      slowest.insert(rank);
    };
    if (problem_.objective == Objective::kSum) {
      slowest_by([](const ShardCost& cost) { return cost.seconds.total(); });
    } else {
      slowest_by([](const ShardCost& cost) { return cost.seconds.links(); });
      slowest_by([](const ShardCost& cost) { return cost.seconds.local(); });
    }
    std::vector<Candidate> found;
    for (const int rank : slowest) candidates_on(rank, false, found);
    return take_best(found);
  }

  const Problem& problem_;
  CostModel model_;
  double steps_left_;
  std::vector<TablePlan> taken_;  // how tables lay before each change
  std::map<std::string, const Table*> tables_;
  std::map<std::string, CostModel::TableLoad> loads_;
  std::map<std::string, const TablePlan*> previous_;
  std::set<std::string> is_kept_;
  PlanResult best_;
  std::map<std::string, const TablePlan*> best_of_;
  std::map<std::string, TablePlan> laid_;
  Costs per_rank_;
  double total_ = 0;
  double forced_ = 0;
  double budget_ = 0;
  double moved_now_ = 0;
  double before_ = 0;
  double previous_seconds_ = 0;
};

}  // namespace

std::vector<Move> moves_between(const Plan& before, const Plan& after) {
  std::vector<Move> moves;
  std::map<std::string, const TablePlan*> old;
  for (const TablePlan& one : before) old[one.name] = &one;
  for (const TablePlan& one : after) {
    const auto found = old.find(one.name);
    if (found == old.end() || found->second->shards.empty()) continue;
    if (size_of(*found->second).dim == size_of(one).dim) add_moves(*found->second, one, moves);
  }
  return moves;
}

Replan replan(const Problem& problem, const Plan& previous, double max_moved, double steps_left) {
  check(problem);
  if (!problem.apart.empty() || !problem.together.empty()) {
    throw PlanError(PlanErrorKind::kBadProblem,
                    "plan: tables that lie together or apart cannot be planned again",
                    "moves are of single tables", "a new plan, without --previous");
  }
  return Replanning(problem, previous, max_moved, steps_left).run();
}

Plan plan_from_json(std::string_view text) {
  const Json value = json::parse(text, "the plan");
  const Place root(value, "");
  if (root.has("certificate")) return result_from_json(text).plan;
  root["version"].whole(1, 1);
  const Place modules = root["modules"];
  if (!modules.value().is_object() || modules.value().size() != 1) {
    modules.refuse("is not one module");
  }
  const auto module = modules.value().begin();
  const Json& tables = module.value();
  const Place list(tables, modules.path() + "/" + module.key());
  if (!tables.is_object()) list.refuse("is not an object");
  constexpr std::int64_t kMost = std::int64_t{1} << 44;
  Plan plan;
  for (const auto& [name, value_of] : tables.items()) {
    const Place one(value_of, list.path() + "/" + name);
    TablePlan table;
    table.name = name;
    try {
      table.cut = cut_of(one["type"].text());
      table.kernel = kernel_of(one["kernel"].text());
    } catch (const PlanError&) {
      one.refuse("has no type or kernel that is known");
    }
    const Place shards = one["shards"];
    for (std::size_t s = 0; s < shards.size(); ++s) {
      const Place shard = shards[s];
      if (shard.size() != 5) shard.refuse("is not [row, column, rows, columns, rank]");
      const auto number = [&](std::size_t i) { return shard[i].whole(0, kMost); };
      table.shards.push_back({number(0), number(1), number(2), number(3),
                              static_cast<int>(shard[std::size_t{4}].whole(0, 1 << 16))});
    }
    plan.push_back(std::move(table));
  }
  std::sort(plan.begin(), plan.end(),
            [](const TablePlan& a, const TablePlan& b) { return a.name < b.name; });
  return plan;
}

}  // namespace tessera::planner
