// gnn/neighbours.h — which atoms see each other, across the borders of a periodic box.

#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera::workloads::gnn {

/// A box: lattice vectors as rows, and along which of them it repeats.
struct Box {
  at::Tensor cell;  // [3, 3], double
  std::array<bool, 3> is_periodic{true, true, true};
};

/// Directed edges. The vector from target to source is
/// `positions[source] + shifts @ cell - positions[target]`.
struct Neighbours {
  at::Tensor edge_index;  // [2, edges]: sources, targets; ordered by target
  at::Tensor shifts;      // [edges, 3], whole numbers of lattice vectors, double
};

/// All pairs closer than `cutoff`, in both directions, through any number of images. Takes time
/// linear in the atoms. Throws ValueError for a cutoff that is not positive.
Neighbours within(const at::Tensor& positions, const Box& box, double cutoff);

/// For each atom its `count` nearest images of atoms, itself excluded.
Neighbours nearest(const at::Tensor& positions, const Box& box, std::int64_t count);

}  // namespace tessera::workloads::gnn
