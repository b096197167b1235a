#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "graph_parallel/space.h"
#include "tessera/regions/gather_scatter.h"

namespace tessera::graph_parallel::detail {
namespace {

using Nodes = std::span<std::int64_t>;

// Within a tenth of the best, an axis that is cut already wins over one that still wraps: the parts
// then have fewer edges and corners, where halos of several neighbours overlap.
constexpr double kTie = 0.9;

// An eighth of the cell without a node is no accident of a filled cell.
constexpr double kWideGap = 0.125;

class Bisection {
 public:
  Bisection(const Space& space, int num_parts)
      : space_(space),
        coordinates_(space.coordinates),
        sizes_(regions::even_sizes(space.num_nodes, num_parts)),
        owners_(space.num_nodes, 0) {}

  std::vector<int> run() {
    std::vector<std::int64_t> nodes(space_.num_nodes);
    std::iota(nodes.begin(), nodes.end(), std::int64_t{0});
    split(nodes, 0, static_cast<int>(sizes_.size()), space_.wraps);
    return std::move(owners_);
  }

 private:
  void split(Nodes nodes, int first_part, int num_parts, std::array<bool, 3> wraps) {
    if (num_parts == 1) {
      for (const std::int64_t node : nodes) owners_[node] = first_part;
      return;
    }
    for (int axis = 0; axis < 3; ++axis) {
      // A wide gap cuts the axis already: what is left is an interval with one face per cut.
      if (wraps[axis] && widest_gap(nodes, axis).width > kWideGap * space_.lengths[axis]) {
        open(nodes, axis);
        wraps[axis] = false;
      }
    }
    const int axis = best_axis(nodes, wraps);
    if (wraps[axis]) {
      open(nodes, axis);
      wraps[axis] = false;
    }
    sort(nodes, axis);
    const int num_left = num_parts / 2;
    const std::int64_t place =
        std::clamp<std::int64_t>(cut_place(nodes, first_part, num_left, num_parts), 0,
                                 static_cast<std::int64_t>(nodes.size()));
    split(nodes.first(place), first_part, num_left, wraps);
    split(nodes.subspan(place), first_part + num_left, num_parts - num_left, wraps);
  }

  // The axis whose cut exposes the least area: faces times the product of the other extents, which
  // is least where extent over faces is greatest.
  int best_axis(Nodes nodes, const std::array<bool, 3>& wraps) const {
    std::array<double, 3> score{};
    for (int axis = 0; axis < 3; ++axis) {
      score[axis] = wraps[axis] ? space_.lengths[axis] / 2 : extent_of(nodes, axis);
    }
    const double best = *std::max_element(score.begin(), score.end());
    int chosen = -1;
    for (int axis = 0; axis < 3; ++axis) {
      if (score[axis] < kTie * best) continue;
      const bool is_better = chosen < 0 || (wraps[chosen] && !wraps[axis]) ||
                             (wraps[chosen] == wraps[axis] && score[axis] > score[chosen]);
      if (is_better) chosen = axis;
    }
    return chosen;
  }

  double extent_of(Nodes nodes, int axis) const {
    if (nodes.empty()) return 0;
    double low = coordinates_[nodes[0]][axis];
    double high = low;
    for (const std::int64_t node : nodes) {
      low = std::min(low, coordinates_[node][axis]);
      high = std::max(high, coordinates_[node][axis]);
    }
    return high - low;
  }

  struct Gap {
    double width;
    double end;  // where the nodes go on behind it
  };

  Gap widest_gap(Nodes nodes, int axis) const {
    const double length = space_.lengths[axis];
    if (nodes.empty()) return {length, 0};
    std::vector<double> places;
    places.reserve(nodes.size());
    for (const std::int64_t node : nodes) places.push_back(coordinates_[node][axis]);
    std::sort(places.begin(), places.end());
    Gap widest{places.front() + length - places.back(), places.front()};
    for (std::size_t i = 1; i < places.size(); ++i) {
      if (places[i] - places[i - 1] > widest.width) {
        widest = {places[i] - places[i - 1], places[i]};
      }
    }
    return widest;
  }

  // Starts a periodic axis behind its widest gap, so that what hangs together across the border of
  // the cell stays together.
  void open(Nodes nodes, int axis) {
    const double origin = widest_gap(nodes, axis).end;
    for (const std::int64_t node : nodes) {
      double& place = coordinates_[node][axis];
      place = place >= origin ? place - origin : place - origin + space_.lengths[axis];
    }
  }

  void sort(Nodes nodes, int axis) const {
    std::sort(nodes.begin(), nodes.end(), [&](std::int64_t a, std::int64_t b) {
      if (coordinates_[a][axis] != coordinates_[b][axis]) {
        return coordinates_[a][axis] < coordinates_[b][axis];
      }
      return std::pair(coordinates_[a], a) < std::pair(coordinates_[b], b);
    });
  }

  std::int64_t cut_place(Nodes nodes, int first_part, int num_left, int num_parts) const {
    if (space_.weights.empty()) {
      return std::accumulate(sizes_.begin() + first_part, sizes_.begin() + first_part + num_left,
                             std::int64_t{0});
    }
    double total = 0;
    for (const std::int64_t node : nodes) total += space_.weights[node];
    const double wanted = total * num_left / num_parts;
    const auto num_nodes = static_cast<std::int64_t>(nodes.size());
    std::int64_t place = 0;
    for (double sum = 0; place < num_nodes; ++place) {
      const double weight = space_.weights[nodes[place]];
      if (sum + weight / 2 >= wanted) break;
      sum += weight;
    }
    const std::int64_t low = std::min<std::int64_t>(num_left, num_nodes);
    const std::int64_t high = std::max(num_nodes - (num_parts - num_left), low);
    return std::clamp(place, low, std::min(high, num_nodes));
  }

  const Space& space_;
  std::vector<std::array<double, 3>> coordinates_;
  std::vector<std::int64_t> sizes_;
  std::vector<int> owners_;
};

}  // namespace

std::vector<int> bisect(const Space& space, int num_parts) {
  return Bisection(space, num_parts).run();
}

}  // namespace tessera::graph_parallel::detail
