#include "tessera/planner/planner.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>

#include "planner/advice.h"
#include "planner/exhaustive.h"
#include "planner/knapsack_bound.h"
#include "planner/packing.h"
#include "planner/patience.h"
#include "planner/phases_bound.h"
#include "planner/places.h"
#include "tessera/planner/options.h"

namespace tessera::planner {
namespace {

constexpr double kGoodGap = 0.002;
constexpr double kSlacks[] = {0.001, 0.004, 0.01, 0.02, 0.04};
struct Cutting {
  double share;
  double budget;
};
constexpr Cutting kCuttings[] = {{1, 0}, {0.25, 0.0003}, {0.125, 0.001}};
constexpr double kMemorySlacks[] = {0, 0.02, 0.04, 0.07, 0.11, 0.16, 0.25};
constexpr double kFairGap = 0.005;
constexpr int kTriesForPays = 64;  // fewer are for a quick answer
constexpr double kStepsForPays = 1.5e7;
// A gap that is a little over what is asked of many tables on many ranks is worth more tries.
struct Goal {
  double asked;
  double near;
  int times;  // as many tries
};
constexpr Goal kGoals[] = {{kFairGap, 0.007, 4}, {0.01, 0.02, 16}, {0.05, 0.055, 16}};
constexpr Goal kPhasesGoals[] = {{0.03, 0.035, 64}};
constexpr int kManyRanks = 16;
constexpr double kDearest = 0.02;  // other choices are tried that cost this share of all time more

// What each table does at the bound's prices; where memory binds, as many as needed are lean.
std::vector<Choice> choices_of(const Options& options, const Bound& bound) {
  std::vector<Choice> choices(options.tables.size());
  double memory = 0;
  for (int r = 0; r < options.num_ranks(); ++r) memory += std::max(0.0, options.capacity(r));
  double asked = 0;
  for (std::size_t t = 0; t < choices.size(); ++t) {
    choices[t] = bound.fast[at(options.class_of[t])];
    asked += choices[t].bytes;
  }
  for (std::size_t c = 0; c < options.classes.size(); ++c) {
    for (const int t : options.classes[c].tables) {
      if (asked <= memory * 0.998) return choices;
      if (bound.lean[c].bytes >= choices[at(t)].bytes) continue;
      asked += bound.lean[c].bytes - choices[at(t)].bytes;
      choices[at(t)] = bound.lean[c];
    }
  }
  return choices;
}

Target target_of(const Options& options, const std::vector<Choice>& choices, Objective objective,
                 double seconds) {
  Target target;
  target.measure = objective == Objective::kSum ? Measure::kSum : Measure::kPhases;
  target.seconds = seconds;
  // Links and memory share the time as all tables together do.
  double links = 0;
  double local = 0;
  for (std::size_t t = 0; t < choices.size(); ++t) {
    const TableClass& one = options.classes[at(options.class_of[t])];
    const Choice& choice = choices[t];
    const auto add = [&](const Load& load, double count) {
      links += load.links * count;
      local += load.local * count;
    };
    if (choice.way == Way::kParts) {
      add(even_parts(one.parts, one.units, choice.count), 1);
    } else {
      const RowParts& rows =
          choice.way == Way::kHosts ? one.host_parts : one.uniform[at(choice.uniform)].parts;
      const int units = choice.way == Way::kHosts ? one.units : 1;
      add(even_parts(rows, units, choice.count), 1);
    }
  }
  const double all = links + local;
  const double share = all > 0 ? std::clamp(links / all, 0.001, 0.999) : 0.5;
  target.links = seconds * share;
  target.local = seconds * (1 - share);
  return target;
}

class Search {
 public:
  /// It ends early once the gap is `enough`, or `patience` is over.
  Search(const Problem& problem, const Options& options, const Bound& bound, double enough,
         Patience& patience)
      : problem_(problem), options_(options), bound_(bound), enough_(enough), patience_(patience) {}

  std::optional<Packing> run() {
    std::vector<Choice> choices = choices_of(options_, bound_);
    aim(choices);
    if (!target_.is_sum()) {
      // Cuts that make memory even cost links: how even it should be is tried.
      for (const double slack : {0.001, 0.01}) {
        for (const double memory_slack : kMemorySlacks) {
          for (const Cutting& cutting : {kCuttings[0], kCuttings[1]}) {
            PackingOptions how{target_,       slack, Order::kMemoryFirst,
                               cutting.share, false, cutting.budget};
            how.memory_slack = memory_slack;
            attempt(choices, how);
          }
        }
      }
    }
    spread_over_hosts(choices);
    refine_slack(choices);
    for (const double slack : kSlacks) {
      if (!target_.is_sum() && slack > 0.001) break;
      for (const bool fills : {false, true}) {
        for (const Cutting& cutting : kCuttings) {
          attempt(choices,
                  {target_, slack, Order::kMemoryFirst, cutting.share, fills, cutting.budget});
        }
      }
    }
    attempt(choices, {target_, 0.004, Order::kLargestFirst, 1, false, 0});
    attempt(choices, {target_, 0.01, Order::kLargestFirst, 0.125, true, 0.001});
    change_choices(choices);
    search_randomly(choices);
    return std::move(best_);
  }

  int tries = 0;

 private:
  struct Change {
    double extra;
    std::size_t table_class;
    Choice choice;
    std::size_t count;  // of the class's tables
  };

  void aim(const std::vector<Choice>& choices) {
    floor_ = std::max(bound_.certificate.seconds, 1e-300);
    target_ = target_of(options_, choices, problem_.objective, floor_);
    // Small problems are quick, and need more.
    most_tries_ =
        problem_.tries * std::clamp(4000 / static_cast<int>(options_.tables.size()), 1, 32);
  }

  bool is_done() const {
    if (tries >= most_tries_ || least_ <= floor_ * (1 + enough_)) return true;
    return tries > 0 && patience_.is_over();  // one is always made
  }

  bool attempt(const std::vector<Choice>& choices, const PackingOptions& how) {
    last_ = kNoLimit;
    if (is_done()) return false;
    ++tries;
    Packing packing(options_);
    if (!packing.fill(choices, how)) return false;
    const int steps = 40 * options_.num_ranks() + 400;
    if (how.target.is_sum()) {
      packing.level(how.target, steps);
    } else {
      // Cuts add to what all ranks do together, so the aim is renewed.
      for (int i = 0; i < 3; ++i) packing.level(packing.mean_target(how.memory_slack), steps);
    }
    last_ = packing.seconds(problem_.objective == Objective::kSum);
    if (last_ >= least_) return false;
    least_ = last_;
    best_ = std::move(packing);
    best_how_ = how;
    return true;
  }

  // What is cheapest by itself may leave too little that evens out the ranks: other choices of one
  // class, cheapest first, as long as one helps.
  void change_choices(std::vector<Choice>& choices) {
    if (options_.kinds.size() > 1) return;
    const double all = floor_ * options_.num_ranks();
    for (bool is_better = true; is_better && !is_done();) {
      is_better = false;
      std::vector<Change> changes;
      for (std::size_t c = 0; c < options_.classes.size(); ++c) {
        const TableClass& one = options_.classes[c];
        const Choice& now = choices[at(one.tables[0])];
        std::vector<Choice> others = choices_within(options_, one, floor_ * 1.02);
        if (now.way == Way::kParts && one.can_cut && now.count < one.units) {
          Choice finer = now;
          ++finer.count;
          finer.seconds = even_parts(one.parts, one.units, finer.count).seconds();
          others.push_back(finer);
        }
        for (const Choice& other : others) {
          if (other.way == now.way && other.count == now.count && other.uniform == now.uniform) {
            continue;
          }
          const double extra = other.seconds - now.seconds;
          const std::size_t all_tables = one.tables.size();
          for (const std::size_t count : {all_tables, all_tables / 2}) {
            const double cost = extra * static_cast<double>(count);
            if (count > 0 && cost <= kDearest * all) changes.push_back({cost, c, other, count});
          }
        }
      }
      std::stable_sort(changes.begin(), changes.end(), [&](const Change& a, const Change& b) {
        // Links are made even by cheap cuts; what is rather work is what has to change.
        const bool x = is_work(a.table_class);
        const bool y = is_work(b.table_class);
        return x != y ? x : a.extra < b.extra;
      });
      for (const Change& change : changes) {
        if (is_done()) return;
        std::vector<Choice> changed = choices;
        const std::vector<int>& tables = options_.classes[change.table_class].tables;
        for (std::size_t i = 0; i < change.count; ++i) changed[at(tables[i])] = change.choice;
        bool helps = attempt(changed, best_how_);
        const bool is_sum = target_.is_sum();
        for (const double slack : {0.004, 0.01, 0.02}) {
          if (!is_sum) break;
          PackingOptions how = best_how_;
          how.slack = slack;
          helps = attempt(changed, how) || helps;
          how.fills_ranks = !how.fills_ranks;
          helps = attempt(changed, how) || helps;
        }
        if (!is_sum) {
          for (const double memory_slack : {0.0, 0.04, 0.11}) {
            PackingOptions how = best_how_;
            how.memory_slack = memory_slack;
            helps = attempt(changed, how) || helps;
          }
        }
        if (helps) {
          choices = std::move(changed);
          is_better = true;
          break;
        }
      }
    }
  }

  // A table cut by rows over a host is even work for all of its ranks: some of a class that is
  // rather work may be cheaper so than cut into columns, where memory is waited for by itself.
  void spread_over_hosts(std::vector<Choice>& choices) {
    if (options_.kinds.size() > 1) return;
    std::vector<std::size_t> order;  // the largest tables first
    for (std::size_t c = 0; c < options_.classes.size(); ++c) {
      const TableClass& one = options_.classes[c];
      if (is_work(c) && one.has_hosts && one.tables.size() > 1) order.push_back(c);
    }
    const auto work_of = [&](std::size_t c) {
      const TableClass& one = options_.classes[c];
      return one.parts[0][at(one.units)].local;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return work_of(a) > work_of(b); });
    if (order.size() > 4) order.resize(4);
    for (const std::size_t c : order) {
      const TableClass& one = options_.classes[c];
      const std::vector<Choice> ways = choices_within(options_, one, floor_);
      const auto host = std::find_if(ways.begin(), ways.end(),
                                     [](const Choice& way) { return way.way == Way::kHosts; });
      if (host == ways.end()) continue;
      std::vector<Choice> best = choices;
      for (std::size_t twelfths = 1; twelfths <= 12; ++twelfths) {
        const std::size_t count = one.tables.size() * twelfths / 12;
        if (count == 0) continue;
        std::vector<Choice> changed = choices;
        for (std::size_t i = 0; i < count; ++i) changed[at(one.tables[i])] = *host;
        for (const double memory_slack : {0.0, 0.03, 0.06, 0.09}) {
          PackingOptions how = best_how_;
          how.memory_slack = memory_slack;
          if (attempt(changed, how)) best = changed;
        }
      }
      choices = std::move(best);
    }
  }

  // How even memory should be, more finely.
  void refine_slack(const std::vector<Choice>& choices) {
    if (target_.is_sum()) return;
    const double around = best_how_.memory_slack;
    for (const double share : {-0.02, -0.015, -0.01, -0.005, 0.0, 0.005, 0.01, 0.015, 0.02}) {
      for (const double slack : {0.0005, 0.003}) {
        PackingOptions how = best_how_;
        how.memory_slack = std::max(0.0, around + share);
        how.slack = slack;
        attempt(choices, how);
      }
    }
  }

  bool is_work(std::size_t table_class) const {
    const TableClass& one = options_.classes[table_class];
    return one.has_parts && !target_.is_sum() && !target_.is_by_links(one.parts[0][at(one.units)]);
  }

  // What is left of the tries: one class at random takes another way, for some of its tables, and
  // is packed in another manner. Where that has not helped for long, it begins anew.
  void search_randomly(const std::vector<Choice>& start) {
    if (options_.kinds.size() > 1 || !best_) return;
    constexpr int kLong = 3000;  // tries
    const PackingOptions start_how = best_how_;
    std::vector<Choice> choices = start;
    PackingOptions choices_how = start_how;
    double here = least_;  // since it began
    int in_vain = 0;
    std::uint64_t state = 0;
    const auto random = [&](std::size_t limit) {
      return static_cast<std::size_t>(next_random(state) % limit);
    };
    constexpr double kShares[] = {1, 0.5, 0.25, 0.125, 0.06};
    constexpr double kBudgets[] = {0, 0.0003, 0.001, 0.003};
    while (!is_done() && least_ > floor_ * (1 + kFairGap)) {
      std::vector<Choice> changed = choices;
      for (std::size_t i = random(3); i > 0; --i) change_one(changed, random);
      PackingOptions how = choices_how;
      how.seed = random(4) == 0 ? 0 : 1 + random(1 << 20);
      if (random(2) == 0) how.slack = 0.0005 * static_cast<double>(1 + random(40));
      if (random(4) == 0) how.fills_ranks = !how.fills_ranks;
      if (random(4) == 0) how.part_share = kShares[random(std::size(kShares))];
      if (random(4) == 0) how.cut_budget = kBudgets[random(std::size(kBudgets))];
      if (random(8) == 0) how.order = random(2) == 0 ? Order::kMemoryFirst : Order::kLargestFirst;
      if (!how.target.is_sum() && random(3) == 0) {
        how.memory_slack = 0.005 * static_cast<double>(random(40));
      }
      attempt(changed, how);
      if (last_ < here) {
        here = last_;
        choices = std::move(changed);
        choices_how = how;
        in_vain = 0;
      } else if (++in_vain == kLong) {
        choices = start;
        choices_how = start_how;
        here = kNoLimit;
        in_vain = 0;
      }
    }
  }

  template <class Random>
  void change_one(std::vector<Choice>& choices, const Random& random) const {
    const TableClass& one = options_.classes[random(options_.classes.size())];
    const std::size_t first = random(one.tables.size());
    const Choice now = choices[at(one.tables[first])];
    std::vector<Choice> others = choices_within(options_, one, floor_ * 1.02);
    if (now.way == Way::kParts && one.can_cut) {
      for (const int count : {now.count + 1, now.count + 2}) {
        if (count > one.units) break;
        Choice finer = now;
        finer.count = count;
        finer.seconds = even_parts(one.parts, one.units, count).seconds();
        others.push_back(finer);
      }
    }
    if (others.empty()) return;
    const Choice other = others[random(others.size())];
    const std::size_t most = one.tables.size() - first;
    const std::size_t count =
        random(2) == 0 ? 1 + random(most) : std::min<std::size_t>(most, 1 + random(3));
    const double dearer = (other.seconds - now.seconds) * static_cast<double>(count);
    if (dearer > 2 * kDearest * floor_ * options_.num_ranks()) return;
    for (std::size_t i = 0; i < count; ++i) choices[at(one.tables[first + i])] = other;
  }

  const Problem& problem_;
  const Options& options_;
  const Bound& bound_;
  double enough_;
  Patience& patience_;
  Target target_;
  double floor_ = 0;
  int most_tries_ = 0;
  double least_ = kNoLimit;
  double last_ = kNoLimit;  // of the last try
  std::optional<Packing> best_;
  PackingOptions best_how_;
};

Plan plan_of(const Options& options, const Packing& packing) {
  Plan plan(options.tables.size());
  for (std::size_t t = 0; t < plan.size(); ++t) plan[t].name = options.tables[t].name;
  const auto class_of = [&](int t) -> const TableClass& {
    return options.classes[at(options.class_of[at(t)])];
  };
  const auto add_rows = [&](TablePlan& one, std::int64_t rows, int first, int count,
                            std::int64_t column, std::int64_t columns) {
    const std::int64_t height = (rows + count - 1) / count;
    for (int i = 0; i < count; ++i) {
      const std::int64_t begin = std::min(rows, i * height);
      one.shards.push_back(
          {begin, column, std::min(rows, begin + height) - begin, columns, first + i});
    }
  };
  for (const Uniform& uniform : packing.uniform) {
    const Table& table = options.tables[at(uniform.table)];
    const UniformOption& option = class_of(uniform.table).uniform[at(uniform.option)];
    TablePlan& one = plan[at(uniform.table)];
    one.cut = option.cut;
    one.kernel = option.kernel;
    if (!option.is_even) {
      std::int64_t row = 0;
      for (int r = 0; r < options.num_ranks(); ++r) {
        const std::int64_t rows = option.parts.heights[at(r)];
        one.shards.push_back({row, 0, rows, table.dim, r});
        row += rows;
      }
    } else if (option.cut == Cut::kRowWise) {
      add_rows(one, table.rows, 0, options.num_ranks(), 0, table.dim);
    } else {
      for (int r = 0; r < options.num_ranks(); ++r) {
        one.shards.push_back({0, 0, table.rows, table.dim, r});
      }
    }
  }
  std::vector<HostPart> hosts = packing.host_parts;
  std::sort(hosts.begin(), hosts.end(), [](const HostPart& a, const HostPart& b) {
    return a.table != b.table ? a.table < b.table : a.host < b.host;
  });
  for (const HostPart& part : hosts) {
    const Table& table = options.tables[at(part.table)];
    const TableClass& type = class_of(part.table);
    TablePlan& one = plan[at(part.table)];
    const std::int64_t column =
        one.shards.empty() ? 0 : one.shards.back().column + one.shards.back().columns;
    one.cut = part.units == type.units ? type.whole_host_cut : Cut::kGrid;
    add_rows(one, table.rows, part.host * options.ranks_per_host, options.ranks_per_host, column,
             part.units * type.unit);
  }
  std::vector<Part> parts = packing.parts;
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return a.table != b.table ? a.table < b.table : a.rank < b.rank;
  });
  for (const Part& part : parts) {
    if (part.units == 0) continue;
    const Table& table = options.tables[at(part.table)];
    const TableClass& type = class_of(part.table);
    TablePlan& one = plan[at(part.table)];
    const std::int64_t column =
        one.shards.empty() ? 0 : one.shards.back().column + one.shards.back().columns;
    one.cut = part.units == type.units ? type.whole_cut : type.cut;
    one.shards.push_back({0, column, table.rows, part.units * type.unit, part.rank});
  }
  return plan;
}

// Every way of a class with its price; one part fits or not, whatever the ranks already hold.
std::vector<Reason> reasons_of(const Options& options, const Bound& bound, const Plan& plan,
                               double seconds) {
  double second = 0;
  double byte = 0;
  for (const Price& price : bound.certificate.prices) {
    second = std::max(second, price.second);
    byte = std::max(byte, price.byte);
  }
  struct Way {
    Cut cut;
    Kernel kernel;
    double price;
  };
  std::vector<std::vector<Way>> ways(options.classes.size());
  const double capacity = options.kinds[0].capacity;
  for (std::size_t c = 0; c < ways.size(); ++c) {
    const TableClass& one = options.classes[c];
    const auto price = [&](const Load& load) {
      return second * load.seconds() + byte * load.bytes;
    };
    const auto cut_ways = [&](const PartLoads& loads, const RowParts* rows, int limit, Cut whole,
                              Cut cut) {
      bool has_cut = false;
      for (int count = 1; count <= std::min(limit, one.units) && !has_cut; ++count) {
        const Load& widest = loads[0][at((one.units + count - 1) / count)];
        if (widest.seconds() > seconds || widest.bytes > capacity) continue;
        const double cost = price(rows == nullptr ? even_parts(loads, one.units, count)
                                                  : even_parts(*rows, one.units, count));
        ways[c].push_back({count == 1 ? whole : cut, Kernel::kFused, cost});
        has_cut = count > 1;
      }
    };
    if (one.has_parts) {
      cut_ways(one.parts, nullptr, one.can_cut ? one.num_ranks_allowed : 1, one.whole_cut, one.cut);
    }
    if (one.has_hosts) {
      cut_ways(one.host_parts.full, &one.host_parts,
               one.can_cut_hosts ? static_cast<int>(one.hosts.size()) : 1, one.whole_host_cut,
               Cut::kGrid);
    }
    for (const UniformOption& option : one.uniform) {
      const Load& load = option.parts.full[0][1];
      if (load.seconds() > seconds || load.bytes > capacity) continue;
      ways[c].push_back({option.cut, option.kernel, price(even_parts(option.parts, 1, 1))});
    }
  }
  std::vector<Reason> reasons(plan.size());
  for (std::size_t t = 0; t < plan.size(); ++t) {
    const auto& all = ways[at(options.class_of[t])];
    double own = kNoLimit;
    for (const Way& way : all) {
      if (way.cut == plan[t].cut && way.kernel == plan[t].kernel) own = std::min(own, way.price);
    }
    const Way* best = nullptr;
    for (const Way& way : all) {
      if (way.cut == plan[t].cut && way.kernel == plan[t].kernel) continue;
      if (best == nullptr || way.price < best->price) best = &way;
    }
    if (best == nullptr || own == kNoLimit || own <= 0) continue;
    reasons[t] = {best->cut, best->kernel, true, best->price / own - 1};
  }
  return reasons;
}

// With tables that lie with another one: whole, on its rank. `places`: which of the tables each is,
// or lies with.
Plan with_company(const Options& options, const Plan& plan, std::vector<std::size_t>& places) {
  std::map<std::string, std::pair<TablePlan, std::size_t>> all;
  for (std::size_t t = 0; t < options.tables.size(); ++t) {
    all[plan[t].name] = {plan[t], t};
    for (const Table& table : options.company[t]) {
      const Shard whole{0, 0, table.rows, table.dim, plan[t].shards[0].rank};
      all[table.name] = {{table.name, Cut::kTableWise, Kernel::kFused, {whole}}, t};
    }
  }
  Plan found;
  for (auto& [name, one] : all) {
    found.push_back(std::move(one.first));
    places.push_back(one.second);
  }
  return found;
}

// A gap that is `enough` is not made smaller: with `sum` by proofs, which come after the search,
// with `phases` by the search.
PlanResult plan_once(const Problem& problem, Patience& patience, double enough = 0) {
  const Options options = enumerate(problem);
  Bound bound = lower_bound(options);
  if (problem.objective == Objective::kPhases) sharpen_for_phases(options, bound);
  const bool is_sum = problem.objective == Objective::kSum;
  Search search(problem, options, bound, is_sum ? kGoodGap : std::max(kGoodGap, enough - 1e-6),
                patience);
  std::optional<Packing> packing = search.run();
  const double found = packing ? packing->seconds(is_sum) : kNoLimit;
  if (!(found <= bound.certificate.seconds * (1 + kGoodGap)) && !patience.is_over()) {
    if (std::optional<Packing> better = search_exhaustively(options, is_sum, found)) {
      packing = std::move(better);
    }
  }
  if (!packing && patience.was_lost()) {
    throw PlanError(PlanErrorKind::kLate, "plan: no plan was found in the time that was given",
                    std::to_string(search.tries) + " were tried, and none of them fits",
                    "more time, or more memory");
  }
  if (!packing) throw_not_packed(options);
  PlanResult result;
  const Plan own = plan_of(options, *packing);
  std::vector<std::size_t> places;
  result.plan = with_company(options, own, places);
  result.per_rank = cost_of(problem, result.plan);
  for (int r = 0; r < options.num_ranks(); ++r) result.capacities.push_back(options.capacity(r));
  result.seconds = step_seconds(problem, result.per_rank);
  const std::vector<Reason> reasons = reasons_of(options, bound, own, result.seconds);
  for (const std::size_t place : places) result.reasons.push_back(reasons[place]);
  if (problem.tries >= kTriesForPays &&
      result.seconds > bound.certificate.seconds * (1 + kFairGap)) {
    sharpen_by_pays(options, bound, result.seconds, kStepsForPays * problem.tries, enough,
                    patience);
  }
  result.certificate = std::move(bound.certificate);
  result.tries = search.tries;
  result.is_cut_short = patience.was_lost();
  return result;
}

// Once more with more tries where the usual ones came close to what is asked.
PlanResult plan_to_the_end(const Problem& problem, Patience& patience) {
  PlanResult result = plan_once(problem, patience);
  if (problem.tries < kTriesForPays || problem.num_ranks() < kManyRanks ||
      static_cast<int>(problem.tables.size()) < problem.num_ranks()) {
    return result;
  }
  const bool is_sum = problem.objective == Objective::kSum;
  for (const Goal& goal : is_sum ? std::span<const Goal>(kGoals) : kPhasesGoals) {
    const int most = goal.times * kTriesForPays;
    if (result.gap() <= goal.asked || result.gap() > goal.near || problem.tries >= most) continue;
    Problem more = problem;
    more.tries = std::min(problem.tries * goal.times, most);
    result.is_cut_short = patience.is_over();
    if (result.is_cut_short) break;
    try {
      PlanResult other = plan_once(more, patience, goal.asked);
      if (other.gap() < result.gap()) return other;
    } catch (const PlanError& error) {
      if (error.kind() != PlanErrorKind::kLate) throw;
    }
    result.is_cut_short = patience.was_lost();
    break;
  }
  return result;
}

bool is_possible(Problem problem) {
  problem.tries = std::min(problem.tries, 8);
  try {
    const std::function<bool()> never;
    Patience patience(never);
    plan_once(problem, patience);
  } catch (const PlanError&) {
    return false;
  }
  return true;
}

// Changes that were computed to help, smallest first.
std::string advice_for(const Problem& problem) {
  std::vector<std::string> words;
  bool is_one_kind = true;
  for (const Rank& rank : problem.ranks) is_one_kind = is_one_kind && rank == problem.ranks[0];
  bool names_ranks = false;
  for (const auto& [name, rules] : problem.rules) names_ranks = names_ranks || !rules.ranks.empty();
  if (is_one_kind && !names_ranks) {
    const int hosts = problem.num_hosts();
    const auto with_hosts = [&](int count) {
      Problem other = problem;
      other.ranks.assign(static_cast<std::size_t>(count) * problem.ranks_per_host,
                         problem.ranks[0]);
      return is_possible(std::move(other));
    };
    int high = hosts;
    bool is_found = false;
    for (int factor = 0; factor < 7 && !is_found; ++factor) {
      high *= 2;
      if (high * problem.ranks_per_host > 4096) break;
      is_found = with_hosts(high);
    }
    if (is_found) {
      int low = hosts;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (with_hosts(middle) ? high : low) = middle;
      }
      words.push_back(std::to_string(high * problem.ranks_per_host) + " ranks");
    }
    // The least memory of a rank, to three digits.
    double enough = problem.ranks[0].memory;
    Problem other = problem;
    const auto with_memory = [&](double bytes) {
      for (Rank& rank : other.ranks) rank.memory = bytes;
      return is_possible(other);
    };
    bool has_memory = false;
    for (int i = 0; i < 12 && !has_memory && enough > 0; ++i) {
      enough *= 2;
      has_memory = with_memory(enough);
    }
    if (has_memory) {
      double low = enough / 2;
      while (enough - low > 0.005 * enough) {
        const double middle = (low + enough) / 2;
        (with_memory(middle) ? enough : low) = middle;
      }
      // Rounded up, and tried as it is written.
      double unit = 1;
      while (unit * 1000 < enough) unit *= 10;
      const double rounded = std::ceil(enough / unit) * unit;
      if (with_memory(rounded)) words.push_back(bytes_text(rounded) + " a rank");
    }
  }
  {
    Problem other = problem;
    bool is_other = false;
    for (Table& table : other.tables) {
      is_other = is_other || table.element_bytes > 2;
      table.element_bytes = std::min(table.element_bytes, 2.0);
    }
    if (is_other && is_possible(std::move(other))) words.push_back("rows of 2 bytes a number");
  }
  if (problem.reserved_percent > 0) {
    Problem other = problem;
    other.reserved_percent = 0;
    if (is_possible(other)) {
      double low = 0;
      double high = problem.reserved_percent;
      while (high - low > 0.5) {
        other.reserved_percent = (low + high) / 2;
        (is_possible(other) ? low : high) = other.reserved_percent;
      }
      words.push_back("a reservation of " + std::to_string(static_cast<int>(low)) + " %");
    }
  }
  if (!problem.rules.empty() || !problem.apart.empty() || !problem.together.empty()) {
    Problem other = problem;
    other.rules.clear();
    other.apart.clear();
    other.together.clear();
    if (is_possible(std::move(other))) words.push_back("no rules");
  }
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", or ") + word;
  return text.empty() ? "fewer or smaller tables: no larger world, memory or narrower rows helped"
                      : text;
}

[[noreturn]] void refuse(const std::string& what, const std::string& why = {}) {
  throw PlanError(PlanErrorKind::kBadEvidence, "plan: " + what, why);
}

// Whether shards, which cover the table once, lie as its cut has them: parts of columns on any
// ranks, rows on all ranks or on those of a host, in order. Other shards would not cost what is
// said.
bool lies_as(const TablePlan& one, const Problem& problem) {
  // Of columns: rows, and their ranks.
  std::map<std::int64_t, std::vector<std::pair<std::int64_t, int>>> strips;
  for (const Shard& shard : one.shards) strips[shard.column].emplace_back(shard.row, shard.rank);
  bool is_columns = true;
  std::set<int> hosts;
  const auto all_have = [&](int count) {
    for (const auto& [column, ranks] : strips) {
      if (static_cast<int>(ranks.size()) != count || ranks[0].second % count != 0) return false;
      for (int i = 0; i < count; ++i) {
        if (ranks[at(i)].second != ranks[0].second + i) return false;
      }
    }
    return true;
  };
  for (auto& [column, ranks] : strips) {
    std::sort(ranks.begin(), ranks.end());
    is_columns = is_columns && ranks.size() == 1;
    for (const auto& [row, rank] : ranks) hosts.insert(rank / problem.ranks_per_host);
  }
  switch (one.cut) {
    case Cut::kTableWise:
      return one.shards.size() == 1;
    case Cut::kColumnWise:
      return is_columns;
    case Cut::kTableColumnWise:
      return is_columns && hosts.size() == 1;
    case Cut::kTableRowWise:
      return all_have(problem.ranks_per_host) && strips.size() == 1;
    case Cut::kGrid:
      return all_have(problem.ranks_per_host);
    case Cut::kRowWise:
    case Cut::kDataParallel:
      return all_have(problem.num_ranks()) && strips.size() == 1;
  }
  return false;
}

// Tables that are to lie apart do, and those that are to lie together do.
void check_meetings(const Problem& problem, const Plan& plan) {
  std::map<std::string, std::set<int>> ranks_of;
  for (const TablePlan& one : plan) {
    for (const Shard& shard : one.shards) {
      if (shard.rows > 0) ranks_of[one.name].insert(shard.rank);
    }
  }
  for (const std::vector<std::string>& list : problem.apart) {
    std::map<int, std::string> seen;
    for (const std::string& name : list) {
      for (const int rank : ranks_of[name]) {
        const auto [other, is_new] = seen.emplace(rank, name);
        if (!is_new) {
          refuse("tables '" + other->second + "' and '" + name + "' meet on rank " +
                 std::to_string(rank) + ", and are to lie apart");
        }
      }
    }
  }
  for (const std::vector<std::string>& list : problem.together) {
    for (const std::string& name : list) {
      if (ranks_of[name].size() != 1 || ranks_of[name] != ranks_of[list[0]]) {
        refuse("tables '" + list[0] + "' and '" + name + "' are to lie whole on one rank");
      }
    }
  }
}

}  // namespace

PlanResult plan(const Problem& problem, const std::function<bool()>& is_late) {
  Patience patience(is_late);
  try {
    return plan_to_the_end(problem, patience);
  } catch (const PlanError& error) {
    if (error.kind() != PlanErrorKind::kTooLarge || patience.is_over()) throw;
    throw PlanError(error.kind(), error.problem(), error.why(), advice_for(problem));
  }
}

void check_plan(const Problem& problem, const Plan& plan) {
  check(problem);
  std::map<std::string, const Table*> tables;
  for (const Table& table : problem.tables) tables[table.name] = &table;
  for (const TablePlan& one : plan) {
    const auto found = tables.find(one.name);
    if (found == tables.end()) refuse("table '" + one.name + "' is not there, or is twice in it");
    const Table& table = *found->second;
    tables.erase(found);
    const std::string who = "table '" + one.name + "'";
    const auto rules = problem.rules.find(one.name);
    double covered = 0;
    std::vector<int> seen;
    for (const Shard& shard : one.shards) {
      const bool is_inside = shard.row >= 0 && shard.rows >= 0 && shard.column >= 0 &&
                             shard.columns > 0 && shard.row + shard.rows <= table.rows &&
                             shard.column + shard.columns <= table.dim && shard.rank >= 0 &&
                             shard.rank < problem.num_ranks();
      if (!is_inside) refuse(who + " has a shard that lies outside it, or on no rank");
      covered += static_cast<double>(shard.rows) * static_cast<double>(shard.columns);
      for (const Shard& other : one.shards) {
        if (&other == &shard) break;
        const bool meets = shard.row < other.row + other.rows &&
                           other.row < shard.row + shard.rows &&
                           shard.column < other.column + other.columns &&
                           other.column < shard.column + shard.columns;
        const bool is_replica = one.cut == Cut::kDataParallel && other.rank != shard.rank;
        if (meets && !is_replica) refuse(who + " has shards that overlap");
      }
      if (rules != problem.rules.end() && !rules->second.ranks.empty() &&
          std::find(rules->second.ranks.begin(), rules->second.ranks.end(), shard.rank) ==
              rules->second.ranks.end()) {
        refuse(who + " lies on rank " + std::to_string(shard.rank) + ", which its rules exclude");
      }
    }
    const double whole = static_cast<double>(table.rows) * static_cast<double>(table.dim) *
                         (one.cut == Cut::kDataParallel ? problem.num_ranks() : 1);
    if (covered != whole) refuse(who + " is not covered by its shards");
    if (!lies_as(one, problem)) {
      refuse(who + " has shards that do not lie as " + std::string(name_of(one.cut)) + " has them");
    }
    const std::int64_t unit =
        unit_of(table.dim, rules == problem.rules.end() ? 0 : rules->second.min_columns);
    for (const Shard& shard : one.shards) {
      if (shard.columns % unit == 0) continue;
      refuse(who + " has a part of " + std::to_string(shard.columns) +
             " columns, and parts are multiples of " + std::to_string(unit));
    }
    if (one.kernel == Kernel::kDense && one.cut != Cut::kDataParallel) {
      refuse(who + " is " + std::string(name_of(one.cut)) +
             " with a dense kernel, which only data_parallel has");
    }
    if (rules != problem.rules.end()) {
      const auto& cuts = rules->second.cuts;
      const auto& kernels = rules->second.kernels;
      if (!cuts.empty() && std::find(cuts.begin(), cuts.end(), one.cut) == cuts.end()) {
        refuse(who + " is " + std::string(name_of(one.cut)) + ", which its rules exclude");
      }
      if (!kernels.empty() &&
          std::find(kernels.begin(), kernels.end(), one.kernel) == kernels.end()) {
        refuse(who + " has a kernel that its rules exclude");
      }
    }
  }
  if (!tables.empty()) refuse("table '" + tables.begin()->first + "' is missing");
  check_meetings(problem, plan);
  const CostModel model(problem);
  const std::vector<ShardCost> costs = cost_of(problem, plan);
  for (int r = 0; r < problem.num_ranks(); ++r) {
    const double bytes = costs[at(r)].bytes.total();
    if (bytes > 0 && bytes > model.capacity(r) * (1 + 1e-9)) {
      refuse("rank " + std::to_string(r) + " would hold " + bytes_text(bytes) + ", and has " +
             bytes_text(model.capacity(r)) + " for tables");
    }
  }
}

}  // namespace tessera::planner
