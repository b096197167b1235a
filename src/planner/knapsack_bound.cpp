// The bound where few large shards make a rank.
//
// Pay every table. A shard earns the share of the pay that it is of the table; and, of a second
// pay, all if the table is not cut into columns, else one part in as many as a table that is cut
// has at least. So the shards of a table earn at least its pays, however it is cut. What a rank
// earns in a plan of T is at most what the best set of shards earns that fits into T, a knapsack.
// If all tables together are paid more than that for every rank, no plan reaches T. A price for
// bytes is taken off what shards earn, and all memory is paid for at it.
//
// Pays come from a linear programme whose columns are sets of shards: each round the knapsack finds
// the set that earns most at the pays of the last one.

#include "planner/knapsack_bound.h"

#include <algorithm>
#include <cmath>

#include "planner/places.h"

namespace tessera::planner {
namespace knapsack {  // names of its own, for files that are compiled together
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMargin = 1e-9;
// Cells of time, to which shards are rounded down. A proof by some cells is one by twice as many.
constexpr int kCells = 8192;
constexpr int kFineCells = 32768;
constexpr double kBudgetForFine = 1e10;
constexpr double kSmall = 1.0 / 1024;  // of the time: a smaller shard is a fluid
constexpr std::size_t kMostClasses = 64;
constexpr double kFew = 8;       // tables of a class of which each is counted once
constexpr double kClose = 2e-4;  // the bound is not sought more closely

// One shard of a table, if it is cut in some way.
struct Piece {
  double share = 0;  // of the table
  double count = 0;  // of its parts, as one of the fewest it may have; of all shards 1 or more
  double seconds = 0;
  double bytes = 0;
  bool is_on_all = false;  // ranks: a rank has at most one of each table
};

struct ClassShards {
  double tables = 0;
  std::vector<Piece> shards;
};

// All shards that fit into `seconds` and a rank.
std::vector<ClassShards> shards_within(const Options& options, double seconds) {
  std::vector<ClassShards> all;
  for (const TableClass& one : options.classes) {
    ClassShards found;
    found.tables = static_cast<double>(one.tables.size());
    const auto fits = [&](const Load& load) {
      return load.seconds() <= seconds && load.bytes <= options.kinds[0].capacity;
    };
    bool is_on_all = false;
    const auto add = [&](const Load& load, double share, double count) {
      if (!fits(load)) return;
      found.shards.push_back({share, count, load.seconds(), load.bytes, is_on_all});
    };
    const double rows = static_cast<double>(options.tables[at(one.tables[0])].rows);
    const auto add_rows = [&](const RowParts& parts, int ranks, int u, double width, double count,
                              bool is_copy) {
      for (std::size_t i = 0; i < parts.each.size(); ++i) {
        const double own = static_cast<double>(parts.heights[i]) / rows;
        if (own > 0) add(parts.each[i][0][at(u)], own * width, own * count);
      }
      if (!parts.each.empty()) return;
      const double share = is_copy ? 1.0 / ranks : std::ceil(rows / ranks) / rows;
      add(parts.full[0][at(u)], share * width, share * count);
      const double rest = 1 - share * parts.count;
      if (parts.has_rest) add(parts.rest[0][at(u)], rest * width, rest * count);
    };
    // A table that is cut has at least two parts, and as many as the widest that fits leaves.
    const auto least_cut = [&](const std::vector<Load>& loads) {
      int widest = one.units - 1;
      while (widest > 1 && !fits(loads[at(widest)])) --widest;
      return widest > 0 ? (one.units + widest - 1) / widest : 1;
    };
    const double cut_parts = one.has_parts ? least_cut(one.parts[0]) : 1;
    const double cut_hosts = one.has_hosts ? least_cut(one.host_parts.full[0]) : 1;
    for (int u = 1; u <= one.units; ++u) {
      const bool is_whole = u == one.units;
      const double width = static_cast<double>(u) / one.units;
      if (one.has_parts && (one.can_cut || is_whole)) {
        add(one.parts[0][at(u)], width, is_whole ? 1 : 1 / cut_parts);
      }
      if (one.has_hosts && (one.can_cut_hosts || is_whole)) {
        add_rows(one.host_parts, options.ranks_per_host, u, width, is_whole ? 1 : 1 / cut_hosts,
                 false);
      }
    }
    is_on_all = true;
    for (const UniformOption& option : one.uniform) {
      add_rows(option.parts, options.num_ranks(), 1, 1, 1, option.cut == Cut::kDataParallel);
    }
    all.push_back(std::move(found));
  }
  return all;
}

// Sets of shards on one rank.
class Knapsack {
 public:
  Knapsack(const std::vector<ClassShards>& classes, double seconds, int cells)
      : classes_(classes), seconds_(seconds), cells_(cells) {}

  /// The most that a set earns; at least 0, of no shards.
  double most(const std::vector<double>& shares, const std::vector<double>& counts, double byte) {
    best_.assign(cells_ + 1, 0);
    stages_.clear();
    std::vector<Item> endless;
    Item fluid;  // of the small shards, the one that earns most in a cell; of it, any share
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      items_.clear();
      for (std::size_t i = 0; i < classes_[c].shards.size(); ++i) {
        const Piece& shard = classes_[c].shards[i];
        const double earned =
            shares[c] * shard.share + counts[c] * shard.count - byte * shard.bytes;
        if (!(earned > 0)) continue;
        const double cells = shard.seconds / seconds_ * cells_;
        const auto place = static_cast<int>(c);
        if (shard.is_on_all && classes_[c].tables > kFew) {
          take_some({0, earned, place, static_cast<int>(i), 1}, cells,
                    static_cast<int>(classes_[c].tables));
        } else if (shard.seconds >= kSmall * seconds_) {
          items_.push_back(
              {static_cast<int>(cells * (1 - kMargin)), earned, place, static_cast<int>(i), 1});
        } else if (earned > fluid.earned * cells) {
          fluid = {1, earned / cells, place, static_cast<int>(i), 1 / cells};
        }
      }
      drop_worse(items_);
      if (classes_[c].tables <= kFew) {
        for (int i = 0; i < static_cast<int>(classes_[c].tables); ++i) take_one();
      } else {
        endless.insert(endless.end(), items_.begin(), items_.end());
      }
    }
    if (fluid.earned > 0) endless.push_back(fluid);
    drop_worse(endless);
    take_any(endless);
    return best_[cells_] + fluid.earned;  // less than a cell may be left beside all of them
  }

  struct Item {
    int cells = 0;
    double earned = 0;
    int table_class = 0;
    int shard = 0;
    double count = 1;
  };

  /// The set that earns most.
  template <class Use>
  void each(Use use) const {
    int cell = cells_;
    for (std::size_t stage = stages_.size(); stage-- > 0;) {
      const Stage& one = stages_[stage];
      for (int item = one.chosen[at(cell)]; item >= 0; item = one.chosen[at(cell)]) {
        use(one.items[at(item)]);
        cell -= one.items[at(item)].cells;
        if (!one.is_endless) break;
      }
    }
  }

  double steps() const { return steps_; }

 private:
  struct Stage {
    bool is_endless = false;
    std::vector<Item> items;
    std::vector<int> chosen;  // by cell; -1: none
  };

  // An item that takes no less and earns no more than another one is not needed.
  static void drop_worse(std::vector<Item>& items) {
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      return a.cells != b.cells ? a.cells < b.cells : a.earned > b.earned;
    });
    std::size_t kept = 0;
    for (const Item& item : items) {
      if (kept == 0 || item.earned > items[kept - 1].earned) items[kept++] = item;
    }
    items.resize(kept);
  }

  void take_one() { take_one_of(items_); }

  // At most `most` of a shard that takes so many cells: bundles of 1, 2, 4 … of them, each once.
  void take_some(const Item& item, double cells, int most) {
    for (int count = 1; most > 0; count *= 2) {
      const int taken = std::min(count, most);
      Item bundle = item;
      bundle.cells = static_cast<int>(std::min(cells * taken * (1 - kMargin), cells_ + 1.0));
      bundle.earned = item.earned * taken;
      bundle.count = taken;
      if (bundle.cells <= cells_) take_one_of({bundle});
      most -= taken;
    }
  }

  void take_one_of(const std::vector<Item>& items) {
    if (items.empty()) return;
    Stage stage{false, items, std::vector<int>(cells_ + 1, -1)};
    std::vector<double> next = best_;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const int cells = items[i].cells;
      const double earned = items[i].earned;
      const auto place = static_cast<int>(i);
      for (int cell = cells; cell <= cells_; ++cell) {
        const double value = best_[at(cell - cells)] + earned;
        const bool is_more = value > next[at(cell)];
        next[at(cell)] = is_more ? value : next[at(cell)];
        stage.chosen[at(cell)] = is_more ? place : stage.chosen[at(cell)];
      }
      steps_ += cells_;
    }
    best_ = std::move(next);
    stages_.push_back(std::move(stage));
  }

  // Any number of each: shards of classes that have many tables.
  void take_any(const std::vector<Item>& items) {
    if (items.empty()) return;
    Stage stage{true, items, std::vector<int>(cells_ + 1, -1)};
    for (std::size_t i = 0; i < items.size(); ++i) {
      const int cells = items[i].cells;
      for (int cell = cells; cell <= cells_; ++cell) {
        const double value = best_[at(cell - cells)] + items[i].earned;
        if (value > best_[at(cell)]) {
          best_[at(cell)] = value;
          stage.chosen[at(cell)] = static_cast<int>(i);
        }
      }
      steps_ += cells_;
    }
    stages_.push_back(std::move(stage));
  }

  const std::vector<ClassShards>& classes_;
  double seconds_;
  int cells_;
  double steps_ = 0;
  std::vector<double> best_;
  std::vector<Item> items_;
  std::vector<Stage> stages_;
};

// min cost·x with A x >= b, x >= 0, columns added as they are found. The first columns pay a fine
// for what no other column covers.
class Simplex {
 public:
  explicit Simplex(std::vector<double> needed) : needed_(std::move(needed)), rows_(needed_.size()) {
    inverse_.assign(rows_ * rows_, 0);
    for (std::size_t i = 0; i < rows_; ++i) {
      // Rows that need nothing start with what they have too much, the others with the fine.
      const bool is_fined = needed_[i] > 0;
      std::vector<double> column(rows_, 0);
      column[i] = is_fined ? 1 : -1;
      add(std::move(column), is_fined ? kFine : 0);
      if (is_fined) {
        std::vector<double> surplus(rows_, 0);
        surplus[i] = -1;
        add(std::move(surplus), 0);
      }
      basis_.push_back(columns_.size() - (is_fined ? 2 : 1));
      inverse_[i * rows_ + i] = is_fined ? 1 : -1;
      amounts_.push_back(needed_[i]);
    }
  }

  void add(std::vector<double> column, double cost) {
    columns_.push_back({std::move(column), cost});
  }

  /// Prices of the rows at the optimum; the sum of needs at these prices is the least cost.
  std::vector<double> solve() {
    std::vector<double> prices(rows_);
    for (int step = 0; step < 2000; ++step) {
      for (std::size_t i = 0; i < rows_; ++i) {
        double sum = 0;
        for (std::size_t j = 0; j < rows_; ++j) {
          sum += columns_[basis_[j]].cost * inverse_[j * rows_ + i];
        }
        prices[i] = sum;
      }
      std::size_t entering = columns_.size();
      double least = -1e-10;
      for (std::size_t c = 0; c < columns_.size(); ++c) {
        double reduced = columns_[c].cost;
        for (std::size_t i = 0; i < rows_; ++i) reduced -= prices[i] * columns_[c].rows[i];
        if (reduced < least) {
          least = reduced;
          entering = c;
        }
      }
      if (entering == columns_.size() || !enter(entering)) break;
    }
    return prices;
  }

 private:
  static constexpr double kFine = 1000;
  struct Column {
    std::vector<double> rows;
    double cost;
  };

  bool enter(std::size_t entering) {
    std::vector<double> direction(rows_, 0);
    for (std::size_t j = 0; j < rows_; ++j) {
      for (std::size_t i = 0; i < rows_; ++i) {
        direction[j] += inverse_[j * rows_ + i] * columns_[entering].rows[i];
      }
    }
    std::size_t leaving = rows_;
    double ratio = kInfinity;
    for (std::size_t j = 0; j < rows_; ++j) {
      if (direction[j] <= 1e-11) continue;
      const double here = std::max(0.0, amounts_[j]) / direction[j];
      if (here < ratio || (here == ratio && basis_[j] < basis_[leaving])) {
        ratio = here;
        leaving = j;
      }
    }
    if (leaving == rows_) return false;
    for (std::size_t i = 0; i < rows_; ++i) inverse_[leaving * rows_ + i] /= direction[leaving];
    for (std::size_t j = 0; j < rows_; ++j) {
      if (j == leaving) continue;
      amounts_[j] -= ratio * direction[j];
      for (std::size_t i = 0; i < rows_; ++i) {
        inverse_[j * rows_ + i] -= direction[j] * inverse_[leaving * rows_ + i];
      }
    }
    amounts_[leaving] = ratio;
    basis_[leaving] = entering;
    return true;
  }

  std::vector<double> needed_;
  std::size_t rows_;
  std::vector<Column> columns_;
  std::vector<std::size_t> basis_;
  std::vector<double> inverse_;
  std::vector<double> amounts_;
};

struct Pays {
  std::vector<double> shares;  // by class
  std::vector<double> counts;  // by class
  double byte = 0;
};

// What all tables are paid, less what ranks earn at most: positive refutes.
double excess_of(const Options& options, const Pays& pays, double most) {
  double sum = 0;
  for (std::size_t c = 0; c < pays.shares.size(); ++c) {
    sum +=
        (pays.shares[c] + pays.counts[c]) * static_cast<double>(options.classes[c].tables.size());
  }
  const double memory = pays.byte > 0 ? pays.byte * options.kinds[0].capacity : 0;
  return sum * (1 - kMargin) - options.num_ranks() * (memory + most) * (1 + kMargin);
}

struct Pattern {
  std::vector<double> amounts;  // shares by class, then counts
  double seconds = 0;
  double bytes = 0;
};

// Whether some pays refute `seconds`; spends of `budget`.
bool refute(const Options& options, double seconds, Pays& pays, std::vector<Pattern>& patterns,
            int cells, double& budget, Patience& patience) {
  const std::vector<ClassShards> classes = shards_within(options, seconds);
  const std::size_t num = classes.size();
  const double capacity = options.kinds[0].capacity;
  const bool has_memory = capacity < kInfinity && capacity > 0;
  std::vector<double> needed;
  for (const ClassShards& one : classes) {
    if (one.shards.empty()) return false;  // prices refute that
    needed.push_back(one.tables);
  }
  for (const ClassShards& one : classes) needed.push_back(one.tables);
  if (has_memory) needed.push_back(0);
  Simplex simplex(needed);
  const auto add = [&](const Pattern& pattern) {
    std::vector<double> column = pattern.amounts;
    if (has_memory) column.push_back((capacity - pattern.bytes) / capacity);
    simplex.add(std::move(column), 1);
  };
  add({std::vector<double>(2 * num, 0), 0, 0});
  for (const Pattern& pattern : patterns) {
    if (pattern.seconds <= seconds) add(pattern);
  }
  Knapsack knapsack(classes, seconds, cells);
  while (budget > 0 && !patience.is_over()) {
    const std::vector<double> prices = simplex.solve();
    pays.shares.clear();
    pays.counts.clear();
    double all = 0;
    for (std::size_t c = 0; c < num; ++c) {
      pays.shares.push_back(std::max(0.0, prices[c]));
      pays.counts.push_back(std::max(0.0, prices[num + c]));
      all += (pays.shares[c] + pays.counts[c]) * classes[c].tables;
    }
    pays.byte = has_memory ? std::max(0.0, prices[2 * num]) / capacity : 0;
    // So few ranks would do, as far as this programme sees.
    if (all <= options.num_ranks() * (1 + 1e-7)) return false;
    const double before = knapsack.steps();
    const double most = knapsack.most(pays.shares, pays.counts, pays.byte);
    budget -= knapsack.steps() - before + 1000;
    if (excess_of(options, pays, most) > 0) return true;
    const double worth = most + (has_memory ? pays.byte * capacity : 0);
    if (worth <= 1 + 1e-7) return false;
    Pattern found{std::vector<double>(2 * num, 0), 0, 0};
    knapsack.each([&](const Knapsack::Item& item) {
      const Piece& shard = classes[at(item.table_class)].shards[at(item.shard)];
      found.amounts[at(item.table_class)] += item.count * shard.share;
      found.amounts[num + at(item.table_class)] += item.count * shard.count;
      found.seconds += item.count * shard.seconds;
      found.bytes += item.count * shard.bytes;
    });
    add(found);
    patterns.push_back(std::move(found));
  }
  return false;
}

}  // namespace

void sharpen(const Options& options, Bound& bound, double reached, double budget, double enough,
             Patience& patience) {
  if (options.kinds.size() != 1 || options.classes.size() > kMostClasses) return;
  double low = bound.certificate.seconds;
  double high = reached;
  Pays best;
  std::vector<Pattern> patterns;
  const bool is_fine = budget >= kBudgetForFine;
  const int cells = is_fine ? kFineCells : kCells;
  while (budget > 0 && high - low > (is_fine ? kClose / 8 : kClose) * low) {
    if (enough > 0 && low * (1 + enough) >= reached) break;
    if (patience.is_over()) break;
    // What is enough is tried at once, the least that is.
    const double wanted = reached / (1 + enough) * (1 + kClose / 8);
    const bool is_wanted = enough > 0 && wanted > low && wanted < high;
    const double middle = is_wanted ? wanted : low + (high - low) / 2;
    Pays pays;
    const bool is_refuted = refute(options, middle, pays, patterns, cells, budget, patience);
    (is_refuted ? low : high) = middle;
    if (is_refuted) best = std::move(pays);
  }
  if (best.shares.empty()) return;
  Certificate& certificate = bound.certificate;
  certificate.seconds = low;
  certificate.table.clear();
  certificate.phases.clear();
  certificate.pays.byte = best.byte;
  for (std::size_t c = 0; c < options.classes.size(); ++c) {
    const int first = options.classes[c].tables[0];
    certificate.pays.tables.push_back(
        {options.tables[at(first)].name, best.shares[c], best.counts[c]});
  }
}

bool hold(const Options& options, const Certificate& certificate) {
  const auto& given = certificate.pays;
  const bool is_right = options.kinds.size() == 1 && certificate.seconds > 0 && given.byte >= 0 &&
                        given.byte < kInfinity && given.tables.size() == options.classes.size();
  if (!is_right) return false;
  Pays pays;
  pays.byte = given.byte;
  for (std::size_t c = 0; c < options.classes.size(); ++c) {
    const TablePay& pay = given.tables[c];
    const std::string& name = options.tables[at(options.classes[c].tables[0])].name;
    if (pay.table != name || !(pay.share >= 0 && pay.share < kInfinity) ||
        !(pay.part >= 0 && pay.part < kInfinity)) {
      return false;
    }
    pays.shares.push_back(pay.share);
    pays.counts.push_back(pay.part);
  }
  const std::vector<ClassShards> classes = shards_within(options, certificate.seconds);
  Knapsack knapsack(classes, certificate.seconds, kFineCells);
  return excess_of(options, pays, knapsack.most(pays.shares, pays.counts, pays.byte)) > 0;
}

}  // namespace knapsack

void sharpen_by_pays(const Options& options, Bound& bound, double reached, double budget,
                     double enough, Patience& patience) {
  knapsack::sharpen(options, bound, reached, budget, enough, patience);
}

bool pays_hold(const Options& options, const Certificate& certificate) {
  return knapsack::hold(options, certificate);
}

}  // namespace tessera::planner
