// tessera/graph_parallel/partition_report.h — what a partition of a graph would cost, part by part.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"
#include "tessera/graph_parallel/partition.h"

namespace tessera::graph_parallel {

/// The counts of one part, as a HaloPlan of that rank would have them.
struct PartCounts {
  std::int64_t num_owned = 0;
  std::int64_t num_halo = 0;      // rows received per layer
  std::int64_t num_sent = 0;      // rows sent per layer
  std::int64_t num_interior = 0;  // edges whose source is owned
  std::int64_t num_boundary = 0;  // edges whose source is in the halo

  std::int64_t num_edges() const { return num_interior + num_boundary; }
};

struct TESSERA_API PartitionReport {
  std::vector<PartCounts> parts;

  double mean_halo() const;
  std::int64_t largest_halo() const;
  /// The most edges of a part over the mean: how much longer the slowest rank computes.
  double edge_imbalance() const;
};

/// Counts on one process, without any group; `edge_index` is the whole graph's, [2, num_edges].
/// Not collective. Throws ValueError for an edge to a node there is not.
TESSERA_API PartitionReport report_of(const Partition& partition, const at::Tensor& edge_index);

}  // namespace tessera::graph_parallel
