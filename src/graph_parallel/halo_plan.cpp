#include "tessera/graph_parallel/halo_plan.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include <ATen/Functions.h>

#include "comm/agreement.h"
#include "graph_parallel/device_copies.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::graph_parallel {
namespace {

using comm::Group;
using Ids = std::vector<std::int64_t>;

at::Tensor tensor_of(const Ids& ids) { return at::tensor(ids, at::kLong); }

std::int64_t digest_of(const std::int64_t* first, const std::int64_t* last) {
  std::uint64_t hash = 1469598103934665603ULL;
  for (; first != last; ++first) {
    hash = (hash ^ static_cast<std::uint64_t>(*first)) * 1099511628211ULL;
    hash ^= hash >> 29;
  }
  return static_cast<std::int64_t>(hash);
}

// What is wrong with the edges on this rank alone; empty if nothing.
std::string fault_of(const at::Tensor& edge_index, const Partition& partition, int part) {
  std::ostringstream text;
  text << "graph.halo: ";
  if (!edge_index.defined() || edge_index.dim() != 2 || edge_index.size(0) != 2 ||
      edge_index.scalar_type() != at::kLong) {
    text << "the edges must be a tensor of int64, [2, edges]: sources, then targets.";
    return text.str();
  }
  const at::Tensor edges = edge_index.cpu().contiguous();
  const std::int64_t num_edges = edges.size(1);
  const std::int64_t* node = edges.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < 2 * num_edges; ++i) {
    if (node[i] >= 0 && node[i] < partition.num_nodes()) continue;
    text << "edge " << i % num_edges << (i < num_edges ? " comes from node " : " points to node ")
         << node[i] << ", but the graph has " << partition.num_nodes() << " nodes (0 to "
         << partition.num_nodes() - 1 << ").";
    return text.str();
  }
  const at::Tensor owners = partition.owner_of(edges[1]).contiguous();
  const std::int64_t* owner = owners.const_data_ptr<std::int64_t>();
  for (std::int64_t edge = 0; edge < num_edges; ++edge) {
    if (owner[edge] == part) continue;
    text << "edge " << edge << " points to node " << node[num_edges + edge] << ", which rank "
         << owner[edge] << " owns. Give each rank the edges whose targets it owns (edges_of_part).";
    return text.str();
  }
  return "";
}

// Pairs (rank, global id), sorted, each once: rows by rank, then by id.
struct RowList {
  Ids ids;
  Ids rows;  // per rank

  static RowList of(std::vector<std::pair<std::int64_t, std::int64_t>> pairs, int num_ranks) {
    std::sort(pairs.begin(), pairs.end());
    pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
    RowList list{{}, Ids(num_ranks, 0)};
    for (const auto& [rank, id] : pairs) {
      ++list.rows[rank];
      list.ids.push_back(id);
    }
    return list;
  }

  // (count, digest) for each rank.
  Ids summary() const {
    Ids words;
    const std::int64_t* place = ids.data();
    for (const std::int64_t num : rows) {
      words.push_back(num);
      words.push_back(digest_of(place, place + num));
      place += num;
    }
    return words;
  }
};

}  // namespace

at::Tensor edges_of_part(const at::Tensor& edge_index, const Partition& partition, int part) {
  TESSERA_CHECK_VALUE(edge_index.dim() == 2 && edge_index.size(0) == 2,
                      "graph.edges_of_part: the edges have shape ", edge_index.sizes(),
                      ", not [2, edges].");
  return at::nonzero(partition.owner_of(edge_index[1]) == part).flatten();
}

struct HaloPlan::State {
  State(Partition partition, Group group, HaloOptions options)
      : partition(std::move(partition)), group(std::move(group)), options(options) {}

  Partition partition;
  Group group;
  HaloOptions options;
  std::int64_t num_owned = 0;
  RowList received;
  RowList sent;
  at::Tensor nodes;
  at::Tensor send_index;
  detail::DeviceCopies send_index_copies;
  at::Tensor local_edges;
  at::Tensor interior;
  at::Tensor boundary;

  void agree(const std::string& fault) const;
  void find_rows(const at::Tensor& edges);
  void learn_sends();
  void check_sends() const;
  void number_locally(const at::Tensor& edges);
};

// All ranks leave together: with the same partition and sound edges, or with an error.
void HaloPlan::State::agree(const std::string& fault) const {
  if (!options.check || group.size() == 1) {
    TESSERA_CHECK_VALUE(fault.empty(), fault);
    return;
  }
  const auto records = comm::detail::exchange_words(
      {fault.empty() ? 0 : 1, partition.digest(), partition.num_nodes(), partition.num_parts(),
       options.is_symmetric ? 1 : 0,
       options.payload ? static_cast<std::int64_t>(*options.payload) : -1},
      group);
  std::vector<int> wrong;
  std::vector<int> different;
  for (int r = 0; r < group.size(); ++r) {
    if (records[r][0] != 0) wrong.push_back(r);
    if (!std::equal(records[r].begin() + 1, records[r].end(), records[0].begin() + 1)) {
      different.push_back(r);
    }
  }
  if (!wrong.empty()) comm::detail::raise_faults(fault, wrong, group);
  if (different.empty()) return;
  const auto describe = [&](const Ids& record) {
    std::ostringstream text;
    text << record[2] << " nodes in " << record[3] << " parts, digest " << std::hex
         << static_cast<std::uint64_t>(record[1]) << std::dec
         << (record[4] != 0 ? ", symmetric" : ", not symmetric");
    if (record[5] >= 0) text << ", payload " << static_cast<at::ScalarType>(record[5]);
    return text.str();
  };
  throw comm::Error(comm::ErrorKind::kMismatch, different,
                    "graph.halo: rank 0 has " + describe(records[0]) + "; rank " +
                        std::to_string(different[0]) + " has " + describe(records[different[0]]) +
                        ". Make the partition from the same input on every rank.");
}

void HaloPlan::State::find_rows(const at::Tensor& edges) {
  const int rank = group.rank();
  const std::int64_t num_edges = edges.size(1);
  const at::Tensor owners = partition.owner_of(edges[0]).contiguous();
  const std::int64_t* owner = owners.const_data_ptr<std::int64_t>();
  const std::int64_t* source = edges.const_data_ptr<std::int64_t>();
  const std::int64_t* target = source + num_edges;
  std::vector<std::pair<std::int64_t, std::int64_t>> needed;
  std::vector<std::pair<std::int64_t, std::int64_t>> mirrored;
  for (std::int64_t edge = 0; edge < num_edges; ++edge) {
    if (owner[edge] == rank) continue;
    needed.emplace_back(owner[edge], source[edge]);
    // The mirror image of this edge makes its source's owner need its target.
    if (options.is_symmetric) mirrored.emplace_back(owner[edge], target[edge]);
  }
  received = RowList::of(std::move(needed), group.size());
  if (options.is_symmetric) sent = RowList::of(std::move(mirrored), group.size());
}

void HaloPlan::State::learn_sends() {
  const at::Tensor counts = comm::all_to_all(tensor_of(received.rows), group);
  const std::int64_t* count = counts.const_data_ptr<std::int64_t>();
  sent.rows.assign(count, count + group.size());
  const at::Tensor ids =
      comm::all_to_all_v(tensor_of(received.ids), received.rows, group, sent.rows).contiguous();
  const std::int64_t* id = ids.const_data_ptr<std::int64_t>();
  sent.ids.assign(id, id + ids.size(0));
}

void HaloPlan::State::check_sends() const {
  if (!options.check || group.size() == 1) return;
  Ids mine = sent.summary();
  const Ids expected = received.summary();
  mine.insert(mine.end(), expected.begin(), expected.end());
  const auto records = comm::detail::exchange_words(mine, group);
  const int size = group.size();
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const std::int64_t num_sent = records[from][2 * to];
      const std::int64_t num_expected = records[to][2 * size + 2 * from];
      if (num_sent == num_expected &&
          records[from][2 * to + 1] == records[to][2 * size + 2 * from + 1]) {
        continue;
      }
      std::ostringstream text;
      text << "graph.halo: rank " << from << " would send " << num_sent << " rows to rank " << to
           << ", which expects " << num_expected << (num_sent == num_expected ? " others" : "")
           << ". The graph is not symmetric: some edge lacks its mirror image. Build the plan "
              "without is_symmetric.";
      throw comm::Error(comm::ErrorKind::kMismatch, {from, to}, text.str());
    }
  }
}

void HaloPlan::State::number_locally(const at::Tensor& edges) {
  const int rank = group.rank();
  num_owned = partition.sizes()[rank];
  nodes = at::cat({partition.nodes_of(rank), tensor_of(received.ids)});
  std::vector<std::int64_t> local(partition.num_nodes(), -1);
  const std::int64_t* node = nodes.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < nodes.size(0); ++i) local[node[i]] = i;
  const std::int64_t num_edges = edges.size(1);
  local_edges = at::empty({2, num_edges}, at::kLong);
  const std::int64_t* global = edges.const_data_ptr<std::int64_t>();
  auto* numbered = local_edges.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < 2 * num_edges; ++i) numbered[i] = local[global[i]];
  send_index = at::empty({static_cast<std::int64_t>(sent.ids.size())}, at::kLong);
  auto* row = send_index.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < sent.ids.size(); ++i) row[i] = local[sent.ids[i]];
  const at::Tensor is_boundary = local_edges[0] >= num_owned;
  interior = at::nonzero(is_boundary.logical_not()).flatten();
  boundary = at::nonzero(is_boundary).flatten();
}

HaloPlan::HaloPlan(const Partition& partition, const at::Tensor& edge_index, const Group& group,
                   const HaloOptions& options) {
  TESSERA_CHECK_VALUE(partition.num_parts() == group.size(), "graph.halo: the partition has ",
                      partition.num_parts(), " parts, group '", group.name(), "' has ",
                      group.size(), " ranks.");
  auto state = std::make_shared<State>(partition, group, options);
  state->agree(fault_of(edge_index, partition, group.rank()));
  const at::Tensor edges = edge_index.cpu().contiguous();
  state->find_rows(edges);
  if (!options.is_symmetric) state->learn_sends();
  if (options.is_symmetric) state->check_sends();
  state->number_locally(edges);
  state_ = std::move(state);
}

const Partition& HaloPlan::partition() const noexcept { return state_->partition; }
const Group& HaloPlan::group() const noexcept { return state_->group; }
const HaloOptions& HaloPlan::options() const noexcept { return state_->options; }
std::int64_t HaloPlan::num_owned() const noexcept { return state_->num_owned; }
std::int64_t HaloPlan::num_halo() const noexcept {
  return static_cast<std::int64_t>(state_->received.ids.size());
}
std::int64_t HaloPlan::num_local() const noexcept { return num_owned() + num_halo(); }
std::int64_t HaloPlan::num_sent() const noexcept {
  return static_cast<std::int64_t>(state_->sent.ids.size());
}
const at::Tensor& HaloPlan::nodes() const noexcept { return state_->nodes; }
at::Tensor HaloPlan::halo_nodes() const { return state_->nodes.slice(0, num_owned()); }
const at::Tensor& HaloPlan::send_index() const noexcept { return state_->send_index; }
at::Tensor HaloPlan::send_index(at::Device device) const {
  return state_->send_index_copies.of(state_->send_index, device);
}
const Ids& HaloPlan::send_rows() const noexcept { return state_->sent.rows; }
const Ids& HaloPlan::recv_rows() const noexcept { return state_->received.rows; }
const at::Tensor& HaloPlan::local_edges() const noexcept { return state_->local_edges; }
const at::Tensor& HaloPlan::interior() const noexcept { return state_->interior; }
const at::Tensor& HaloPlan::boundary() const noexcept { return state_->boundary; }

void HaloPlan::verify() const {
  const at::Tensor arrived = comm::all_to_all_v(tensor_of(state_->sent.ids), state_->sent.rows,
                                                state_->group, state_->received.rows);
  const bool is_right = at::equal(arrived, tensor_of(state_->received.ids));
  const auto records = comm::detail::exchange_words({is_right ? 0 : 1}, state_->group);
  std::vector<int> wrong;
  for (int r = 0; r < state_->group.size(); ++r) {
    if (records[r][0] != 0) wrong.push_back(r);
  }
  if (wrong.empty()) return;
  throw comm::Error(comm::ErrorKind::kMismatch, wrong,
                    "graph.halo: rank " + std::to_string(wrong[0]) +
                        " would receive other rows than it expects. Build the plan again, with "
                        "check on.");
}

}  // namespace tessera::graph_parallel
