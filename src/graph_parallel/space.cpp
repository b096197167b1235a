#include "graph_parallel/space.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/Functions.h>

#include "tessera/core/check.h"
#include "tessera/regions/gather_scatter.h"

namespace tessera::graph_parallel::detail {
namespace {

constexpr int kBits = 21;  // three axes fill 63 bits of a key

at::Tensor checked_cell(const char* operation, const at::Tensor& cell) {
  TESSERA_CHECK_VALUE(cell.dim() == 2 && cell.size(0) == 3 && cell.size(1) == 3, "graph.",
                      operation, ": the cell has shape ", cell.sizes(),
                      ". Give three lattice vectors as rows.");
  const at::Tensor plain = cell.detach().to(at::kCPU, at::kDouble);
  const auto volume = std::abs(at::det(plain).item<double>());
  TESSERA_CHECK_VALUE(volume > 0 && std::isfinite(volume), "graph.", operation,
                      ": the cell has volume ", volume,
                      ". Its lattice vectors must be independent.");
  return plain;
}

void read_weights(const char* operation, const at::Tensor& given, Space& space) {
  if (!given.defined()) return;
  TESSERA_CHECK_VALUE(given.dim() == 1 && given.size(0) == space.num_nodes, "graph.", operation,
                      ": the weights have shape ", given.sizes(), " for ", space.num_nodes,
                      " nodes.");
  const at::Tensor weights = given.detach().to(at::kCPU, at::kDouble).contiguous();
  const double* values = weights.const_data_ptr<double>();
  space.weights.assign(values, values + space.num_nodes);
  for (std::int64_t node = 0; node < space.num_nodes; ++node) {
    TESSERA_CHECK_VALUE(space.weights[node] >= 0 && std::isfinite(space.weights[node]), "graph.",
                        operation, ": node ", node, " has weight ", space.weights[node],
                        ". Weights are finite and not negative.");
  }
}

// A number in [0, 2^21) per axis, with the longest axis filling the range.
std::vector<std::array<std::uint32_t, 3>> grid_of(const Space& space) {
  std::array<double, 3> low{};
  double scale = 0;
  for (int axis = 0; axis < 3; ++axis) {
    double high = 0;
    if (space.num_nodes > 0) low[axis] = high = space.coordinates[0][axis];
    for (const auto& point : space.coordinates) {
      low[axis] = std::min(low[axis], point[axis]);
      high = std::max(high, point[axis]);
    }
    if (space.wraps[axis]) {
      low[axis] = 0;
      high = space.lengths[axis];
    }
    scale = std::max(scale, high - low[axis]);
  }
  const double factor = scale > 0 ? (double{1 << kBits} - 1) / scale : 0;
  std::vector<std::array<std::uint32_t, 3>> grid(space.num_nodes);
  for (std::int64_t node = 0; node < space.num_nodes; ++node) {
    for (int axis = 0; axis < 3; ++axis) {
      grid[node][axis] =
          static_cast<std::uint32_t>((space.coordinates[node][axis] - low[axis]) * factor);
    }
  }
  return grid;
}

std::uint64_t interleave(const std::array<std::uint32_t, 3>& cell) {
  std::uint64_t key = 0;
  for (int bit = kBits - 1; bit >= 0; --bit) {
    for (const std::uint32_t axis : cell) key = key << 1 | (axis >> bit & 1);
  }
  return key;
}

// Walks the octants from the largest to the smallest, turning the frame as the curve does, and
// leaves the curve's index in transposed form: its bits are spread over the three numbers. The
// construction is J. Skilling's, "Programming the Hilbert curve", AIP Conf. Proc. 707 (2004).
std::array<std::uint32_t, 3> along_hilbert(std::array<std::uint32_t, 3> cell) {
  for (std::uint32_t bit = 1U << (kBits - 1); bit > 1; bit >>= 1) {
    const std::uint32_t below = bit - 1;
    for (auto& axis : cell) {
      if ((axis & bit) != 0) {
        cell[0] ^= below;
      } else {
        const std::uint32_t swapped = (cell[0] ^ axis) & below;
        cell[0] ^= swapped;
        axis ^= swapped;
      }
    }
  }
  cell[1] ^= cell[0];
  cell[2] ^= cell[1];
  std::uint32_t parity = 0;
  for (std::uint32_t bit = 1U << (kBits - 1); bit > 1; bit >>= 1) {
    if ((cell[2] & bit) != 0) parity ^= bit - 1;
  }
  for (auto& axis : cell) axis ^= parity;
  return cell;
}

}  // namespace

Space space_of(const char* operation, const at::Tensor& positions, int num_parts,
               const SpatialOptions& options) {
  TESSERA_CHECK_VALUE(num_parts > 0, "graph.", operation, ": ", num_parts,
                      " parts were asked for. Ask for at least one.");
  TESSERA_CHECK_VALUE(positions.defined() && positions.dim() == 2 && positions.size(1) == 3,
                      "graph.", operation, ": the positions have shape ",
                      positions.defined() ? positions.sizes() : at::IntArrayRef{},
                      ". Give one row of three coordinates per node.");
  at::Tensor places = positions.detach().to(at::kCPU, at::kDouble);
  TESSERA_CHECK_VALUE(at::isfinite(places).all().item<bool>(), "graph.", operation,
                      ": a position is not finite.");
  Space space;
  space.num_nodes = places.size(0);
  read_weights(operation, options.weights, space);
  if (options.cell.defined()) {
    const at::Tensor cell = checked_cell(operation, options.cell);
    const at::Tensor lengths = cell.norm(2, 1);
    places = at::linalg_solve(cell.t(), places.t()).t();
    for (int axis = 0; axis < 3; ++axis) {
      space.wraps[axis] = options.is_periodic[axis];
      space.lengths[axis] = lengths[axis].item<double>();
      if (space.wraps[axis]) places.select(1, axis).sub_(places.select(1, axis).floor());
    }
    places = places * lengths;
  }
  places = places.contiguous();
  const double* values = places.const_data_ptr<double>();
  space.coordinates.resize(space.num_nodes);
  for (auto& point : space.coordinates) {
    std::copy_n(values, 3, point.begin());
    values += 3;
  }
  return space;
}

std::vector<std::uint64_t> morton_keys(const Space& space) {
  std::vector<std::uint64_t> keys;
  keys.reserve(space.num_nodes);
  for (const auto& cell : grid_of(space)) keys.push_back(interleave(cell));
  return keys;
}

std::vector<std::uint64_t> hilbert_keys(const Space& space) {
  std::vector<std::uint64_t> keys;
  keys.reserve(space.num_nodes);
  for (const auto& cell : grid_of(space)) keys.push_back(interleave(along_hilbert(cell)));
  return keys;
}

std::vector<std::int64_t> order_by(const std::vector<std::uint64_t>& keys, const Space& space) {
  std::vector<std::int64_t> order(space.num_nodes);
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    if (keys[a] != keys[b]) return keys[a] < keys[b];
    if (space.coordinates[a] != space.coordinates[b]) {
      return space.coordinates[a] < space.coordinates[b];
    }
    return a < b;
  });
  return order;
}

std::vector<std::int64_t> cut_sequence(const std::vector<std::int64_t>& order, const Space& space,
                                       int num_parts) {
  const auto num_nodes = static_cast<std::int64_t>(order.size());
  std::vector<std::int64_t> first(num_parts + 1, 0);
  if (space.weights.empty()) {
    const auto sizes = regions::even_sizes(num_nodes, num_parts);
    std::partial_sum(sizes.begin(), sizes.end(), first.begin() + 1);
    return first;
  }
  std::vector<double> sums(num_nodes);
  double total = 0;
  for (std::int64_t i = 0; i < num_nodes; ++i) {
    const double weight = space.weight_of(order[i]);
    sums[i] = total + weight / 2;  // a node belongs where its middle is
    total += weight;
  }
  for (int part = 1; part < num_parts; ++part) {
    const auto place =
        std::lower_bound(sums.begin(), sums.end(), total * part / num_parts) - sums.begin();
    // At least one node for every part, as long as there are enough.
    const std::int64_t low = std::min(first[part - 1] + 1, num_nodes);
    const std::int64_t high = std::max(num_nodes - (num_parts - part), low);
    first[part] = std::clamp<std::int64_t>(place, low, std::min(high, num_nodes));
  }
  first[num_parts] = num_nodes;
  return first;
}

}  // namespace tessera::graph_parallel::detail
