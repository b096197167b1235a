// gnn/partitioner.h — partitions by name, for command lines.

#pragma once

#include <string>
#include <vector>

#include "gnn/neighbours.h"
#include "tessera/graph_parallel/partition.h"

namespace tessera::workloads::gnn {

/// "contiguous", "morton", "hilbert", "bisection", and "metis" where the build has it.
std::vector<std::string> partitioner_names();

/// Makes a partition of atoms. `weights` may be undefined. Throws ValueError for a name not known.
graph_parallel::Partition make_partition(const std::string& name, const at::Tensor& positions,
                                         const Box& box, const at::Tensor& edge_index,
                                         int num_parts, const at::Tensor& weights = {});

}  // namespace tessera::workloads::gnn
