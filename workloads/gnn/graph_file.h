// gnn/graph_file.h — graphs from files.
//
// Two formats. Extended XYZ: the number of atoms, a line with Lattice="nine numbers" and optionally
// pbc="T T F", then a name and three coordinates per atom. Edge list: two numbers per line, source
// and target; lines that start with # are comments.

#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "gnn/neighbours.h"

namespace tessera::workloads::gnn {

struct GraphFile {
  std::int64_t num_nodes = 0;
  at::Tensor positions;  // [nodes, 3]; undefined in an edge list
  Box box;
  at::Tensor edge_index;  // [2, edges]; undefined for atoms
};

/// Reads a file, an edge list if its first line holds two numbers. Throws ValueError naming the
/// line.
GraphFile read_graph_file(const std::string& path);

}  // namespace tessera::workloads::gnn
