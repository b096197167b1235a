// src/graph_parallel/space.h — positions as the spatial partitioners see them.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tessera/graph_parallel/partition.h"

namespace tessera::graph_parallel::detail {

/// Coordinates along up to three axes, in lengths, wrapped into the cell where it repeats.
struct Space {
  std::int64_t num_nodes = 0;
  std::vector<std::array<double, 3>> coordinates;
  std::array<bool, 3> wraps{};
  std::array<double, 3> lengths{};  // of the cell; of the bounding box without one
  std::vector<double> weights;      // empty: all equal

  double weight_of(std::int64_t node) const { return weights.empty() ? 1.0 : weights[node]; }
};

/// Checks the arguments of `operation` and reads them. Throws ValueError.
Space space_of(const char* operation, const at::Tensor& positions, int num_parts,
               const SpatialOptions& options);

/// The node's place on a curve through the space; axes share one scale.
std::vector<std::uint64_t> morton_keys(const Space& space);
std::vector<std::uint64_t> hilbert_keys(const Space& space);

/// Nodes by key; equal keys by coordinates, then by number.
std::vector<std::int64_t> order_by(const std::vector<std::uint64_t>& keys, const Space& space);

/// Cuts a sequence of nodes into parts of even size or even weight: the first place of each part,
/// and the end.
std::vector<std::int64_t> cut_sequence(const std::vector<std::int64_t>& order, const Space& space,
                                       int num_parts);

/// The owner of each node.
std::vector<int> bisect(const Space& space, int num_parts);

}  // namespace tessera::graph_parallel::detail
