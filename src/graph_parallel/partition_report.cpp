#include "tessera/graph_parallel/partition_report.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "tessera/core/check.h"

namespace tessera::graph_parallel {

PartitionReport report_of(const Partition& partition, const at::Tensor& edge_index) {
  TESSERA_CHECK_VALUE(edge_index.dim() == 2 && edge_index.size(0) == 2,
                      "graph.report: the edges have shape ", edge_index.sizes(),
                      ", not [2, edges].");
  const at::Tensor edges = edge_index.cpu().to(at::kLong).contiguous();
  const at::Tensor owners = partition.owner_of(edges).contiguous();
  const std::int64_t num_edges = edges.size(1);
  const std::int64_t* source = edges.const_data_ptr<std::int64_t>();
  const std::int64_t* from = owners.const_data_ptr<std::int64_t>();
  const std::int64_t* to = from + num_edges;
  PartitionReport report;
  report.parts.resize(partition.num_parts());
  for (int part = 0; part < partition.num_parts(); ++part) {
    report.parts[part].num_owned = partition.sizes()[part];
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> rows;  // (receiver, node)
  for (std::int64_t edge = 0; edge < num_edges; ++edge) {
    PartCounts& counts = report.parts[to[edge]];
    if (from[edge] == to[edge]) {
      ++counts.num_interior;
    } else {
      ++counts.num_boundary;
      rows.emplace_back(to[edge], source[edge]);
    }
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  const at::Tensor table = partition.owners().contiguous();
  for (const auto& [receiver, node] : rows) {
    ++report.parts[receiver].num_halo;
    ++report.parts[table.const_data_ptr<std::int64_t>()[node]].num_sent;
  }
  return report;
}

double PartitionReport::mean_halo() const {
  double sum = 0;
  for (const PartCounts& part : parts) sum += static_cast<double>(part.num_halo);
  return sum / static_cast<double>(parts.size());
}

std::int64_t PartitionReport::largest_halo() const {
  std::int64_t largest = 0;
  for (const PartCounts& part : parts) largest = std::max(largest, part.num_halo);
  return largest;
}

double PartitionReport::edge_imbalance() const {
  std::int64_t most = 0;
  std::int64_t sum = 0;
  for (const PartCounts& part : parts) {
    most = std::max(most, part.num_edges());
    sum += part.num_edges();
  }
  return sum == 0 ? 1.0
                  : static_cast<double>(most) * static_cast<double>(parts.size()) /
                        static_cast<double>(sum);
}

}  // namespace tessera::graph_parallel
