#include "planner/packing.h"

#include <algorithm>
#include <numeric>

#include "planner/places.h"

namespace tessera::planner {
namespace {

Load plus(const Load& a, const Load& b) {
  return {a.links + b.links, a.local + b.local, a.bytes + b.bytes};
}

Load minus(const Load& a, const Load& b) {
  return {a.links - b.links, a.local - b.local, a.bytes - b.bytes};
}

constexpr double kNone = std::numeric_limits<double>::infinity();
constexpr double kCloseEnough = 0.0004;  // above the target

}  // namespace

Packing::Packing(const Options& options) : options_(&options) {
  for (int r = 0; r < options.num_ranks(); ++r) capacities_.push_back(options.capacity(r));
}

bool Packing::may_lie(int table, int rank) const {
  const TableClass& one = class_of(table);
  if (!one.is_rank_allowed.empty() && one.is_rank_allowed[at(rank)] == 0) return false;
  if (meets(table, rank)) return false;
  if (one.in_one_host) {
    for (const int part : of_table_[at(table)]) {
      const int other = parts[at(part)].rank;
      if (parts[at(part)].units > 0 &&
          other / options_->ranks_per_host != rank / options_->ranks_per_host) {
        return false;
      }
    }
  }
  return true;
}

// Whether a table lies there that this one is to be kept apart from.
bool Packing::meets(int table, int rank) const {
  for (const int other : options_->apart[at(table)]) {
    const int part = part_on(other, rank);
    if (part >= 0 && parts[at(part)].units > 0) return true;
    for (const HostPart& host : host_parts) {
      if (host.table == other && host.host == rank / options_->ranks_per_host) return true;
    }
  }
  return false;
}

int Packing::part_on(int table, int rank) const {
  for (const int part : of_table_[at(table)]) {
    if (parts[at(part)].rank == rank) return part;
  }
  return -1;
}

void Packing::change(int part, int units) {
  Part& one = parts[at(part)];
  Load& load = loads_[at(one.rank)];
  load = plus(minus(load, part_load(one.table, one.units, one.rank)),
              part_load(one.table, units, one.rank));
  if (one.units == 0 && units > 0) on_rank_[at(one.rank)].push_back(part);
  if (one.units > 0 && units == 0) {
    auto& list = on_rank_[at(one.rank)];
    list.erase(std::find(list.begin(), list.end(), part));
  }
  one.units = units;
}

void Packing::lay(int table, int units, int rank) {
  int part = part_on(table, rank);
  if (part < 0) {
    part = static_cast<int>(parts.size());
    parts.push_back({table, rank, 0});
    of_table_[at(table)].push_back(part);
  }
  change(part, parts[at(part)].units + units);
}

double Packing::seconds(bool is_sum) const {
  double total = 0;
  double links = 0;
  double local = 0;
  for (const Load& load : loads_) {
    total = std::max(total, load.seconds());
    links = std::max(links, load.links);
    local = std::max(local, load.local);
  }
  return is_sum ? total : links + local;
}

bool Packing::fill(const std::vector<Choice>& choices, const PackingOptions& how) {
  const auto world = loads_.size() == 0 ? capacities_.size() : loads_.size();
  loads_.assign(world, {});
  on_rank_.assign(world, {});
  of_table_.assign(choices.size(), {});
  parts.clear();
  host_parts.clear();
  uniform.clear();
  for (int t = 0; t < static_cast<int>(choices.size()); ++t) {
    if (choices[at(t)].way != Way::kUniform) continue;
    uniform.push_back({t, choices[at(t)].uniform});
    const RowParts& rows = class_of(t).uniform[at(choices[at(t)].uniform)].parts;
    for (int r = 0; r < static_cast<int>(world); ++r) {
      const PartLoads* own = rows.on(r);
      if (own == nullptr) continue;
      loads_[at(r)] = plus(loads_[at(r)], (*own)[at(options_->kind_of[at(r)])][1]);
      if (loads_[at(r)].bytes > capacity(r)) return false;
    }
  }
  if (!fill_hosts(choices, how)) return false;

  // Parts: some tables are cut beforehand where that is cheap.
  std::vector<Item> items;
  const double all_seconds = how.target.seconds * static_cast<double>(world);
  std::vector<int> pieces(options_->classes.size(), 1);
  for (std::size_t c = 0; c < options_->classes.size(); ++c) {
    const TableClass& one = options_->classes[c];
    if (!one.has_parts) continue;
    const int limit = one.can_cut ? std::min(one.units, one.num_ranks_allowed) : 1;
    const Load& whole = one.parts[0][at(one.units)];
    const double full =
        std::max(how.target.fullness(whole), capacities_[0] > 0 ? whole.bytes / capacities_[0] : 0);
    int count = 1;
    while (count < limit && full / count > how.part_share) ++count;
    const auto num_tables = static_cast<double>(one.tables.size());
    const double at_least = even_parts(one.parts, one.units, 1).seconds();
    while (count > 1 &&
           (even_parts(one.parts, one.units, count).seconds() - at_least) * num_tables >
               how.cut_budget * all_seconds) {
      --count;
    }
    pieces[c] = count;
  }
  for (int t = 0; t < static_cast<int>(choices.size()); ++t) {
    if (choices[at(t)].way != Way::kParts) continue;
    const TableClass& one = class_of(t);
    const int count = std::max(choices[at(t)].count, pieces[at(options_->class_of[at(t)])]);
    int left = one.units;
    if (how.fills_ranks && choices[at(t)].count > 1 && count == choices[at(t)].count) {
      // As wide as a rank holds; what is left is narrow, and finds company.
      int widest = 1;
      while (widest < one.units &&
             how.target.fullness(one.parts[0][at(widest + 1)]) <= 1 + how.slack &&
             one.parts[0][at(widest + 1)].bytes <= capacities_[0]) {
        ++widest;
      }
      for (; left > widest; left -= widest) items.push_back({t, widest});
      items.push_back({t, left});
      continue;
    }
    for (int i = 0; i < count; ++i) {
      items.push_back({t, one.units / count + (i < one.units % count ? 1 : 0)});
    }
  }
  return fill_parts(std::move(items), how);
}

bool Packing::fill_hosts(const std::vector<Choice>& choices, const PackingOptions& how) {
  const int local = options_->ranks_per_host;
  std::vector<Item> items;
  for (int t = 0; t < static_cast<int>(choices.size()); ++t) {
    if (choices[at(t)].way != Way::kHosts) continue;
    const TableClass& one = class_of(t);
    const int count = choices[at(t)].count;
    for (int i = 0; i < count; ++i) {
      items.push_back({t, one.units / count + (i < one.units % count ? 1 : 0)});
    }
  }
  const auto size_of = [&](const Item& item) {
    const Load& load = class_of(item.table).host_parts.full[0][at(item.units)];
    return std::max(how.target.fullness(load), load.bytes / capacities_[0]);
  };
  std::stable_sort(items.begin(), items.end(),
                   [&](const Item& a, const Item& b) { return size_of(a) > size_of(b); });
  // Seconds and bytes of a host: those of its fullest rank after `item`.
  const auto after = [&](const Item& item, int host, bool& fits) {
    double most = 0;
    const RowParts& rows = class_of(item.table).host_parts;
    for (int i = 0; i < local; ++i) {
      const int r = host * local + i;
      const PartLoads* own = rows.on(i);
      if (own == nullptr) continue;
      const Load load = plus(loads_[at(r)], (*own)[at(options_->kind_of[at(r)])][at(item.units)]);
      fits = fits && load.bytes <= capacity(r);
      most = std::max(most, how.target.fullness(load));
    }
    return most;
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    Item item = items[i];
    const TableClass& one = class_of(item.table);
    int best = -1;
    double least = kNone;
    for (const int host : one.hosts) {
      bool is_taken = false;
      for (const HostPart& part : host_parts) {
        is_taken = is_taken || (part.table == item.table && part.host == host);
      }
      for (int i = 0; i < local; ++i) is_taken = is_taken || meets(item.table, host * local + i);
      bool fits = !is_taken;
      const double most = after(item, host, fits);
      if (fits && most < least) {
        least = most;
        best = host;
      }
    }
    if (best < 0) {
      if (!one.can_cut_hosts || item.units == 1) return false;
      items.push_back({item.table, item.units - item.units / 2});
      items.push_back({item.table, item.units / 2});
      continue;
    }
    host_parts.push_back({item.table, best, item.units});
    const RowParts& rows = one.host_parts;
    for (int j = 0; j < local; ++j) {
      const int r = best * local + j;
      const PartLoads* own = rows.on(j);
      if (own == nullptr) continue;
      loads_[at(r)] = plus(loads_[at(r)], (*own)[at(options_->kind_of[at(r)])][at(item.units)]);
    }
  }
  return true;
}

bool Packing::fill_parts(std::vector<Item> items, const PackingOptions& how) {
  struct Sized {
    Item item;
    double seconds;
    double bytes;
    double key;  // the largest is laid first
  };
  const double room = *std::max_element(capacities_.begin(), capacities_.end());
  std::vector<Sized> order;
  for (const Item& item : items) {
    const Load& load = class_of(item.table).parts[0][at(item.units)];
    order.push_back({item, how.target.fullness(load), room > 0 ? load.bytes / room : 0, 0});
  }
  const auto is_heavy = [&](const Sized& one) {
    return how.order == Order::kMemoryFirst && one.bytes > one.seconds;
  };
  std::uint64_t state = how.seed;
  for (Sized& one : order) {
    one.key = is_heavy(one)                      ? one.bytes
              : how.order == Order::kMemoryFirst ? one.seconds
                                                 : std::max(one.seconds, one.bytes);
    if (how.seed != 0) {
      constexpr double kJitter = 0.25;
      one.key *= 1 + kJitter * static_cast<double>(next_random(state) >> 11) / 9007199254740992.0;
    }
  }
  std::sort(order.begin(), order.end(), [&](const Sized& a, const Sized& b) {
    if (is_heavy(a) != is_heavy(b)) return is_heavy(a);
    if (a.key != b.key) return a.key > b.key;
    if (a.item.table != b.item.table) return a.item.table < b.item.table;
    return a.item.units > b.item.units;
  });
  // Groups first: what may lie on few ranks is laid before the rest fills them.
  std::stable_partition(order.begin(), order.end(), [&](const Sized& one) {
    return class_of(one.item.table).num_ranks_allowed < options_->num_ranks();
  });
  if (how.target.measure == Measure::kPhases) {
    std::vector<Item> heavy;
    std::vector<Item> others;
    for (const Sized& one : order) (is_heavy(one) ? heavy : others).push_back(one.item);
    return fill_phases(heavy, others, how);
  }
  for (const Sized& one : order) {
    if (!lay_or_cut(one.item, how, is_heavy(one))) return false;
  }
  return true;
}

// Links and memory are waited for apart, so both must be even. Parts that are rather work in memory
// are laid first, such that the others, which then fill up the links, bring the same to every rank.
bool Packing::fill_phases(const std::vector<Item>& heavy, const std::vector<Item>& others,
                          const PackingOptions& how) {
  const auto load_of = [&](const Item& item) -> const Load& {
    return class_of(item.table).parts[0][at(item.units)];
  };
  const auto is_work = [&](const Item& item) { return !how.target.is_by_links(load_of(item)); };
  Load all;
  Load company;  // all that is rather on links
  for (const Load& load : loads_) all = plus(all, load);
  for (const auto* items : {&heavy, &others}) {
    for (const Item& item : *items) {
      all = plus(all, load_of(item));
      if (!is_work(item)) company = plus(company, load_of(item));
    }
  }
  const double world = options_->num_ranks();
  PackingOptions work = how;
  work.target.measure = Measure::kLocal;
  work.target.company = company.links > 0 ? company.local / company.links : 0;
  work.target.local =
      (all.local * (1 + how.memory_slack) - work.target.company * all.links) / world;
  if (!(work.target.local > 0)) return false;
  PackingOptions rest = how;
  rest.target.measure = Measure::kLinks;
  rest.target.links = all.links / world;
  for (const Item& item : heavy) {
    if (!lay_or_cut(item, is_work(item) ? work : rest, true)) return false;
  }
  for (const Item& item : others) {
    if (is_work(item) && !lay_or_cut(item, work, false)) return false;
  }
  level(work.target, 4 * options_->num_ranks());
  Load sum;
  for (const Load& load : loads_) sum = plus(sum, load);
  for (const Item& item : others) {
    if (!is_work(item)) sum = plus(sum, load_of(item));
  }
  rest.target.links = sum.links / world;
  for (const Item& item : others) {
    if (!is_work(item) && !lay_or_cut(item, rest, false)) return false;
  }
  return true;
}

Target Packing::mean_target(double memory_slack) const {
  Load sum;
  for (const Load& load : loads_) sum = plus(sum, load);
  const double world = options_->num_ranks();
  Target target;
  target.measure = Measure::kPhases;
  target.links = std::max(sum.links / world, 1e-300);
  target.local = std::max(sum.local / world * (1 + memory_slack), 1e-300);
  target.seconds = target.links + target.local;
  return target;
}

bool Packing::lay_or_cut(Item item, const PackingOptions& how, bool by_bytes) {
  const Target& target = how.target;
  const double limit = 1 + how.slack;
  const TableClass& one = class_of(item.table);
  const int world = options_->num_ranks();
  while (item.units > 0) {
    // Best rank for all of it; and the emptiest rank, in case there is none.
    int best = -1;
    double least = kNone;
    int emptiest = -1;
    double emptiest_full = kNone;
    int roomiest = -1;
    double most_room = -1;
    for (int r = 0; r < world; ++r) {
      if (!may_lie(item.table, r)) continue;
      const bool is_here =
          one.can_cut && !of_table_[at(item.table)].empty() && part_on(item.table, r) >= 0;
      const int before = is_here ? parts[at(part_on(item.table, r))].units : 0;
      const Load added =
          minus(part_load(item.table, before + item.units, r), part_load(item.table, before, r));
      const Load next = plus(loads_[at(r)], added);
      const double full = target.fullness(loads_[at(r)]);
      const double left = capacity(r) - loads_[at(r)].bytes;
      if (next.bytes <= capacity(r)) {
        const double next_full = target.fullness(next);
        if (next_full <= limit) {
          const double score = by_bytes ? next.bytes / capacity(r) : next_full;
          if (score < least) {
            least = score;
            best = r;
          }
        }
      }
      const Load& unit = part_load(item.table, 1, r);
      if (loads_[at(r)].bytes + unit.bytes <= capacity(r) && full < emptiest_full) {
        emptiest_full = full;
        emptiest = r;
      }
      if (left > most_room) {
        most_room = left;
        roomiest = r;
      }
    }
    if (best >= 0) {
      lay(item.table, item.units, best);
      return true;
    }
    if (emptiest < 0) {
      // No rank has memory for the narrowest part beside what it has; the fullest may still hold
      // this table's wider part.
      if (roomiest < 0) return false;
      return false;
    }
    if (!one.can_cut) {
      // It cannot be cut: the rank where it hurts least.
      int where = -1;
      double hurt = kNone;
      for (int r = 0; r < world; ++r) {
        if (!may_lie(item.table, r)) continue;
        const Load next = plus(loads_[at(r)], part_load(item.table, item.units, r));
        if (next.bytes <= capacity(r) && target.fullness(next) < hurt) {
          hurt = target.fullness(next);
          where = r;
        }
      }
      if (where < 0) return false;
      lay(item.table, item.units, where);
      return true;
    }
    // As many units as fill the emptiest rank; what is left looks for another.
    int low = 0;
    int high = item.units + 1;
    const auto fits = [&](int units, bool in_time) {
      const int part = part_on(item.table, emptiest);
      const int before = part >= 0 ? parts[at(part)].units : 0;
      const Load next =
          plus(loads_[at(emptiest)], minus(part_load(item.table, before + units, emptiest),
                                           part_load(item.table, before, emptiest)));
      return next.bytes <= capacity(emptiest) && (!in_time || target.fullness(next) <= limit);
    };
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (fits(middle, true) ? low : high) = middle;
    }
    if (low == 0) {
      // All ranks are full of time: the emptiest takes what its memory holds.
      high = item.units + 1;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (fits(middle, false) ? low : high) = middle;
      }
    }
    if (low == 0) return false;
    lay(item.table, low, emptiest);
    item.units -= low;
  }
  return true;
}

// Ranks that moves may go to: the emptiest of what the fullest is full of.
void Packing::find_emptiest(const Target& target, const Load& fullest) {
  constexpr std::size_t kMostRanks = 12;
  const bool by_links = target.is_by_links(fullest);
  emptiest_.clear();
  for (int r = 0; r < options_->num_ranks(); ++r) {
    const Load& load = loads_[at(r)];
    const bool is_phases = target.measure == Measure::kPhases;
    emptiest_.emplace_back(!is_phases ? target.fullness(load)
                           : by_links ? load.links
                                      : load.local,
                           r);
  }
  if (emptiest_.size() > kMostRanks) {
    std::nth_element(emptiest_.begin(), emptiest_.begin() + kMostRanks, emptiest_.end());
    emptiest_.resize(kMostRanks);
  }
  std::sort(emptiest_.begin(), emptiest_.end());
}

// Parts of a rank, of equal whole tables one.
const std::vector<int>& Packing::kinds_on(int rank, std::vector<int>& found) {
  constexpr std::size_t kMostParts = 64;
  seen_.resize(options_->classes.size(), 0);
  ++seeing_;
  found.clear();
  for (const int p : on_rank_[at(rank)]) {
    const Part& part = parts[at(p)];
    if (part.units == class_of(part.table).units) {
      int& seen = seen_[at(options_->class_of[at(part.table)])];
      if (seen == seeing_) continue;
      seen = seeing_;
    }
    found.push_back(p);
    if (found.size() == kMostParts) break;
  }
  return found;
}

void Packing::level(const Target& target, int limit) {
  for (int step = 0; step < limit; ++step) {
    int fullest = 0;
    double most = -1;
    for (int r = 0; r < options_->num_ranks(); ++r) {
      const double full = target.fullness(loads_[at(r)]);
      if (full > most) {
        most = full;
        fullest = r;
      }
    }
    if (most <= 1.0 + kCloseEnough) return;
    find_emptiest(target, loads_[at(fullest)]);
    if (improve_once(target, fullest, most)) continue;
    if (!exchange_once(target, fullest, most)) return;
  }
}

// Moves units of one part of the fullest rank to another rank: all of them, or as many as make both
// equally full.
bool Packing::improve_once(const Target& target, int fullest, double most) {
  struct Move {
    double score = kNone;
    int part = -1;
    int rank = -1;
    int units = 0;
  } best;
  const Load& from = loads_[at(fullest)];
  std::vector<int> ours;
  for (const int p : kinds_on(fullest, ours)) {
    const Part& part = parts[at(p)];
    const TableClass& one = class_of(part.table);
    const Load& own = part_load(part.table, part.units, fullest);
    const auto consider_rank = [&](int r, double to_full) {
      if (r == fullest || to_full >= most || !may_lie(part.table, r)) return;
      const Load& to = loads_[at(r)];
      const int there = one.can_cut ? part_on(part.table, r) : -1;
      const int before = there >= 0 ? parts[at(there)].units : 0;
      const Load& base = part_load(part.table, before, r);
      const auto consider = [&](int units) {
        const Load next_from =
            plus(minus(from, own), part_load(part.table, part.units - units, fullest));
        const Load next_to = plus(minus(to, base), part_load(part.table, before + units, r));
        if (next_to.bytes > capacity(r)) return;
        const double after = std::max(target.fullness(next_from), target.fullness(next_to));
        if (after >= most * (1 - 1e-7)) return;
        // Above the target every bit counts; below it, only what the cut costs everybody.
        const double waste =
            (next_from.seconds() + next_to.seconds() - from.seconds() - to.seconds()) /
            target.seconds;
        const double score = std::max(after, 1.0) + 0.5 * waste;
        if (score < best.score) best = {score, p, r, units};
      };
      consider(part.units);
      if (!one.can_cut || part.units == 1) return;
      // The first number of units after which the other rank is the fuller one.
      int low = 0;
      int high = part.units;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        const Load next_from =
            plus(minus(from, own), part_load(part.table, part.units - middle, fullest));
        const Load next_to = plus(minus(to, base), part_load(part.table, before + middle, r));
        (target.fullness(next_to) <= target.fullness(next_from) && next_to.bytes <= capacity(r)
             ? low
             : high) = middle;
      }
      if (low > 0) consider(low);
      if (high < part.units) consider(high);
    };
    for (const auto& [load, r] : emptiest_) consider_rank(r, target.fullness(loads_[at(r)]));
    for (const int other : of_table_[at(part.table)]) {
      if (parts[at(other)].units == 0) continue;
      const int r = parts[at(other)].rank;
      consider_rank(r, target.fullness(loads_[at(r)]));
    }
  }
  if (best.part < 0) return false;
  const Part part = parts[at(best.part)];
  change(best.part, part.units - best.units);
  lay(part.table, best.units, best.rank);
  return true;
}

// Exchanges a part of the fullest rank for one of another rank.
bool Packing::exchange_once(const Target& target, int fullest, double most) {
  double best = most * (1 - 1e-7);
  int best_ours = -1;
  int best_theirs = -1;
  const Load& from = loads_[at(fullest)];
  std::vector<int> own;
  std::vector<std::vector<int>> others(emptiest_.size());
  for (std::size_t i = 0; i < emptiest_.size(); ++i) kinds_on(emptiest_[i].second, others[i]);
  for (const int p : kinds_on(fullest, own)) {
    const Part& ours = parts[at(p)];
    const Load without = minus(from, part_load(ours.table, ours.units, fullest));
    for (std::size_t i = 0; i < emptiest_.size(); ++i) {
      const int r = emptiest_[i].second;
      if (r == fullest || !may_lie(ours.table, r) || part_on(ours.table, r) >= 0) continue;
      const Load with = plus(loads_[at(r)], part_load(ours.table, ours.units, r));
      for (const int q : others[i]) {
        const Part& theirs = parts[at(q)];
        if (!may_lie(theirs.table, fullest) || part_on(theirs.table, fullest) >= 0) continue;
        const Load next_from = plus(without, part_load(theirs.table, theirs.units, fullest));
        const Load next_to = minus(with, part_load(theirs.table, theirs.units, r));
        if (next_from.bytes > capacity(fullest) || next_to.bytes > capacity(r)) continue;
        const double after = std::max(target.fullness(next_from), target.fullness(next_to));
        if (after < best) {
          best = after;
          best_ours = p;
          best_theirs = q;
        }
      }
    }
  }
  if (best_ours < 0) return false;
  const Part ours = parts[at(best_ours)];
  const Part theirs = parts[at(best_theirs)];
  change(best_ours, 0);
  change(best_theirs, 0);
  lay(ours.table, ours.units, theirs.rank);
  lay(theirs.table, theirs.units, fullest);
  return true;
}

}  // namespace tessera::planner
