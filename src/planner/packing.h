// planner/packing.h — tables on ranks while a plan is searched for.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/planner/bound.h"
#include "tessera/planner/options.h"

namespace tessera::planner {

/// Columns of one table on one rank.
struct Part {
  int table = 0;
  int rank = 0;
  int units = 0;
};

/// Columns of one table over the ranks of one host.
struct HostPart {
  int table = 0;
  int host = 0;
  int units = 0;
};

struct Uniform {
  int table = 0;
  int option = 0;
};

/// What of a rank's load counts while parts are laid.
enum class Measure : std::uint8_t {
  kSum,     // links and memory together
  kPhases,  // the fuller of the two
  kLinks,   // links alone
  kLocal,   // memory, less what the parts bring that will fill up the links
};

/// Seconds that a rank should not pass.
struct Target {
  Measure measure = Measure::kSum;
  double seconds = 0;
  double links = 0;
  double local = 0;
  double company = 0;  // of kLocal: seconds in memory that come with a second on links

  bool is_sum() const { return measure == Measure::kSum; }
  /// Whether links are what is full.
  bool is_by_links(const Load& load) const {
    return measure == Measure::kLinks ||
           (measure == Measure::kPhases && load.links / links > load.local / local);
  }
  /// 1: at the target.
  double fullness(const Load& load) const {
    switch (measure) {
      case Measure::kSum:
        return (load.links + load.local) / seconds;
      case Measure::kLinks:
        return load.links / links;
      case Measure::kLocal:
        return (load.local - company * load.links) / local;
      case Measure::kPhases:
        break;
    }
    const double by_links = load.links / links;
    const double by_local = load.local / local;
    return by_links > by_local ? by_links : by_local;
  }
};

/// In which order parts are laid.
enum class Order : std::uint8_t { kMemoryFirst, kLargestFirst };

struct PackingOptions {
  Target target;
  double slack = 0.01;  // how far above the target ranks may be filled before tables are cut
  Order order = Order::kMemoryFirst;
  double part_share = 1;  // tables are cut beforehand into parts of at most this share of a rank …
  bool fills_ranks = false;  // … or, if wider than a rank, into parts that fill ranks, and a rest;
  double cut_budget = 0;     // cuts of a class cost at most this share of all ranks' time
  double memory_slack = 0;  // how far above the mean memory may be where it is waited for by itself
  std::uint64_t seed = 0;   // of another order of parts that are about alike; 0: exact
};

/// The next of a row of numbers that looks random and is the same everywhere (splitmix64).
inline std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

class Packing {
 public:
  explicit Packing(const Options& options);

  /// Lays all tables, `choices` by table. False if memory does not suffice.
  bool fill(const std::vector<Choice>& choices, const PackingOptions& how);
  /// Moves, exchanges and cuts parts of the fullest rank while that helps; `limit` steps at most.
  void level(const Target& target, int limit);
  /// The mean of all ranks as a target of links and memory apart; memory may be so much above it.
  Target mean_target(double memory_slack) const;

  const std::vector<Load>& loads() const { return loads_; }
  /// Slowest rank; or slowest links and slowest memory together.
  double seconds(bool is_sum) const;

  std::vector<Part> parts;  // some may have no units
  std::vector<HostPart> host_parts;
  std::vector<Uniform> uniform;

 private:
  struct Item {
    int table = 0;
    int units = 0;
  };
  const TableClass& class_of(int table) const {
    return options_
        ->classes[static_cast<std::size_t>(options_->class_of[static_cast<std::size_t>(table)])];
  }
  const Load& part_load(int table, int units, int rank) const {
    return class_of(table).parts[static_cast<std::size_t>(
        options_->kind_of[static_cast<std::size_t>(rank)])][static_cast<std::size_t>(units)];
  }
  double capacity(int rank) const { return capacities_[static_cast<std::size_t>(rank)]; }
  bool may_lie(int table, int rank) const;
  bool meets(int table, int rank) const;
  int part_on(int table, int rank) const;  // -1: none
  void lay(int table, int units, int rank);
  void change(int part, int units);
  bool fill_hosts(const std::vector<Choice>& choices, const PackingOptions& how);
  bool fill_parts(std::vector<Item> items, const PackingOptions& how);
  bool fill_phases(const std::vector<Item>& heavy, const std::vector<Item>& others,
                   const PackingOptions& how);
  bool lay_or_cut(Item item, const PackingOptions& how, bool by_bytes);
  bool improve_once(const Target& target, int fullest, double most);
  bool exchange_once(const Target& target, int fullest, double most);

  const Options* options_;
  std::vector<double> capacities_;
  void find_emptiest(const Target& target, const Load& fullest);
  const std::vector<int>& kinds_on(int rank, std::vector<int>& found);
  std::vector<Load> loads_;
  std::vector<int> seen_;  // by class: where it was seen last
  int seeing_ = 0;
  std::vector<std::pair<double, int>> emptiest_;  // ranks worth moving to, with their fullness
  std::vector<std::vector<int>> on_rank_;         // parts
  std::vector<std::vector<int>> of_table_;        // parts
};

}  // namespace tessera::planner
