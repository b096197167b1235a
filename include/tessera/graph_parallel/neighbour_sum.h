// tessera/graph_parallel/neighbour_sum.h — messages along edges, summed where they arrive.
//
// The sum of `rows[source] * weight` over the edges of each target, in one pass: no tensor of the
// size of edges times columns is made for the messages. Nothing here communicates.

#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::graph_parallel {

/// Edges between two sets of rows, sorted by either end. Immutable; copies are cheap.
class TESSERA_API Adjacency {
 public:
  /// `edge_index` is [2, num_edges]: rows of sources, rows of targets. Throws ValueError for an
  /// edge to a row there is not.
  Adjacency(const at::Tensor& edge_index, std::int64_t num_sources, std::int64_t num_targets);

  std::int64_t num_sources() const noexcept;
  std::int64_t num_targets() const noexcept;
  std::int64_t num_edges() const noexcept;
  /// The edges as given.
  const at::Tensor& edge_index() const;

  /// The same edges, turned around.
  Adjacency reversed() const;

  struct State;
  const State& state() const noexcept { return *state_; }

 private:
  explicit Adjacency(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

/// Returns [num_targets, columns]: for each target, the sum over its edges of the source's row
/// times the edge's weight. `rows` is [num_sources, columns]; `weights` is [num_edges, columns],
/// [num_edges, 1] or undefined.
///
/// Differentiable any number of times, in rows and weights. Sums run in the order of the edges
/// given. Throws ValueError for shapes or types that do not fit.
TESSERA_API at::Tensor neighbour_sum(const at::Tensor& rows, const Adjacency& adjacency,
                                     const at::Tensor& weights = {});

}  // namespace tessera::graph_parallel
