#include "tessera/planner/options.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <tuple>

#include "tessera/planner/plan_error.h"

namespace tessera::planner {
namespace {

constexpr std::int64_t kUnit = 4;  // columns; 16 bytes of float32

bool allows(const TableRules& rules, Cut cut) {
  return rules.cuts.empty() ||
         std::find(rules.cuts.begin(), rules.cuts.end(), cut) != rules.cuts.end();
}

bool allows(const TableRules& rules, Kernel kernel) {
  return rules.kernels.empty() ||
         std::find(rules.kernels.begin(), rules.kernels.end(), kernel) != rules.kernels.end();
}

Load load_of(const ShardCost& cost) {
  return {cost.seconds.links(), cost.seconds.local(), cost.bytes.total()};
}

std::vector<std::int64_t> even_heights(std::int64_t rows, int num_ranks) {
  const std::int64_t height = (rows + num_ranks - 1) / num_ranks;
  std::vector<std::int64_t> heights;
  for (int i = 0; i < num_ranks; ++i) {
    heights.push_back(std::clamp<std::int64_t>(rows - i * height, 0, height));
  }
  return heights;
}

// What fits where this does fits where each of them would: the most seconds, the most of them in
// memory, the most bytes.
PartLoads most_of(const std::vector<PartLoads>& each) {
  PartLoads most = each[0];
  for (std::size_t kind = 0; kind < most.size(); ++kind) {
    for (std::size_t u = 0; u < most[kind].size(); ++u) {
      double seconds = 0;
      double local = 0;
      double bytes = 0;
      for (const PartLoads& loads : each) {
        seconds = std::max(seconds, loads[kind][u].seconds());
        local = std::max(local, loads[kind][u].local);
        bytes = std::max(bytes, loads[kind][u].bytes);
      }
      most[kind][u] = {seconds - local, local, bytes};
    }
  }
  return most;
}

class Enumeration {
 public:
  explicit Enumeration(const Problem& problem) : problem_(problem), model_(problem) {}

  Options make() {
    options_.ranks_per_host = problem_.ranks_per_host;
    find_kinds();
    for (int host = 0; host < options_.num_ranks() / options_.ranks_per_host; ++host) {
      const auto first = options_.kind_of.begin() + host * options_.ranks_per_host;
      const std::vector<int> kinds(first, first + options_.ranks_per_host);
      auto& known = options_.host_kinds;
      if (std::find(known.begin(), known.end(), kinds) == known.end()) known.push_back(kinds);
    }
    options_.tables = problem_.tables;
    std::sort(options_.tables.begin(), options_.tables.end(),
              [](const Table& a, const Table& b) { return a.name < b.name; });
    join_tables();
    find_classes();
    for (TableClass& one : options_.classes) fill(one);
    return std::move(options_);
  }

 private:
  void find_kinds() {
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      const Rank& rank = problem_.ranks[static_cast<std::size_t>(r)];
      std::size_t kind = 0;
      while (kind < options_.kinds.size() && !(options_.kinds[kind].rank == rank)) ++kind;
      if (kind == options_.kinds.size()) options_.kinds.push_back({rank, model_.capacity(r), {}});
      options_.kinds[kind].ranks.push_back(r);
      options_.kind_of.push_back(static_cast<int>(kind));
    }
  }

  const TableRules& rules_of(const Table& table) const {
    static const TableRules kNone;
    const auto found = rules_.find(table.name);
    return found == rules_.end() ? kNone : found->second;
  }

  // Tables that lie together become one, which cannot be cut and may lie where all of them may.
  void join_tables() {
    rules_ = problem_.rules;
    std::map<std::string, std::string> first_of;
    for (std::vector<std::string> list : problem_.together) {
      std::sort(list.begin(), list.end());
      TableRules& all = rules_[list[0]];
      all.cuts = {Cut::kTableWise};
      all.kernels.clear();
      for (const std::string& name : list) {
        first_of[name] = list[0];
        const auto own = problem_.rules.find(name);
        if (own == problem_.rules.end() || own->second.ranks.empty()) continue;
        std::vector<int> ranks = own->second.ranks;
        std::sort(ranks.begin(), ranks.end());
        std::sort(all.ranks.begin(), all.ranks.end());
        std::vector<int> both;
        std::set_intersection(ranks.begin(), ranks.end(), all.ranks.begin(), all.ranks.end(),
                              std::back_inserter(both));
        all.ranks = all.ranks.empty() ? ranks : both;
      }
    }
    std::vector<Table> kept;
    std::map<std::string, int> place_of;
    std::map<std::string, std::vector<Table>> company;
    for (const Table& table : options_.tables) {
      const auto first = first_of.find(table.name);
      if (first != first_of.end() && first->second != table.name) {
        company[first->second].push_back(table);
        continue;
      }
      place_of[table.name] = static_cast<int>(kept.size());
      kept.push_back(table);
    }
    options_.tables = std::move(kept);
    options_.company.resize(options_.tables.size());
    options_.apart.resize(options_.tables.size());
    for (auto& [name, tables] : company) {
      options_.company[static_cast<std::size_t>(place_of.at(name))] = std::move(tables);
    }
    const auto place = [&](const std::string& name) {
      const auto first = first_of.find(name);
      return place_of.at(first == first_of.end() ? name : first->second);
    };
    for (const std::vector<std::string>& list : problem_.apart) {
      for (const std::string& one : list) {
        for (const std::string& other : list) {
          if (one != other) {
            options_.apart[static_cast<std::size_t>(place(one))].push_back(place(other));
          }
        }
      }
    }
    for (std::vector<int>& others : options_.apart) {
      std::sort(others.begin(), others.end());
      others.erase(std::unique(others.begin(), others.end()), others.end());
    }
  }

  bool is_single(int table) const {
    const auto t = static_cast<std::size_t>(table);
    return !options_.company[t].empty() || !options_.apart[t].empty();
  }

  // Order of classes does not depend on the names: it is that of their numbers.
  void find_classes() {
    const auto key = [&](int i) {
      const Table& t = options_.tables[static_cast<std::size_t>(i)];
      return std::tie(t.rows, t.dim, t.element_bytes, t.is_pooled, t.state_bytes_per_row,
                      t.state_bytes_per_element, t.has_exact_norms, t.ids_below);
    };
    const auto feature_less = [](const Feature& a, const Feature& b) {
      return std::tie(a.ids, a.is_weighted, a.distinct) <
             std::tie(b.ids, b.is_weighted, b.distinct);
    };
    const auto compare = [&](int a, int b) {
      if (key(a) != key(b)) return key(a) < key(b) ? -1 : 1;
      const Table& x = options_.tables[static_cast<std::size_t>(a)];
      const Table& y = options_.tables[static_cast<std::size_t>(b)];
      const auto before = [&](const Table& s, const Table& t) {
        return std::lexicographical_compare(s.features.begin(), s.features.end(),
                                            t.features.begin(), t.features.end(), feature_less);
      };
      if (before(x, y)) return -1;
      if (before(y, x)) return 1;
      const TableRules& p = rules_of(x);
      const TableRules& q = rules_of(y);
      const auto rule_key = [](const TableRules& r) {
        return std::tie(r.cuts, r.kernels, r.min_columns, r.ranks);
      };
      if (rule_key(p) != rule_key(q)) return rule_key(p) < rule_key(q) ? -1 : 1;
      if (is_single(a) || is_single(b)) return a < b ? -1 : a > b ? 1 : 0;
      return 0;
    };
    std::vector<int> order(options_.tables.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      const int result = compare(a, b);
      return result != 0 ? result < 0 : a < b;
    });
    options_.class_of.resize(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (i == 0 || compare(order[i - 1], order[i]) != 0) {
        options_.classes.emplace_back();
        options_.classes.back().rules =
            rules_of(options_.tables[static_cast<std::size_t>(order[i])]);
        options_.classes.back().is_single = is_single(order[i]);
      }
      options_.class_of[static_cast<std::size_t>(order[i])] =
          static_cast<int>(options_.classes.size()) - 1;
      options_.classes.back().tables.push_back(order[i]);
    }
  }

  PartLoads part_loads(const Table& table, const CostModel::TableLoad& load, Cut cut, Kernel kernel,
                       std::int64_t rows, std::int64_t unit, int units,
                       std::int64_t row = 0) const {
    PartLoads loads(options_.kinds.size());
    for (std::size_t kind = 0; kind < loads.size(); ++kind) {
      loads[kind].reserve(static_cast<std::size_t>(units) + 1);
      for (int u = 0; u <= units; ++u) {
        loads[kind].push_back(load_of(model_.cost(table, load, cut, kernel, rows, u * unit,
                                                  options_.kinds[kind].ranks[0], row)));
      }
    }
    return loads;
  }

  RowParts row_parts(const Table& table, const CostModel::TableLoad& load, Cut cut, Kernel kernel,
                     int num_ranks, std::int64_t unit, int units, bool is_even = true) const {
    RowParts parts;
    if (cut != Cut::kDataParallel && !table.ids_below.empty()) {
      parts.heights =
          is_even ? even_heights(table.rows, num_ranks) : rows_of_equal_load(table, num_ranks);
      std::int64_t row = 0;
      for (const std::int64_t rows : parts.heights) {
        parts.each.push_back(part_loads(table, load, cut, kernel, rows, unit, units, row));
        row += rows;
      }
      parts.full = most_of(parts.each);
      return parts;
    }
    const std::int64_t rows =
        cut == Cut::kDataParallel ? table.rows : (table.rows + num_ranks - 1) / num_ranks;
    parts.count = cut == Cut::kDataParallel ? num_ranks : static_cast<int>(table.rows / rows);
    parts.full = part_loads(table, load, cut, kernel, rows, unit, units);
    const std::int64_t rest = cut == Cut::kDataParallel ? 0 : table.rows % rows;
    parts.has_rest = rest > 0;
    if (rest > 0) parts.rest = part_loads(table, load, cut, kernel, rest, unit, units);
    return parts;
  }

  void fill(TableClass& one) {
    const Table& table = options_.tables[static_cast<std::size_t>(one.tables[0])];
    const TableRules& rules = one.rules;
    const CostModel::TableLoad load = model_.load_of(table);
    const int world = options_.num_ranks();
    const int local = options_.ranks_per_host;
    one.num_ranks_allowed = rules.ranks.empty() ? world : static_cast<int>(rules.ranks.size());
    if (one.num_ranks_allowed < world) {
      one.is_rank_allowed.assign(static_cast<std::size_t>(world), 0);
      for (const int rank : rules.ranks) one.is_rank_allowed[static_cast<std::size_t>(rank)] = 1;
    }
    one.unit = unit_of(table.dim, rules.min_columns);
    one.units = static_cast<int>(table.dim / one.unit);
    const bool is_fused = allows(rules, Kernel::kFused);
    const bool cuts_anywhere = allows(rules, Cut::kColumnWise);
    const bool cuts_in_host = allows(rules, Cut::kTableColumnWise);
    if (is_fused && (allows(rules, Cut::kTableWise) || cuts_anywhere || cuts_in_host)) {
      one.has_parts = true;
      one.can_cut = (cuts_anywhere || cuts_in_host) && one.units > 1;
      one.in_one_host = !cuts_anywhere && cuts_in_host;
      one.cut = cuts_anywhere ? Cut::kColumnWise : Cut::kTableColumnWise;
      one.whole_cut = allows(rules, Cut::kTableWise) ? Cut::kTableWise : one.cut;
      one.parts = part_loads(table, load, Cut::kColumnWise, Kernel::kFused, table.rows, one.unit,
                             one.units);
      add_company(one);
    }
    const bool is_grid = allows(rules, Cut::kGrid);
    const bool is_host = allows(rules, Cut::kTableRowWise);
    for (int host = 0; host < world / local; ++host) {
      bool is_allowed = true;
      for (int r = host * local; r < (host + 1) * local; ++r) {
        is_allowed = is_allowed && (one.is_rank_allowed.empty() ||
                                    one.is_rank_allowed[static_cast<std::size_t>(r)] != 0);
      }
      if (is_allowed) one.hosts.push_back(host);
    }
    // Where there is one host, or one rank a host, these are row_wise and column_wise at no less
    // cost; they are kept only if rules ask for them.
    const bool has_hosts = local > 1 && local < world;
    if (is_fused && (is_grid || is_host) && !one.hosts.empty() &&
        (has_hosts || !rules.cuts.empty())) {
      one.has_hosts = true;
      one.can_cut_hosts = is_grid && one.hosts.size() > 1 && one.units > 1;
      one.whole_host_cut = is_host ? Cut::kTableRowWise : Cut::kGrid;
      one.host_parts =
          row_parts(table, load, Cut::kTableRowWise, Kernel::kFused, local, one.unit, one.units);
    }
    const bool is_apart = !options_.apart[static_cast<std::size_t>(one.tables[0])].empty();
    if (one.num_ranks_allowed == world && (!is_apart || world == 1)) {
      const auto add = [&](Cut cut, Kernel kernel, bool is_even = true) {
        if (!allows(rules, cut) || !allows(rules, kernel)) return;
        one.uniform.push_back({cut, kernel,
                               row_parts(table, load, cut, kernel, world, table.dim, 1, is_even),
                               is_even});
      };
      if (world > 1 || !rules.cuts.empty()) add(Cut::kRowWise, Kernel::kFused);
      if (world > 1 && !table.ids_below.empty()) add(Cut::kRowWise, Kernel::kFused, false);
      add(Cut::kDataParallel, Kernel::kFused);
      add(Cut::kDataParallel, Kernel::kDense);
    }
    if (!one.has_parts && !one.has_hosts && one.uniform.empty()) throw_no_option(table, rules);
  }

  // What lies with a table is on its rank, whole.
  void add_company(TableClass& one) const {
    for (const Table& table : options_.company[static_cast<std::size_t>(one.tables[0])]) {
      const CostModel::TableLoad load = model_.load_of(table);
      for (std::size_t kind = 0; kind < options_.kinds.size(); ++kind) {
        const Load more =
            load_of(model_.cost(table, load, Cut::kTableWise, Kernel::kFused, table.rows, table.dim,
                                options_.kinds[kind].ranks[0]));
        Load& whole = one.parts[kind].back();
        whole = {whole.links + more.links, whole.local + more.local, whole.bytes + more.bytes};
      }
    }
  }

  bool leaves_a_way(const TableRules& rules) const {
    const int world = options_.num_ranks();
    const int local = options_.ranks_per_host;
    const auto is_allowed = [&](int rank) {
      return rules.ranks.empty() ||
             std::find(rules.ranks.begin(), rules.ranks.end(), rank) != rules.ranks.end();
    };
    bool has_host = false;
    bool has_all = true;
    for (int host = 0; host < world / local; ++host) {
      bool has_ranks = true;
      for (int r = host * local; r < (host + 1) * local; ++r) {
        has_ranks = has_ranks && is_allowed(r);
      }
      has_host = has_host || has_ranks;
      has_all = has_all && has_ranks;
    }
    const bool is_fused = allows(rules, Kernel::kFused);
    const bool has_parts = allows(rules, Cut::kTableWise) || allows(rules, Cut::kColumnWise) ||
                           allows(rules, Cut::kTableColumnWise);
    const bool has_hosts = allows(rules, Cut::kTableRowWise) || allows(rules, Cut::kGrid);
    return (is_fused &&
            (has_parts || (has_hosts && has_host) || (has_all && allows(rules, Cut::kRowWise)))) ||
           (has_all && allows(rules, Cut::kDataParallel));
  }

  [[noreturn]] void throw_no_option(const Table& table, const TableRules& rules) const {
    // The fewest rules that together exclude everything: each is left out in turn.
    std::vector<std::string> words;
    std::string cuts;
    for (const Cut cut : rules.cuts) cuts += (cuts.empty() ? "" : ", ") + std::string(name_of(cut));
    std::string kernels;
    for (const Kernel kernel : rules.kernels) {
      kernels += (kernels.empty() ? "" : ", ") + std::string(name_of(kernel));
    }
    const auto is_possible = [&](bool with_cuts, bool with_kernels, bool with_ranks) {
      TableRules less = rules;
      if (!with_cuts) less.cuts.clear();
      if (!with_kernels) less.kernels.clear();
      if (!with_ranks) less.ranks.clear();
      return leaves_a_way(less);
    };
    bool keeps[3] = {true, true, true};
    for (int i = 0; i < 3; ++i) {
      keeps[i] = false;
      if (is_possible(keeps[0], keeps[1], keeps[2])) keeps[i] = true;
    }
    if (keeps[0]) words.push_back("cuts " + cuts);
    if (keeps[1]) words.push_back("kernels " + kernels);
    if (keeps[2])
      words.push_back("ranks, " + std::to_string(rules.ranks.size()) + " of " +
                      std::to_string(problem_.num_ranks()));
    std::string list;
    for (const std::string& word : words) list += (list.empty() ? "" : "; ") + word;
    throw PlanError(PlanErrorKind::kRules,
                    "plan: the rules of table '" + table.name + "' leave no way to lay it",
                    "together they exclude everything: " + list, "leave out one of them");
  }

  const Problem& problem_;
  CostModel model_;
  Options options_;
  std::map<std::string, TableRules> rules_;  // with those of tables that lie together
};

}  // namespace

std::int64_t unit_of(std::int64_t dim, std::int64_t min_columns) {
  for (std::int64_t unit = min_columns > 0 ? min_columns : kUnit; unit < dim; ++unit) {
    if (dim % unit == 0) return unit;
  }
  return dim;
}

Options enumerate(const Problem& problem) {
  check(problem);
  return Enumeration(problem).make();
}

Load even_parts(const PartLoads& parts, int units, int count) {
  const int low = units / count;
  const int num_wide = units % count;
  const auto& loads = parts[0];
  const Load& narrow = loads[static_cast<std::size_t>(low)];
  if (num_wide == 0) {
    return {count * narrow.links, count * narrow.local, count * narrow.bytes};
  }
  const Load& wide = loads[static_cast<std::size_t>(low) + 1];
  const int rest = count - num_wide;
  return {num_wide * wide.links + rest * narrow.links, num_wide * wide.local + rest * narrow.local,
          num_wide * wide.bytes + rest * narrow.bytes};
}

Load even_parts(const RowParts& rows, int units, int count) {
  Load sum;
  const auto add = [&](const Load& load, double times) {
    sum = {sum.links + load.links * times, sum.local + load.local * times,
           sum.bytes + load.bytes * times};
  };
  for (const PartLoads& loads : rows.each) add(even_parts(loads, units, count), 1);
  if (rows.each.empty()) add(even_parts(rows.full, units, count), rows.count);
  if (rows.has_rest) add(even_parts(rows.rest, units, count), 1);
  return sum;
}

}  // namespace tessera::planner
