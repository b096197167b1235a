// tessera/graph_parallel/partition.h — which rank owns which node of a graph.
//
// A Partition is the one source of sizes, offsets and orders: scatter, gather, halos and output
// heads all ask it, so they cannot disagree.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::graph_parallel {

/// What a spatial partitioner may know besides the positions.
struct SpatialOptions {
  /// [3, 3], one lattice vector per row, for nodes in a crystal or a box. Undefined: open space.
  at::Tensor cell;
  /// Along which lattice vectors the cell repeats. Positions outside the cell are wrapped there.
  std::array<bool, 3> is_periodic{true, true, true};
  /// [num_nodes], work per node, e.g. its number of edges. Undefined: all equal.
  at::Tensor weights;
};

/// An owner for every node, and the order in which an owner keeps its nodes. Immutable; copies are
/// cheap and may be shared between threads. Nothing here is collective: every rank makes the same
/// partition from the same input.
///
/// Without weights, part sizes differ by at most one, the larger parts first. With weights, each
/// part gets about the same weight, and no part is empty if there are enough nodes.
class TESSERA_API Partition {
 public:
  /// Consecutive ids, `num_parts` parts. No table is kept.
  static Partition contiguous(std::int64_t num_nodes, int num_parts);
  /// Consecutive ids, part p has `sizes[p]`.
  static Partition contiguous(const std::vector<std::int64_t>& sizes);

  /// `owners[v]` owns node v; parts keep their nodes in ascending order. Throws ValueError naming
  /// the node if an owner is not in [0, num_parts).
  static Partition from_owners(const at::Tensor& owners, int num_parts);

  /// Cuts a Morton (Z-order) curve through `positions`, [num_nodes, 3]. All axes share one scale,
  /// so that flat cells keep their locality.
  static Partition morton(const at::Tensor& positions, int num_parts,
                          const SpatialOptions& options = {});
  /// The same with a Hilbert curve, which has no jumps.
  static Partition hilbert(const at::Tensor& positions, int num_parts,
                           const SpatialOptions& options = {});
  /// Halves the nodes again and again, each time across the axis whose cut exposes the least area.
  /// The first cut of a periodic axis exposes two faces, and starts in the widest gap.
  static Partition recursive_bisection(const at::Tensor& positions, int num_parts,
                                       const SpatialOptions& options = {});
  /// Asks METIS for few cut edges. `edge_index` is [2, num_edges], in either or both directions.
  /// Throws ValueError if this build has no METIS (see has_metis).
  static Partition metis(std::int64_t num_nodes, const at::Tensor& edge_index, int num_parts,
                         const at::Tensor& weights = {});
  static bool has_metis() noexcept;

  std::int64_t num_nodes() const noexcept;
  int num_parts() const noexcept;
  bool is_contiguous() const noexcept;

  /// Nodes per part.
  const std::vector<std::int64_t>& sizes() const noexcept;
  /// First place of each part in the order of `permutation`, and num_nodes at the end.
  const std::vector<std::int64_t>& offsets() const noexcept;

  /// [num_nodes]: the owner of each node.
  at::Tensor owners() const;
  /// [num_nodes]: the nodes, part after part. `x.index_select(0, permutation())` makes the parts
  /// contiguous.
  at::Tensor permutation() const;
  /// [num_nodes]: the place of each node in `permutation`; undoes it.
  at::Tensor inverse() const;
  /// The nodes of one part, in the part's order. Throws IndexError for a part there is not.
  at::Tensor nodes_of(int part) const;

  /// The owners of `nodes`, any shape. Throws ValueError for a node there is not.
  at::Tensor owner_of(const at::Tensor& nodes) const;

  /// Equal for equal partitions: what ranks compare.
  std::int64_t digest() const noexcept;
  /// "4096 nodes in 16 parts of 256 to 256".
  std::string describe() const;

 private:
  struct State;
  explicit Partition(std::shared_ptr<const State> state);
  static Partition from_order(std::vector<int> owners, const std::vector<std::int64_t>& order,
                              int num_parts);
  std::shared_ptr<const State> state_;
};

}  // namespace tessera::graph_parallel
