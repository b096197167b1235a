#include "tessera/planner/problem.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/planner/plan_error.h"

namespace tessera::planner {
namespace {

constexpr std::pair<Cut, std::string_view> kCuts[] = {
    {Cut::kDataParallel, "data_parallel"},
    {Cut::kTableWise, "table_wise"},
    {Cut::kColumnWise, "column_wise"},
    {Cut::kRowWise, "row_wise"},
    {Cut::kTableRowWise, "table_row_wise"},
    {Cut::kTableColumnWise, "table_column_wise"},
    {Cut::kGrid, "grid_shard"},
};
constexpr std::pair<Kernel, std::string_view> kKernels[] = {{Kernel::kDense, "dense"},
                                                            {Kernel::kFused, "fused"}};

template <class Value, std::size_t size>
std::string_view name_in(const std::pair<Value, std::string_view> (&names)[size], Value value) {
  for (const auto& [one, name] : names) {
    if (one == value) return name;
  }
  return "";
}

template <class Value, std::size_t size>
Value value_in(const std::pair<Value, std::string_view> (&names)[size], std::string_view name,
               const char* kind) {
  std::string known;
  for (const auto& [one, text] : names) {
    if (text == name) return one;
    known += (known.empty() ? "" : ", ") + std::string(text);
  }
  throw PlanError(PlanErrorKind::kBadProblem, "plan: there is no " + std::string(kind) + " '" +
                                                  std::string(name) + "'; there are " + known);
}

void require(bool condition, const std::string& what) {
  if (!condition) throw PlanError(PlanErrorKind::kBadProblem, "plan: " + what);
}

// Not NaN, and within limits.
bool is_within(double value, double low, double high) { return value >= low && value <= high; }

constexpr std::int64_t kMostRows = std::int64_t{1} << 44;
constexpr std::int64_t kMostColumns = 1 << 16;
constexpr int kMostRanks = 1 << 16;

void check_table(const Table& table) {
  const std::string who = "table '" + table.name + "'";
  require(table.rows >= 1 && table.rows <= kMostRows,
          who + " has " + std::to_string(table.rows) + " rows, not 1 to 2^44");
  require(table.dim >= 1 && table.dim <= kMostColumns,
          who + " has " + std::to_string(table.dim) + " columns, not 1 to 65536");
  require(is_within(table.element_bytes, 0.25, 16),
          who + ": a number has " + std::to_string(table.element_bytes) + " bytes, not 0.25 to 16");
  require(is_within(table.state_bytes_per_row, 0, 1e6) &&
              is_within(table.state_bytes_per_element, 0, 1e3),
          who + " has optimizer state out of range");
  require(!table.features.empty(), who + " has no feature");
  std::pair<double, double> below{0, 0};
  for (const auto& point : table.ids_below) {
    require(point.first > below.first && point.second >= below.second &&
                point.first <= static_cast<double>(table.rows) && point.second <= 1,
            who + " has ids below rows that do not rise, or are more than all");
    below = point;
  }
  require(table.ids_below.empty() ||
              below == std::pair<double, double>{static_cast<double>(table.rows), 1},
          who + " has ids below rows that do not end with all ids below the last row");
  for (const Feature& feature : table.features) {
    require(is_within(feature.ids, 0, 1e6), who + " has a feature with " +
                                                std::to_string(feature.ids) +
                                                " ids per sample, not 0 to 10^6");
    std::pair<double, double> last{0, 0};
    for (const auto& point : feature.distinct) {
      require(is_within(point.first, 1, 1e18) && is_within(point.second, 0, point.first) &&
                  point.first > last.first && point.second >= last.second,
              who + " has distinct ids that do not rise, or are more than the lookups");
      last = point;
    }
  }
}

std::string words_of(const std::vector<std::string>& names) {
  std::string words;
  for (const std::string& name : names) words += (words.empty() ? "'" : ", '") + name + "'";
  return words;
}

[[noreturn]] void contradict(const std::string& what, const std::string& why) {
  throw PlanError(PlanErrorKind::kRules, "plan: " + what, why, "leave out one of these rules");
}

// Ranks where all of these tables may lie; empty: nowhere.
std::vector<int> common_ranks(const Problem& problem, const std::vector<std::string>& names) {
  std::vector<int> common;
  for (int r = 0; r < problem.num_ranks(); ++r) {
    const bool is_allowed = std::all_of(names.begin(), names.end(), [&](const std::string& name) {
      const auto rules = problem.rules.find(name);
      return rules == problem.rules.end() || rules->second.ranks.empty() ||
             std::find(rules->second.ranks.begin(), rules->second.ranks.end(), r) !=
                 rules->second.ranks.end();
    });
    if (is_allowed) common.push_back(r);
  }
  return common;
}

void check_lists(const Problem& problem, const std::set<std::string_view>& names) {
  std::map<std::string, std::size_t> list_of;  // of those that lie together
  for (const auto* lists : {&problem.together, &problem.apart}) {
    for (const std::vector<std::string>& list : *lists) {
      require(list.size() > 1, "a list of tables that lie together or apart has fewer than two");
      std::set<std::string_view> seen;
      for (const std::string& name : list) {
        require(names.count(name) != 0,
                "'" + name + "' is to lie with or apart from others, and is no table");
        require(seen.insert(name).second, "'" + name + "' is twice in one list");
      }
    }
  }
  for (std::size_t i = 0; i < problem.together.size(); ++i) {
    for (const std::string& name : problem.together[i]) {
      require(list_of.emplace(name, i).second,
              "'" + name + "' is in two lists of tables that lie together");
      const auto rules = problem.rules.find(name);
      if (rules == problem.rules.end()) continue;
      const auto& [cuts, kernels, min_columns, ranks] = rules->second;
      if ((!cuts.empty() && std::find(cuts.begin(), cuts.end(), Cut::kTableWise) == cuts.end()) ||
          (!kernels.empty() &&
           std::find(kernels.begin(), kernels.end(), Kernel::kFused) == kernels.end())) {
        contradict("table '" + name + "' is to lie together with others, and may not be whole",
                   "its rules exclude table_wise, or the fused kernel");
      }
    }
    if (common_ranks(problem, problem.together[i]).empty()) {
      contradict("tables " + words_of(problem.together[i]) + " are to lie together",
                 "their rules have no rank in common");
    }
  }
  for (const std::vector<std::string>& list : problem.apart) {
    std::set<int> ranks;
    for (const std::string& name : list) {
      for (const int rank : common_ranks(problem, {name})) ranks.insert(rank);
      for (const std::string& other : list) {
        if (name < other && list_of.count(name) != 0 && list_of.count(other) != 0 &&
            list_of.at(name) == list_of.at(other)) {
          contradict("tables '" + name + "' and '" + other + "' are to lie apart, and together",
                     "both lists name them");
        }
      }
    }
    if (ranks.size() < list.size()) {
      contradict("tables " + words_of(list) + " are to lie apart",
                 "they may lie on " + std::to_string(ranks.size()) + " ranks");
    }
  }
}

}  // namespace

std::string_view name_of(Cut cut) noexcept { return name_in(kCuts, cut); }
std::string_view name_of(Kernel kernel) noexcept { return name_in(kKernels, kernel); }
Cut cut_of(std::string_view name) { return value_in(kCuts, name, "cut"); }
Kernel kernel_of(std::string_view name) { return value_in(kKernels, name, "kernel"); }

void check(const Problem& problem) {
  require(!problem.tables.empty(), "there are no tables");
  require(!problem.ranks.empty() && problem.num_ranks() <= kMostRanks,
          "there are " + std::to_string(problem.ranks.size()) + " ranks, not 1 to 65536");
  require(problem.ranks_per_host >= 1 && problem.num_ranks() % problem.ranks_per_host == 0,
          std::to_string(problem.num_ranks()) + " ranks are not hosts of " +
              std::to_string(problem.ranks_per_host));
  require(problem.batch >= 1 && problem.batch <= (1 << 30),
          "the batch is " + std::to_string(problem.batch) + ", not 1 to 2^30");
  require(is_within(problem.reserved_percent, 0, 100) && is_within(problem.reserved_bytes, 0, 1e18),
          "the reservation is out of range");
  require(problem.tries >= 1 && problem.tries <= 1'000'000, "tries are not 1 to 1000000");
  for (std::size_t r = 0; r < problem.ranks.size(); ++r) {
    const Rank& rank = problem.ranks[r];
    const Speeds& speeds = rank.speeds;
    require(rank.memory == kNoLimit || is_within(rank.memory, 0, 1e18),
            "rank " + std::to_string(r) + " has memory out of range");
    for (const double speed : {speeds.memory, speeds.host, speeds.network}) {
      require(is_within(speed, 1, 1e18), "rank " + std::to_string(r) + " has a speed of " +
                                             std::to_string(speed) + " bytes a second");
    }
    require(speeds.step == 0 || is_within(speeds.step, 1, 1e18),
            "rank " + std::to_string(r) + " steps rows with " + std::to_string(speeds.step) +
                " bytes a second");
    for (const SecondsName& name : kSpeedSeconds) {
      const double seconds = speeds.*(name.seconds);
      require(is_within(seconds, 0, 1), "rank " + std::to_string(r) + " has " + name.key + " of " +
                                            std::to_string(seconds) + ", not 0 to 1");
    }
  }
  std::set<std::string_view> names;
  for (const Table& table : problem.tables) {
    require(!table.name.empty(), "a table has no name");
    require(names.insert(table.name).second, "there are two tables '" + table.name + "'");
    check_table(table);
  }
  for (const auto& [name, rules] : problem.rules) {
    require(names.count(name) != 0, "there are rules for '" + name + "', which is no table");
    require(rules.min_columns >= 0, "'" + name + "' has parts of less than no columns");
    std::set<int> seen;
    for (const int rank : rules.ranks) {
      require(rank >= 0 && rank < problem.num_ranks(), "'" + name + "' may lie on rank " +
                                                           std::to_string(rank) + " of " +
                                                           std::to_string(problem.num_ranks()));
      require(seen.insert(rank).second,
              "'" + name + "' names rank " + std::to_string(rank) + " twice");
    }
  }
  check_lists(problem, names);
}

}  // namespace tessera::planner
