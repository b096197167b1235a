#include "planner/exhaustive.h"

#include <algorithm>

#include "planner/places.h"

namespace tessera::planner {
namespace {

constexpr int kMostWays = 4096;        // of one table
constexpr int kMostNodes = 2'000'000;  // of the tree

// One way to lay one table: what every rank gets.
struct Layout {
  std::vector<std::pair<int, int>> parts;  // rank, units
  std::vector<std::pair<int, int>> hosts;  // host, units
  int uniform = -1;
  std::vector<Load> loads;
  double seconds = 0;  // of all ranks
};

class Tree {
 public:
  Tree(const Options& options, bool is_sum, double seconds)
      : options_(options), is_sum_(is_sum), best_(seconds) {}

  std::optional<Packing> run() {
    std::size_t product = 1;
    for (const TableClass& one : options_.classes) {
      layouts_.push_back(layouts_of(one));
      if (layouts_.back().empty()) return std::nullopt;
    }
    for (int c : options_.class_of) {
      product *= layouts_[at(c)].size();
      if (product > 50'000'000) return std::nullopt;
    }
    loads_.assign(at(options_.num_ranks()), {});
    chosen_.assign(options_.tables.size(), nullptr);
    rest_.assign(options_.tables.size() + 1, 0);
    for (int t = static_cast<int>(options_.tables.size()) - 1; t >= 0; --t) {
      double least = kNoLimit;
      for (const Layout& one : layouts_[at(options_.class_of[at(t)])]) {
        least = std::min(least, one.seconds);
      }
      rest_[at(t)] = rest_[at(t) + 1] + least;
    }
    visit(0, 0);
    if (found_.empty()) return std::nullopt;
    Packing packing(options_);
    for (int t = 0; t < static_cast<int>(found_.size()); ++t) {
      for (const auto& [rank, units] : found_[at(t)]->parts) {
        packing.parts.push_back({t, rank, units});
      }
      for (const auto& [host, units] : found_[at(t)]->hosts) {
        packing.host_parts.push_back({t, host, units});
      }
      if (found_[at(t)]->uniform >= 0) packing.uniform.push_back({t, found_[at(t)]->uniform});
    }
    return packing;
  }

 private:
  // All ways to give `units` to places `from` … `count`.
  template <class Use>
  void split(int units, int count, int from, std::vector<std::pair<int, int>>& given, Use use) {
    if (is_too_much_) return;
    if (units == 0) {
      use(given);
      return;
    }
    for (int place = from; place < count; ++place) {
      for (int u = units; u >= 1; --u) {
        given.emplace_back(place, u);
        split(units - u, count, place + 1, given, use);
        given.pop_back();
      }
    }
  }

  std::vector<Layout> layouts_of(const TableClass& one) {
    std::vector<Layout> layouts;
    const int world = options_.num_ranks();
    const int local = options_.ranks_per_host;
    const auto add = [&](Layout layout) {
      layout.loads.assign(at(world), {});
      const auto give = [&](int rank, const PartLoads& loads, int units) {
        const Load& load = loads[at(options_.kind_of[at(rank)])][at(units)];
        Load& sum = layout.loads[at(rank)];
        sum = {sum.links + load.links, sum.local + load.local, sum.bytes + load.bytes};
        layout.seconds += load.seconds();
      };
      const auto give_rows = [&](const RowParts& rows, int first, int count, int units) {
        for (int i = 0; i < count; ++i) {
          if (const PartLoads* loads = rows.on(i)) give(first + i, *loads, units);
        }
      };
      for (const auto& [rank, units] : layout.parts) give(rank, one.parts, units);
      for (const auto& [host, units] : layout.hosts)
        give_rows(one.host_parts, host * local, local, units);
      if (layout.uniform >= 0) give_rows(one.uniform[at(layout.uniform)].parts, 0, world, 1);
      for (int r = 0; r < world; ++r) {
        if (layout.loads[at(r)].bytes > 0 && layout.loads[at(r)].bytes > options_.capacity(r)) {
          return;
        }
      }
      layouts.push_back(std::move(layout));
      if (layouts.size() > kMostWays) is_too_much_ = true;
    };
    std::vector<std::pair<int, int>> given;
    if (one.has_parts) {
      split(one.units, world, 0, given, [&](const std::vector<std::pair<int, int>>& parts) {
        if (!one.can_cut && parts.size() > 1) return;
        for (const auto& [rank, units] : parts) {
          if (!one.is_rank_allowed.empty() && one.is_rank_allowed[at(rank)] == 0) return;
          if (one.in_one_host && rank / local != parts[0].first / local) return;
        }
        add({parts});
      });
    }
    if (one.has_hosts) {
      split(one.units, world / local, 0, given, [&](const std::vector<std::pair<int, int>>& parts) {
        if (!one.can_cut_hosts && parts.size() > 1) return;
        for (const auto& [host, units] : parts) {
          if (std::find(one.hosts.begin(), one.hosts.end(), host) == one.hosts.end()) return;
        }
        Layout layout;
        layout.hosts = parts;
        add(std::move(layout));
      });
    }
    for (int i = 0; i < static_cast<int>(one.uniform.size()); ++i) {
      Layout layout;
      layout.uniform = i;
      add(std::move(layout));
    }
    if (is_too_much_) return {};
    std::stable_sort(layouts.begin(), layouts.end(),
                     [](const Layout& a, const Layout& b) { return a.seconds < b.seconds; });
    return layouts;
  }

  void visit(int table, double spent) {
    if (++nodes_ > kMostNodes) return;
    if (table == static_cast<int>(options_.tables.size())) {
      double total = 0;
      double links = 0;
      double local = 0;
      for (const Load& load : loads_) {
        total = std::max(total, load.seconds());
        links = std::max(links, load.links);
        local = std::max(local, load.local);
      }
      const double seconds = is_sum_ ? total : links + local;
      if (seconds < best_ * (1 - 1e-12)) {
        best_ = seconds;
        found_ = chosen_;
      }
      return;
    }
    for (const Layout& one : layouts_[at(options_.class_of[at(table)])]) {
      // Even a perfect balance of the rest would not be faster.
      if ((spent + one.seconds + rest_[at(table) + 1]) / options_.num_ranks() >= best_) return;
      const std::vector<Load> before = loads_;
      bool fits = true;
      for (int r = 0; r < options_.num_ranks(); ++r) {
        const Load& add = one.loads[at(r)];
        Load& load = loads_[at(r)];
        load = {load.links + add.links, load.local + add.local, load.bytes + add.bytes};
        fits = fits && (load.bytes == 0 || load.bytes <= options_.capacity(r)) &&
               load.seconds() < best_;
      }
      if (fits) {
        chosen_[at(table)] = &one;
        visit(table + 1, spent + one.seconds);
      }
      loads_ = before;
    }
  }

  const Options& options_;
  bool is_sum_;
  double best_;
  bool is_too_much_ = false;
  int nodes_ = 0;
  std::vector<std::vector<Layout>> layouts_;  // of classes
  std::vector<double> rest_;                  // least seconds of tables from here on
  std::vector<Load> loads_;
  std::vector<const Layout*> chosen_;
  std::vector<const Layout*> found_;
};

}  // namespace

std::optional<Packing> search_exhaustively(const Options& options, bool is_sum, double seconds) {
  if (options.tables.size() > 12 || options.num_ranks() > 8) return std::nullopt;
  // Its layouts of single tables know nothing of others.
  for (const std::vector<int>& others : options.apart) {
    if (!others.empty()) return std::nullopt;
  }
  return Tree(options, is_sum, seconds).run();
}

}  // namespace tessera::planner
