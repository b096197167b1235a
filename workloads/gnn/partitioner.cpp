#include "gnn/partitioner.h"

#include "tessera/core/check.h"

namespace tessera::workloads::gnn {

using graph_parallel::Partition;

std::vector<std::string> partitioner_names() {
  std::vector<std::string> names{"contiguous", "morton", "hilbert", "bisection"};
  if (Partition::has_metis()) names.emplace_back("metis");
  return names;
}

Partition make_partition(const std::string& name, const at::Tensor& positions, const Box& box,
                         const at::Tensor& edge_index, int num_parts, const at::Tensor& weights) {
  const graph_parallel::SpatialOptions options{
      .cell = box.cell, .is_periodic = box.is_periodic, .weights = weights};
  if (name == "contiguous") return Partition::contiguous(positions.size(0), num_parts);
  if (name == "morton") return Partition::morton(positions, num_parts, options);
  if (name == "hilbert") return Partition::hilbert(positions, num_parts, options);
  if (name == "bisection") return Partition::recursive_bisection(positions, num_parts, options);
  if (name == "metis") {
    return Partition::metis(positions.size(0), edge_index, num_parts, weights);
  }
  std::string known;
  for (const auto& other : partitioner_names()) known += (known.empty() ? "" : ", ") + other;
  TESSERA_CHECK_VALUE(false, "gnn.partition: there is no partitioner '", name, "'. There are ",
                      known, ".");
}

}  // namespace tessera::workloads::gnn
