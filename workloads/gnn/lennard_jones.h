// gnn/lennard_jones.h — the labels: a Lennard-Jones-like energy of two kinds of atoms.

#pragma once

#include <ATen/core/Tensor.h>

#include "gnn/neighbours.h"

namespace tessera::workloads::gnn {

/// Falls from 1 at 0 to 0 at the cutoff, with two continuous derivatives.
at::Tensor envelope(const at::Tensor& distances, double cutoff);

/// The energy of all pairs of `neighbours`, which holds both directions. Differentiable in
/// `positions` and `cell`.
at::Tensor lennard_jones(const at::Tensor& positions, const at::Tensor& cell,
                         const at::Tensor& types, const Neighbours& neighbours, double cutoff);

}  // namespace tessera::workloads::gnn
