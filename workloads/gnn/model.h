// gnn/model.h — a message-passing network for energies, with forces and stress as its derivatives.
//
// The network is a sum of atomic energies after a few rounds of messages along edges. Over several
// ranks, each owns some atoms and the edges that end there; everything the ranks share (positions,
// strain, parameters) enters through regions::copy, so that energy, forces, stress and gradients of
// any order come out whole on every rank.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "gnn/structure.h"
#include "tessera/graph_parallel/halo_plan.h"
#include "tessera/graph_parallel/neighbour_sum.h"

namespace tessera::workloads::gnn {

struct ModelOptions {
  std::int64_t num_features = 32;
  std::int64_t num_layers = 2;
  std::int64_t num_basis = 8;  // radial functions per edge
  std::int64_t num_types = 2;
  double cutoff = 2.2;
  bool overlap = true;  // compute interior messages while halo rows travel
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
};

/// A structure cut for this rank: its plan, and the geometry of its edges.
struct LocalGraph {
  graph_parallel::HaloPlan plan;
  graph_parallel::Adjacency interior;  // from owned rows
  graph_parallel::Adjacency boundary;  // from halo rows
  std::int64_t num_atoms = 0;
  at::Tensor nodes;   // [local], global ids
  at::Tensor types;   // [owned]
  at::Tensor edges;   // [2, edges], local; interior first, then boundary
  at::Tensor shifts;  // [edges, 3], in the order of `edges`
  std::int64_t num_interior = 0;
  double mean_degree = 1;  // of the whole graph
};

/// Collective over `group`: every rank brings the same structure and partition.
LocalGraph make_local_graph(const Structure& structure, const graph_parallel::Partition& partition,
                            const comm::Group& group,
                            const graph_parallel::HaloOptions& options = {.is_symmetric = true});

struct Prediction {
  at::Tensor energy;  // []
  at::Tensor forces;  // [atoms, 3]
  at::Tensor stress;  // [3, 3], energy per volume; undefined unless asked for
};

class Model {
 public:
  /// The same parameters for equal seeds, on every rank. Not collective.
  Model(const ModelOptions& options, std::uint64_t seed);

  const ModelOptions& options() const noexcept { return options_; }
  /// All parameters in one tensor, a leaf that requires a gradient.
  at::Tensor& parameters() noexcept { return parameters_; }

  /// The energy of a structure; `positions`, [atoms, 3], `cell`, [3, 3], and `strain`, [3, 3], are
  /// Replicated, and so is the result. Collective over the plan's group.
  at::Tensor energy(const LocalGraph& graph, const at::Tensor& positions, const at::Tensor& cell,
                    const at::Tensor& strain) const;

  /// Energy, forces and, if asked for, stress. With `create_graph` they can be differentiated
  /// again. Collective over the plan's group.
  Prediction predict(const LocalGraph& graph, const at::Tensor& positions, const at::Tensor& cell,
                     bool with_stress, bool create_graph) const;

 private:
  struct Slot {
    std::vector<std::int64_t> shape;
    std::int64_t first;
  };
  std::vector<at::Tensor> views_of(const at::Tensor& flat) const;

  ModelOptions options_;
  std::vector<Slot> slots_;
  at::Tensor parameters_;
};

}  // namespace tessera::workloads::gnn
