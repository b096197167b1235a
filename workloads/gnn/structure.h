// gnn/structure.h — one arrangement of atoms with its labels.

#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "gnn/neighbours.h"

namespace tessera::workloads::gnn {

struct Structure {
  at::Tensor positions;  // [atoms, 3], double
  Box box;
  at::Tensor types;       // [atoms], from 0
  at::Tensor energy;      // []; like the next two undefined where it is not known
  at::Tensor forces;      // [atoms, 3]
  at::Tensor stress;      // [3, 3], energy per volume
  Neighbours neighbours;  // within the cutoff

  std::int64_t num_atoms() const { return positions.size(0); }
};

struct StructureOptions {
  std::int64_t num_atoms = 216;
  double spacing = 1.15;  // of the lattice; a pair of like atoms rests at 1.12
  double jitter = 0.03;   // how far atoms are off their sites
  double cutoff = 2.2;
};

/// A cubic lattice with vacancies, random types and atoms off their sites, in a periodic box. The
/// same for equal seeds. Not collective. Throws ValueError without atoms.
Structure make_structure(const StructureOptions& options, std::uint64_t seed);

}  // namespace tessera::workloads::gnn
