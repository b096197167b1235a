#include "tessera/graph_parallel/partition.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include <ATen/Functions.h>

#include "graph_parallel/metis.h"
#include "graph_parallel/space.h"
#include "tessera/core/check.h"
#include "tessera/regions/gather_scatter.h"

namespace tessera::graph_parallel {
namespace {

using Sizes = std::vector<std::int64_t>;

// FNV-1a over words.
class Digest {
 public:
  void add(std::int64_t word) {
    hash_ = (hash_ ^ static_cast<std::uint64_t>(word)) * 1099511628211ULL;
    hash_ ^= hash_ >> 29;
  }
  std::int64_t value() const { return static_cast<std::int64_t>(hash_); }

 private:
  std::uint64_t hash_ = 1469598103934665603ULL;
};

void check_parts(int num_parts) {
  TESSERA_CHECK_VALUE(num_parts > 0, "graph.partition: ", num_parts,
                      " parts were asked for. Ask for at least one.");
}

}  // namespace

struct Partition::State {
  std::int64_t num_nodes = 0;
  Sizes sizes;
  Sizes offsets{0};
  // Undefined for contiguous parts, which need no table.
  at::Tensor owners;
  at::Tensor permutation;
  at::Tensor inverse;
  std::int64_t digest = 0;

  void finish() {
    Digest digest_of;
    for (const std::int64_t size : sizes) {
      offsets.push_back(offsets.back() + size);
      digest_of.add(size);
    }
    num_nodes = offsets.back();
    if (permutation.defined()) {
      const std::int64_t* node = permutation.const_data_ptr<std::int64_t>();
      for (std::int64_t i = 0; i < num_nodes; ++i) digest_of.add(node[i]);
    }
    digest = digest_of.value();
  }
};

Partition::Partition(std::shared_ptr<const State> state) : state_(std::move(state)) {}

Partition Partition::contiguous(std::int64_t num_nodes, int num_parts) {
  check_parts(num_parts);
  TESSERA_CHECK_VALUE(num_nodes >= 0, "graph.partition: a graph cannot have ", num_nodes,
                      " nodes.");
  return contiguous(regions::even_sizes(num_nodes, num_parts));
}

Partition Partition::contiguous(const Sizes& sizes) {
  check_parts(static_cast<int>(sizes.size()));
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    TESSERA_CHECK_VALUE(sizes[part] >= 0, "graph.partition: part ", part, " cannot have ",
                        sizes[part], " nodes.");
  }
  auto state = std::make_shared<State>();
  state->sizes = sizes;
  state->finish();
  return Partition(std::move(state));
}

Partition Partition::from_owners(const at::Tensor& owners, int num_parts) {
  check_parts(num_parts);
  TESSERA_CHECK_VALUE(owners.defined() && owners.dim() == 1 &&
                          at::isIntegralType(owners.scalar_type(), /*includeBool=*/false),
                      "graph.partition: the owners must be one whole number per node.");
  const at::Tensor table = owners.to(at::kCPU, at::kLong).contiguous();
  const std::int64_t* owner = table.const_data_ptr<std::int64_t>();
  std::vector<int> parts(table.size(0));
  for (std::int64_t node = 0; node < table.size(0); ++node) {
    TESSERA_CHECK_VALUE(owner[node] >= 0 && owner[node] < num_parts, "graph.partition: node ", node,
                        " is owned by ", owner[node], ", but there are ", num_parts,
                        " parts (0 to ", num_parts - 1, ").");
    parts[node] = static_cast<int>(owner[node]);
  }
  std::vector<std::int64_t> order(parts.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  return from_order(std::move(parts), order, num_parts);
}

// Each part keeps its nodes in the order of `order`.
Partition Partition::from_order(std::vector<int> owners, const std::vector<std::int64_t>& order,
                                int num_parts) {
  auto state = std::make_shared<State>();
  state->sizes.assign(num_parts, 0);
  for (const int owner : owners) ++state->sizes[owner];
  Sizes next(num_parts, 0);
  std::exclusive_scan(state->sizes.begin(), state->sizes.end(), next.begin(), std::int64_t{0});
  const auto num_nodes = static_cast<std::int64_t>(owners.size());
  state->owners = at::empty({num_nodes}, at::kLong);
  state->permutation = at::empty({num_nodes}, at::kLong);
  state->inverse = at::empty({num_nodes}, at::kLong);
  auto* owner_of = state->owners.data_ptr<std::int64_t>();
  auto* permutation = state->permutation.data_ptr<std::int64_t>();
  auto* inverse = state->inverse.data_ptr<std::int64_t>();
  for (const std::int64_t node : order) {
    const std::int64_t place = next[owners[node]]++;
    permutation[place] = node;
    inverse[node] = place;
    owner_of[node] = owners[node];
  }
  state->finish();
  return Partition(std::move(state));
}

Partition Partition::morton(const at::Tensor& positions, int num_parts,
                            const SpatialOptions& options) {
  const auto space = detail::space_of("morton", positions, num_parts, options);
  const auto order = detail::order_by(detail::morton_keys(space), space);
  const auto first = detail::cut_sequence(order, space, num_parts);
  std::vector<int> owners(space.num_nodes);
  for (int part = 0; part < num_parts; ++part) {
    for (std::int64_t i = first[part]; i < first[part + 1]; ++i) owners[order[i]] = part;
  }
  return from_order(std::move(owners), order, num_parts);
}

Partition Partition::hilbert(const at::Tensor& positions, int num_parts,
                             const SpatialOptions& options) {
  const auto space = detail::space_of("hilbert", positions, num_parts, options);
  const auto order = detail::order_by(detail::hilbert_keys(space), space);
  const auto first = detail::cut_sequence(order, space, num_parts);
  std::vector<int> owners(space.num_nodes);
  for (int part = 0; part < num_parts; ++part) {
    for (std::int64_t i = first[part]; i < first[part + 1]; ++i) owners[order[i]] = part;
  }
  return from_order(std::move(owners), order, num_parts);
}

Partition Partition::recursive_bisection(const at::Tensor& positions, int num_parts,
                                         const SpatialOptions& options) {
  const auto space = detail::space_of("recursive_bisection", positions, num_parts, options);
  // Inside a part, neighbours in space are neighbours in memory.
  const auto order = detail::order_by(detail::hilbert_keys(space), space);
  return from_order(detail::bisect(space, num_parts), order, num_parts);
}

Partition Partition::metis(std::int64_t num_nodes, const at::Tensor& edge_index, int num_parts,
                           const at::Tensor& weights) {
  check_parts(num_parts);
  return from_owners(detail::metis_owners(num_nodes, edge_index, num_parts, weights), num_parts);
}

bool Partition::has_metis() noexcept { return detail::has_metis(); }

std::int64_t Partition::num_nodes() const noexcept { return state_->num_nodes; }
int Partition::num_parts() const noexcept { return static_cast<int>(state_->sizes.size()); }
bool Partition::is_contiguous() const noexcept { return !state_->owners.defined(); }
const Sizes& Partition::sizes() const noexcept { return state_->sizes; }
const Sizes& Partition::offsets() const noexcept { return state_->offsets; }
std::int64_t Partition::digest() const noexcept { return state_->digest; }

at::Tensor Partition::owners() const {
  if (!is_contiguous()) return state_->owners;
  return at::repeat_interleave(at::arange(num_parts(), at::kLong),
                               at::tensor(state_->sizes, at::kLong));
}

at::Tensor Partition::permutation() const {
  return is_contiguous() ? at::arange(num_nodes(), at::kLong) : state_->permutation;
}

at::Tensor Partition::inverse() const {
  return is_contiguous() ? at::arange(num_nodes(), at::kLong) : state_->inverse;
}

at::Tensor Partition::nodes_of(int part) const {
  TESSERA_CHECK_INDEX(part >= 0 && part < num_parts(), "graph.partition: there is no part ", part,
                      " among ", num_parts(), ".");
  const std::int64_t first = state_->offsets[part];
  if (is_contiguous()) return at::arange(first, state_->offsets[part + 1], at::kLong);
  return state_->permutation.narrow(0, first, state_->sizes[part]);
}

at::Tensor Partition::owner_of(const at::Tensor& nodes) const {
  const at::Tensor ids = nodes.to(at::kCPU, at::kLong);
  if (ids.numel() > 0) {
    const auto low = ids.min().item<std::int64_t>();
    const auto high = ids.max().item<std::int64_t>();
    TESSERA_CHECK_VALUE(low >= 0 && high < num_nodes(), "graph.partition: there is no node ",
                        low < 0 ? low : high, " in a graph of ", num_nodes(), " nodes.");
  }
  if (!is_contiguous()) return state_->owners.index_select(0, ids.flatten()).view(ids.sizes());
  const Sizes ends(state_->offsets.begin() + 1, state_->offsets.end());
  return at::bucketize(ids, at::tensor(ends, at::kLong), /*out_int32=*/false, /*right=*/true);
}

std::string Partition::describe() const {
  const auto [low, high] = std::minmax_element(state_->sizes.begin(), state_->sizes.end());
  std::ostringstream text;
  text << num_nodes() << " nodes in " << num_parts() << " parts of " << *low << " to " << *high;
  return text.str();
}

}  // namespace tessera::graph_parallel
