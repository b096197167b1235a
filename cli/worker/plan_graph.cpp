// tessera-worker plan-graph — the part of `tessera plan graph` that needs LibTorch.

#include <algorithm>
#include <cstdio>

#include <ATen/Functions.h>
#include <nlohmann/json.hpp>

#include "../flags.h"
#include "../plan_graph_flags.h"
#include "gnn/graph_file.h"
#include "gnn/partitioner.h"
#include "tessera/graph_parallel/partition_report.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

using graph_parallel::PartCounts;
using graph_parallel::Partition;
using graph_parallel::PartitionReport;
using workloads::gnn::GraphFile;

constexpr int kExitData = 65;

struct Row {
  std::string name;
  PartitionReport report;
};

at::Tensor edges_of(const GraphFile& file, const PlanGraphWords& words) {
  if (file.edge_index.defined()) return file.edge_index;
  if (words.cutoff > 0) {
    return workloads::gnn::within(file.positions, file.box, words.cutoff).edge_index;
  }
  return workloads::gnn::nearest(file.positions, file.box, words.num_nearest).edge_index;
}

std::vector<Row> compare(const GraphFile& file, const at::Tensor& edges,
                         const PlanGraphWords& words) {
  at::Tensor weights;
  if (words.weigh_edges) {
    weights = at::bincount(edges[1], {}, file.num_nodes).to(at::kDouble);
  }
  std::vector<Row> rows;
  for (const std::string& name : workloads::gnn::partitioner_names()) {
    const bool needs_positions = name != "contiguous" && name != "metis";
    if (needs_positions && !file.positions.defined()) continue;
    const Partition partition =
        name == "contiguous" ? Partition::contiguous(file.num_nodes, words.num_parts)
        : name == "metis"    ? Partition::metis(file.num_nodes, edges, words.num_parts, weights)
                             : workloads::gnn::make_partition(name, file.positions, file.box, edges,
                                                              words.num_parts, weights);
    rows.push_back({name, graph_parallel::report_of(partition, edges)});
  }
  return rows;
}

// Bytes in and out of the busiest rank, forward.
std::int64_t busiest_bytes(const PartitionReport& report, const PlanGraphWords& words) {
  std::int64_t most = 0;
  for (const PartCounts& part : report.parts) most = std::max(most, part.num_halo + part.num_sent);
  return most * words.num_features * words.element_bytes;
}

double mean_of(const PartitionReport& report, std::int64_t PartCounts::* count) {
  double sum = 0;
  for (const PartCounts& part : report.parts) sum += static_cast<double>(part.*count);
  return sum / static_cast<double>(report.parts.size());
}

std::string bytes_text(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

void print_table(const std::vector<Row>& rows, const PlanGraphWords& words) {
  std::printf("%-12s %13s %9s %9s %10s %10s %12s %9s\n", "partitioner", "owned", "halo", "largest",
              "interior", "boundary", "bytes/layer", "imbalance");
  for (const Row& row : rows) {
    const auto& parts = row.report.parts;
    const auto [low, high] =
        std::minmax_element(parts.begin(), parts.end(),
                            [](const auto& a, const auto& b) { return a.num_owned < b.num_owned; });
    const std::string owned =
        low->num_owned == high->num_owned
            ? std::to_string(low->num_owned)
            : std::to_string(low->num_owned) + "-" + std::to_string(high->num_owned);
    std::printf("%-12s %13s %9.0f %9ld %10.0f %10.0f %12s %9.2f\n", row.name.c_str(), owned.c_str(),
                row.report.mean_halo(), static_cast<long>(row.report.largest_halo()),
                mean_of(row.report, &PartCounts::num_interior),
                mean_of(row.report, &PartCounts::num_boundary),
                bytes_text(busiest_bytes(row.report, words)).c_str(), row.report.edge_imbalance());
  }
}

void print_json(const GraphFile& file, const at::Tensor& edges, const std::vector<Row>& rows,
                const PlanGraphWords& words) {
  nlohmann::ordered_json json{{"nodes", file.num_nodes},
                              {"edges", edges.size(1)},
                              {"ranks", words.num_parts},
                              {"partitioners", nlohmann::ordered_json::array()}};
  for (const Row& row : rows) {
    nlohmann::ordered_json parts = nlohmann::ordered_json::array();
    for (const PartCounts& part : row.report.parts) {
      parts.push_back({{"owned", part.num_owned},
                       {"halo", part.num_halo},
                       {"sent", part.num_sent},
                       {"interior", part.num_interior},
                       {"boundary", part.num_boundary}});
    }
    json["partitioners"].push_back({{"name", row.name},
                                    {"mean_halo", row.report.mean_halo()},
                                    {"largest_halo", row.report.largest_halo()},
                                    {"bytes_per_layer", busiest_bytes(row.report, words)},
                                    {"edge_imbalance", row.report.edge_imbalance()},
                                    {"parts", std::move(parts)}});
  }
  std::printf("%s\n", json.dump().c_str());
}

int plan_graph(const std::vector<std::string>& words) {
  CLI::App app("", "plan-graph");
  PlanGraphWords given;
  define(app, given.table());
  std::vector<std::string> reversed(words.rbegin(), words.rend() - 1);
  app.parse(reversed);
  try {
    const GraphFile file = workloads::gnn::read_graph_file(words[0]);
    const at::Tensor edges = edges_of(file, given);
    const std::vector<Row> rows = compare(file, edges, given);
    if (given.as_json) {
      print_json(file, edges, rows, given);
      return 0;
    }
    std::printf(
        "graph %ld nodes, %ld edges, %d ranks, rows of %ld x %d bytes; an all-gather brings "
        "%ld rows\n",
        static_cast<long>(file.num_nodes), static_cast<long>(edges.size(1)), given.num_parts,
        static_cast<long>(given.num_features), given.element_bytes,
        static_cast<long>(file.num_nodes - file.num_nodes / given.num_parts));
    print_table(rows, given);
    return 0;
  } catch (const c10::ValueError& error) {
    std::fprintf(stderr,
                 "error: plan: %s\n  why: the file or the flags do not describe a graph\n"
                 "  try: tessera plan --help shows both file formats\n",
                 error.what_without_backtrace());
    return kExitData;
  }
}

}  // namespace

const WorkerVerb kPlanGraphVerb{"plan-graph", plan_graph};

}  // namespace tessera::cli
