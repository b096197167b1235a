#include "graph_parallel/metis.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>
#include <metis.h>

#include "tessera/core/check.h"

namespace tessera::graph_parallel::detail {
namespace {

struct Adjacency {
  std::vector<idx_t> first;
  std::vector<idx_t> neighbours;
};

// Both directions, without self loops and repetitions, as METIS wants it.
Adjacency adjacency_of(std::int64_t num_nodes, const at::Tensor& edge_index) {
  const at::Tensor edges = edge_index.to(at::kCPU, at::kLong).contiguous();
  const std::int64_t num_edges = edges.size(1);
  const std::int64_t* source = edges.const_data_ptr<std::int64_t>();
  const std::int64_t* target = source + num_edges;
  std::vector<std::pair<idx_t, idx_t>> pairs;
  pairs.reserve(2 * num_edges);
  for (std::int64_t edge = 0; edge < num_edges; ++edge) {
    for (const std::int64_t node : {source[edge], target[edge]}) {
      TESSERA_CHECK_VALUE(node >= 0 && node < num_nodes, "graph.metis: edge ", edge,
                          " points to node ", node, ", but the graph has ", num_nodes,
                          " nodes (0 to ", num_nodes - 1, ").");
    }
    if (source[edge] == target[edge]) continue;
    pairs.emplace_back(source[edge], target[edge]);
    pairs.emplace_back(target[edge], source[edge]);
  }
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  Adjacency adjacency;
  adjacency.first.assign(num_nodes + 1, 0);
  for (const auto& [from, to] : pairs) {
    ++adjacency.first[from + 1];
    adjacency.neighbours.push_back(to);
  }
  for (std::int64_t node = 0; node < num_nodes; ++node) {
    adjacency.first[node + 1] += adjacency.first[node];
  }
  return adjacency;
}

/// METIS balances within a few percent and may leave a small part empty; it then gets a node of the
/// largest one.
void fill_empty_parts(std::vector<idx_t>& owner, int num_parts) {
  if (static_cast<std::int64_t>(owner.size()) < num_parts) return;
  std::vector<std::int64_t> sizes(num_parts, 0);
  for (const idx_t part : owner) ++sizes[part];
  for (int part = 0; part < num_parts; ++part) {
    if (sizes[part] > 0) continue;
    const auto largest =
        static_cast<idx_t>(std::max_element(sizes.begin(), sizes.end()) - sizes.begin());
    *std::find(owner.begin(), owner.end(), largest) = part;
    --sizes[largest];
    ++sizes[part];
  }
}

}  // namespace

bool has_metis() noexcept { return true; }

at::Tensor metis_owners(std::int64_t num_nodes, const at::Tensor& edge_index, int num_parts,
                        const at::Tensor& weights) {
  TESSERA_CHECK_VALUE(edge_index.dim() == 2 && edge_index.size(0) == 2,
                      "graph.metis: the edges have shape ", edge_index.sizes(),
                      ", not [2, edges].");
  if (num_parts == 1 || num_nodes == 0) return at::zeros({num_nodes}, at::kLong);
  Adjacency adjacency = adjacency_of(num_nodes, edge_index);
  std::vector<idx_t> work;
  if (weights.defined() && weights.max().item<double>() > 0) {
    // METIS weighs in whole numbers; a thousand steps up to the heaviest node are enough.
    const at::Tensor scaled =
        (weights.to(at::kCPU, at::kDouble) * (1000.0 / weights.max().item<double>())).round();
    const at::Tensor whole = scaled.to(at::kLong).contiguous();
    const std::int64_t* value = whole.const_data_ptr<std::int64_t>();
    work.assign(value, value + num_nodes);
  }
  idx_t num = static_cast<idx_t>(num_nodes);
  idx_t num_constraints = 1;
  idx_t parts = num_parts;
  idx_t cut = 0;
  idx_t options[METIS_NOPTIONS];
  METIS_SetDefaultOptions(options);
  options[METIS_OPTION_SEED] = 1;  // every rank gets the same answer
  std::vector<idx_t> owner(num_nodes);
  adjacency.neighbours.reserve(1);  // not null, even without edges
  // Bisections cut better for few parts, says its manual.
  const auto partition = num_parts <= 8 ? METIS_PartGraphRecursive : METIS_PartGraphKway;
  // METIS keeps the state of its random numbers in the process; threads would disturb each other.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const int status =
      partition(&num, &num_constraints, adjacency.first.data(), adjacency.neighbours.data(),
                work.empty() ? nullptr : work.data(), nullptr, nullptr, &parts, nullptr, nullptr,
                options, &cut, owner.data());
  TESSERA_CHECK_VALUE(status == METIS_OK, "graph.metis: METIS refused the graph (status ", status,
                      ", ", num_nodes, " nodes, ", num_parts, " parts).");
  fill_empty_parts(owner, num_parts);
  at::Tensor owners = at::empty({num_nodes}, at::kLong);
  std::copy(owner.begin(), owner.end(), owners.data_ptr<std::int64_t>());
  return owners;
}

}  // namespace tessera::graph_parallel::detail
