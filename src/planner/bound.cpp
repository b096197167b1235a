#include "tessera/planner/bound.h"

#include <algorithm>
#include <cmath>

#include "planner/advice.h"
#include "planner/knapsack_bound.h"
#include "planner/phases_bound.h"
#include "tessera/planner/plan_error.h"

namespace tessera::planner {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Rounding of the sums must not make the bound false.
constexpr double kMargin = 1e-9;

// Sum that keeps what rounding drops.
class ExactSum {
 public:
  void add(double value) {
    const double next = sum_ + value;
    lost_ += std::abs(sum_) >= std::abs(value) ? (sum_ - next) + value : (value - next) + sum_;
    sum_ = next;
  }
  double value() const { return sum_ + lost_; }

 private:
  double sum_ = 0;
  double lost_ = 0;
};

bool fits(const Load& load, double seconds, double capacity) {
  return load.seconds() <= seconds && load.bytes <= capacity;
}

// --- Ranks of one kind: the cheapest option is found by counting parts. ---

// The least number of parts, at most `limit`, whose widest fits; 0 if none.
int least_parts(const std::vector<Load>& loads, int units, int limit, double seconds,
                double capacity) {
  limit = std::min(limit, units);
  // A whole table may fit where no part does: parts of exact norms sum gradients first.
  if (fits(loads[static_cast<std::size_t>(units)], seconds, capacity)) return 1;
  if (!fits(loads[static_cast<std::size_t>((units + limit - 1) / limit)], seconds, capacity)) {
    return 0;
  }
  int low = 0;
  int high = limit;  // enough
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const int widest = (units + middle - 1) / middle;
    (fits(loads[static_cast<std::size_t>(widest)], seconds, capacity) ? high : low) = middle;
  }
  return high;
}

int parts_limit(const Options& options, const TableClass& one) {
  if (!one.can_cut) return 1;
  return one.in_one_host ? std::min(options.ranks_per_host, one.num_ranks_allowed)
                         : one.num_ranks_allowed;
}

Choice choice_of(Way way, int count, int uniform, const Load& total) {
  return {way, count, uniform, total.seconds(), total.bytes};
}

// All options of a class that a plan of `seconds` may use, each with as few parts as that allows:
// more parts cost more seconds and more bytes.
void options_within(const Options& options, const TableClass& one, double seconds,
                    std::vector<Choice>& found) {
  const double capacity = options.kinds[0].capacity;
  found.clear();
  if (one.has_parts) {
    const int count =
        least_parts(one.parts[0], one.units, parts_limit(options, one), seconds, capacity);
    if (count > 0) {
      found.push_back(choice_of(Way::kParts, count, 0, even_parts(one.parts, one.units, count)));
    }
  }
  if (one.has_hosts) {
    const int limit = one.can_cut_hosts ? static_cast<int>(one.hosts.size()) : 1;
    const int count = least_parts(one.host_parts.full[0], one.units, limit, seconds, capacity);
    if (count > 0) {
      found.push_back(
          choice_of(Way::kHosts, count, 0, even_parts(one.host_parts, one.units, count)));
    }
  }
  for (std::size_t i = 0; i < one.uniform.size(); ++i) {
    const RowParts& rows = one.uniform[i].parts;
    if (!fits(rows.full[0][1], seconds, capacity)) continue;
    found.push_back(choice_of(Way::kUniform, 1, static_cast<int>(i), even_parts(rows, 1, 1)));
  }
}

// The prices that make the cheapest options dearest, and that sum.
class PriceSearch {
 public:
  explicit PriceSearch(const Options& options) : options_(options) {
    world_ = options.num_ranks();
    memory_ = options.kinds[0].capacity * world_;
  }

  struct Point {
    double byte = 0;     // price, in seconds
    double seconds = 0;  // of all ranks: the dual value
    double excess = 0;   // bytes asked less bytes there
    std::vector<int> chosen;
  };
  struct Result {
    bool is_empty = false;  // a class has no option
    double value = 0;       // seconds of one rank
    double byte = 0;
    std::vector<Choice> fast;
    std::vector<Choice> lean;
  };

  Result at(double seconds) {
    Result result;
    candidates_.resize(options_.classes.size());
    for (std::size_t c = 0; c < options_.classes.size(); ++c) {
      options_within(options_, options_.classes[c], seconds, candidates_[c]);
      if (candidates_[c].empty()) {
        result.is_empty = true;
        result.value = kInfinity;
        return result;
      }
    }
    Point left = evaluate(0);
    Point right = left;
    if (left.excess > 0) {
      // Lines of either side of the top meet above it; so it is found in few steps.
      right = steepest();
      for (int step = 0; step < 100; ++step) {
        const double slope_left = left.excess;
        const double slope_right = right.excess;
        if (slope_left - slope_right <= 0) break;
        const double byte =
            ((right.seconds - slope_right * right.byte) - (left.seconds - slope_left * left.byte)) /
            (slope_left - slope_right);
        if (!(byte > left.byte && byte < right.byte)) break;
        Point middle = evaluate(byte);
        const double meeting = left.seconds + slope_left * (byte - left.byte);
        const bool is_top = middle.seconds >= meeting * (1 - 1e-14);
        if (is_top) {
          left.byte = right.byte = byte;
          left.seconds = right.seconds = middle.seconds;
          break;
        }
        (middle.excess > 0 ? left : right) = std::move(middle);
      }
    }
    const Point& best = left.seconds >= right.seconds ? left : right;
    result.value = best.seconds / world_;
    result.byte = best.byte / world_;
    for (std::size_t c = 0; c < candidates_.size(); ++c) {
      result.fast.push_back(candidates_[c][static_cast<std::size_t>(left.chosen[c])]);
      result.lean.push_back(candidates_[c][static_cast<std::size_t>(right.chosen[c])]);
    }
    return result;
  }

 private:
  Point evaluate(double byte) const {
    Point point;
    point.byte = byte;
    ExactSum cost;
    ExactSum bytes;
    for (std::size_t c = 0; c < candidates_.size(); ++c) {
      const auto& found = candidates_[c];
      std::size_t best = 0;
      for (std::size_t i = 1; i < found.size(); ++i) {
        const double price = found[i].seconds + byte * found[i].bytes;
        const double least = found[best].seconds + byte * found[best].bytes;
        if (price < least || (price == least && found[i].bytes < found[best].bytes)) best = i;
      }
      const auto count = static_cast<double>(options_.classes[c].tables.size());
      cost.add(count * (found[best].seconds + byte * found[best].bytes));
      bytes.add(count * found[best].bytes);
      point.chosen.push_back(static_cast<int>(best));
    }
    point.excess = memory_ == kInfinity ? -1 : bytes.value() - memory_;
    if (byte > 0) cost.add(-byte * memory_);
    point.seconds = cost.value();
    return point;
  }

  // A price so high that every class takes its leanest option.
  Point steepest() const {
    double byte = 1e-15;
    Point point = evaluate(byte);
    for (int i = 0; i < 100 && point.excess > 0; ++i) {
      byte *= 4;
      point = evaluate(byte);
    }
    return point;
  }

  const Options& options_;
  double world_ = 1;
  double memory_ = 0;
  std::vector<std::vector<Choice>> candidates_;
};

// Least seconds under which every class still has an option; names the table that needs most.
double least_seconds(const Options& options, std::string& table) {
  double needed = 0;
  for (const TableClass& one : options.classes) {
    double best = kInfinity;
    const auto consider = [&](const PartLoads& loads, int units) {
      for (std::size_t kind = 0; kind < options.kinds.size(); ++kind) {
        const Load& load = loads[kind][static_cast<std::size_t>(units)];
        if (load.bytes <= options.kinds[kind].capacity) best = std::min(best, load.seconds());
      }
    };
    const auto narrowest = [&](int limit) {
      limit = std::min(limit, one.units);
      return (one.units + limit - 1) / limit;
    };
    if (one.has_parts) {
      consider(one.parts, one.units);
      consider(one.parts, narrowest(parts_limit(options, one)));
    }
    if (one.has_hosts) {
      consider(one.host_parts.full, one.units);
      consider(one.host_parts.full,
               narrowest(one.can_cut_hosts ? static_cast<int>(one.hosts.size()) : 1));
    }
    for (const UniformOption& option : one.uniform) consider(option.parts.full, 1);
    const std::string& name = options.tables[static_cast<std::size_t>(one.tables[0])].name;
    if (best == kInfinity) throw_fits_nowhere(options, one);
    if (best > needed) {
      needed = best;
      table = name;
    }
  }
  return needed;
}

// Fewest bytes that all tables need together, and what there is.
void check_total(const Options& options) {
  double memory = 0;
  for (const RankKind& kind : options.kinds) {
    memory += std::max(0.0, kind.capacity) * static_cast<double>(kind.ranks.size());
  }
  if (memory == kInfinity) return;
  double needed = 0;
  for (const TableClass& one : options.classes) {
    double best = kInfinity;
    if (one.has_parts) best = std::min(best, even_parts(one.parts, one.units, 1).bytes);
    if (one.has_hosts) best = std::min(best, even_parts(one.host_parts, one.units, 1).bytes);
    for (const UniformOption& option : one.uniform) {
      best = std::min(best, even_parts(option.parts, 1, 1).bytes);
    }
    needed += best * static_cast<double>(one.tables.size());
  }
  if (needed > memory) throw_all_too_large(options, needed, memory);
}

Bound bound_of_equal_ranks(const Options& options) {
  Bound bound;
  PriceSearch search(options);
  const double needed = least_seconds(options, bound.certificate.table);
  PriceSearch::Result result = search.at(kInfinity);
  double low = result.value;
  if (needed > low) low = needed;
  // Everything under `low` is refuted. Options that do not fit into it raise the sum.
  PriceSearch::Result at_low = search.at(low);
  if (at_low.value > low) {
    double high = at_low.value;
    bound.certificate.table.clear();
    result = std::move(at_low);
    for (int step = 0; step < 60 && high - low > 1e-8 * high; ++step) {
      const double middle = low + (high - low) / 2;
      PriceSearch::Result there = search.at(middle);
      if (there.value > middle) {
        low = middle;
        result = std::move(there);
      } else {
        high = middle;
      }
    }
  } else if (needed > result.value) {
    result = std::move(at_low);  // choices that fit; the table is the proof
  } else {
    bound.certificate.table.clear();
  }
  bound.certificate.seconds = low * (1 - kMargin);
  bound.certificate.prices = {
      {options.num_ranks(), options.kinds[0].capacity, 1.0 / options.num_ranks(), result.byte}};
  bound.fast = std::move(result.fast);
  bound.lean = std::move(result.lean);
  return bound;
}

// --- Ranks that differ: prices by kind, by a search that may stop anywhere. ---

double total_memory_price(const std::vector<Price>& prices) {
  ExactSum sum;
  for (const Price& price : prices) {
    if (price.byte > 0) sum.add(price.byte * price.num_ranks * price.capacity);
  }
  return sum.value();
}

double value_at(const Options& options, double seconds, const std::vector<Price>& prices) {
  ExactSum sum;
  for (const TableClass& one : options.classes) {
    const double price = cheapest(options, one, seconds, prices);
    if (price == kInfinity) return kInfinity;
    sum.add(price * static_cast<double>(one.tables.size()));
  }
  sum.add(-total_memory_price(prices));
  return sum.value();
}

// Scales the prices of seconds so that they add up to 1 over all ranks.
void normalise(std::vector<Price>& prices) {
  double sum = 0;
  for (const Price& price : prices) sum += price.second * price.num_ranks;
  for (Price& price : prices) price.second /= sum;
}

// One price at a time, up or down by a factor that shrinks.
std::vector<Price> improved(const Options& options, double seconds, std::vector<Price> prices) {
  double value = value_at(options, seconds, prices);
  if (value == kInfinity) return prices;
  const double sum_seconds = std::abs(value);
  const auto try_prices = [&](std::vector<Price> others) {
    normalise(others);
    const double next = value_at(options, seconds, others);
    if (!(next > value * (1 + 1e-9))) return false;
    value = next;
    prices = std::move(others);
    return true;
  };
  for (double factor = 2; factor > 1.0005; factor = 1 + (factor - 1) / 1.6) {
    bool is_better = true;
    for (int round = 0; round < 20 && is_better; ++round) {
      is_better = false;
      for (std::size_t g = 0; g < prices.size(); ++g) {
        if (!(prices[g].capacity > 0)) continue;
        for (const double by : {factor, 1 / factor}) {
          std::vector<Price> others = prices;
          others[g].second *= by;
          if (try_prices(std::move(others))) is_better = true;
          if (prices[g].capacity == kInfinity) continue;
          const double all = prices[g].capacity * prices[g].num_ranks;
          others = prices;
          others[g].byte =
              others[g].byte == 0 ? (factor - 1) * 0.01 * sum_seconds / all : others[g].byte * by;
          if (others[g].byte * all < 1e-6 * sum_seconds) others[g].byte = 0;
          if (try_prices(std::move(others))) is_better = true;
        }
      }
    }
  }
  return prices;
}

Bound bound_of_mixed_ranks(const Options& options) {
  Bound bound;
  double low = least_seconds(options, bound.certificate.table);
  std::vector<Price> prices;
  for (const RankKind& kind : options.kinds) {
    // A rank without memory has no tables, so its seconds are worth nothing.
    prices.push_back({static_cast<int>(kind.ranks.size()), kind.capacity,
                      kind.capacity > 0 ? kind.rank.speeds.memory : 0, 0});
  }
  normalise(prices);
  if (value_at(options, kInfinity, prices) == kInfinity) {
    for (const TableClass& one : options.classes) {
      if (cheapest(options, one, kInfinity, prices) == kInfinity) throw_fits_nowhere(options, one);
    }
  }
  // Prices for options of any width, then for those that fit into what the first prices prove. Any
  // prices are a proof; better ones are a better one.
  for (const bool is_first : {true, false}) {
    const double seconds = is_first ? kInfinity : low * (1 + 1e-6);
    std::vector<Price> better = improved(options, seconds, prices);
    double top = value_at(options, low, better);
    if (top == kInfinity) {
      // Some class has no option yet; it has one below this.
      top = std::max(low, 1e-12);
      for (int i = 0; i < 400 && value_at(options, top, better) == kInfinity; ++i) top *= 1.1;
      top = std::max(top, value_at(options, top, better));
    }
    double high = std::max(low, top);
    for (int step = 0; step < 60 && high - low > 1e-8 * high; ++step) {
      const double middle = low + (high - low) / 2;
      if (value_at(options, middle, better) > middle) {
        low = middle;
        prices = better;
        bound.certificate.table.clear();  // the prices refute more than that table does
      } else {
        high = middle;
      }
    }
    if (is_first) prices = better;
  }
  bound.certificate.seconds = low * (1 - kMargin);
  bound.certificate.prices = prices;
  // Choices of the search: as if all ranks were the mean of the kinds.
  for (const TableClass& one : options.classes) {
    Choice best;
    double least = kInfinity;
    const auto consider = [&](Way way, int count, int uniform, const Load& load) {
      double second = 0;
      double byte = 0;
      for (const Price& price : prices) {
        second = std::max(second, price.second);
        byte = std::max(byte, price.byte);
      }
      const double cost = second * load.seconds() + byte * load.bytes;
      if (cost >= least) return;
      least = cost;
      best = choice_of(way, count, uniform, load);
    };
    if (one.has_parts) {
      int count = 1;
      const int limit = std::min(parts_limit(options, one), one.units);
      const auto is_enough = [&](int parts) {
        const auto widest = static_cast<std::size_t>((one.units + parts - 1) / parts);
        for (std::size_t g = 0; g < options.kinds.size(); ++g) {
          if (fits(one.parts[g][widest], low * 1.0001, options.kinds[g].capacity)) return true;
        }
        return false;
      };
      while (count < limit && !is_enough(count)) ++count;
      if (is_enough(count))
        consider(Way::kParts, count, 0, even_parts(one.parts, one.units, count));
    }
    const auto fits_everywhere = [&](const RowParts& rows, int units) {
      for (std::size_t g = 0; g < options.kinds.size(); ++g) {
        if (rows.full[g][static_cast<std::size_t>(units)].bytes > options.kinds[g].capacity) {
          return false;
        }
      }
      return true;
    };
    if (one.has_hosts && (!one.has_parts || fits_everywhere(one.host_parts, one.units))) {
      consider(Way::kHosts, 1, 0, even_parts(one.host_parts, one.units, 1));
    }
    for (std::size_t i = 0; i < one.uniform.size(); ++i) {
      if (fits_everywhere(one.uniform[i].parts, 1)) {
        consider(Way::kUniform, 1, static_cast<int>(i), even_parts(one.uniform[i].parts, 1, 1));
      }
    }
    bound.fast.push_back(best);
  }
  bound.lean = bound.fast;
  return bound;
}

// Cheapest place of one shard among the kinds that it fits.
double cheapest_place(const Options& options, const PartLoads& loads, int units, double seconds,
                      const std::vector<Price>& prices) {
  double best = kInfinity;
  for (std::size_t g = 0; g < options.kinds.size(); ++g) {
    const Load& load = loads[g][static_cast<std::size_t>(units)];
    if (!fits(load, seconds, options.kinds[g].capacity)) continue;
    best = std::min(best, prices[g].second * load.seconds() + prices[g].byte * load.bytes);
  }
  return best;
}

// Cheapest way to fill `units` with parts of the given prices, whatever their number.
template <class PriceOf>
double cheapest_cuts(int units, bool can_cut, PriceOf price_of) {
  if (!can_cut) return price_of(units);
  std::vector<double> prices;
  std::vector<double> best{0};
  for (int u = 1; u <= units; ++u) {
    prices.push_back(price_of(u));
    double least = kInfinity;
    for (int part = 1; part <= u; ++part) {
      least = std::min(least, best[static_cast<std::size_t>(u - part)] +
                                  prices[static_cast<std::size_t>(part) - 1]);
    }
    best.push_back(least);
  }
  return best.back();
}

}  // namespace

std::vector<Choice> choices_within(const Options& options, const TableClass& one, double seconds) {
  std::vector<Choice> found;
  options_within(options, one, seconds, found);
  return found;
}

double cheapest(const Options& options, const TableClass& one, double seconds,
                const std::vector<Price>& prices) {
  double best = kInfinity;
  const auto price_on = [&](const PartLoads& loads, int units, int kind) {
    const auto g = static_cast<std::size_t>(kind);
    const Load& load = loads[g][static_cast<std::size_t>(units)];
    if (!fits(load, seconds, options.kinds[g].capacity)) return kInfinity;
    return prices[g].second * load.seconds() + prices[g].byte * load.bytes;
  };
  // On all ranks of the host where that is cheapest.
  const auto row_price = [&](const RowParts& rows, int units) {
    double least = kInfinity;
    for (const std::vector<int>& kinds : options.host_kinds) {
      double price = 0;
      for (std::size_t i = 0; i < kinds.size(); ++i) {
        const PartLoads* loads = rows.on(static_cast<int>(i));
        if (loads != nullptr) price += price_on(*loads, units, kinds[i]);
      }
      least = std::min(least, price);
    }
    return least;
  };
  // There are at most so many parts, so one is at least so wide.
  const auto widest = [&](int limit) {
    limit = std::min(limit, one.units);
    return (one.units + limit - 1) / limit;
  };
  const auto part_price = [&](int units) {
    return cheapest_place(options, one.parts, units, seconds, prices);
  };
  if (one.has_parts && part_price(widest(parts_limit(options, one))) != kInfinity) {
    best = cheapest_cuts(one.units, one.can_cut, part_price);
  }
  if (one.has_parts) best = std::min(best, part_price(one.units));
  const int hosts_limit = one.can_cut_hosts ? static_cast<int>(one.hosts.size()) : 1;
  if (one.has_hosts && row_price(one.host_parts, widest(hosts_limit)) != kInfinity) {
    best = std::min(best, cheapest_cuts(one.units, one.can_cut_hosts, [&](int units) {
                      return row_price(one.host_parts, units);
                    }));
  }
  if (one.has_hosts) best = std::min(best, row_price(one.host_parts, one.units));
  for (const UniformOption& option : one.uniform) {
    // Every rank has its own shard.
    double price = 0;
    for (int r = 0; r < options.num_ranks(); ++r) {
      const PartLoads* loads = option.parts.on(r);
      if (loads == nullptr) continue;
      price += price_on(*loads, 1, options.kind_of[static_cast<std::size_t>(r)]);
    }
    best = std::min(best, price);
  }
  return best;
}

Bound lower_bound(const Options& options) {
  std::string table;
  least_seconds(options, table);  // throws where one table fits nowhere
  check_total(options);
  return options.kinds.size() == 1 ? bound_of_equal_ranks(options) : bound_of_mixed_ranks(options);
}

bool holds(const Certificate& certificate, const Problem& problem) {
  const Options options = enumerate(problem);
  const std::vector<Price>& prices = certificate.prices;
  if (!(certificate.seconds >= 0) || prices.size() != options.kinds.size()) return false;
  double seconds = 0;
  for (std::size_t g = 0; g < prices.size(); ++g) {
    const bool is_right = prices[g].num_ranks == static_cast<int>(options.kinds[g].ranks.size()) &&
                          prices[g].capacity == options.kinds[g].capacity &&
                          prices[g].second >= 0 && prices[g].byte >= 0 &&
                          prices[g].second < kInfinity && prices[g].byte < kInfinity;
    if (!is_right) return false;
    seconds += prices[g].second * prices[g].num_ranks;
  }
  if (!certificate.pays.tables.empty()) {
    return certificate.table.empty() && certificate.phases.empty() &&
           pays_hold(options, certificate);
  }
  if (!certificate.phases.empty()) {
    return problem.objective == Objective::kPhases && certificate.table.empty() &&
           phases_hold(options, certificate);
  }
  if (!certificate.table.empty()) {
    for (std::size_t t = 0; t < options.tables.size(); ++t) {
      if (options.tables[t].name != certificate.table) continue;
      return cheapest(options, options.classes[static_cast<std::size_t>(options.class_of[t])],
                      certificate.seconds, prices) == kInfinity;
    }
    return false;
  }
  return seconds > 0 &&
         value_at(options, certificate.seconds, prices) > certificate.seconds * seconds;
}

}  // namespace tessera::planner
