#include "tessera/sharding/sharded_embedding_bag_collection.h"

#include <algorithm>
#include <sstream>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "comm/lending.h"
#include "core/kept_memory.h"
#include "sharding/combine.h"
#include "sharding/flat_exchange.h"
#include "sharding/module_parts.h"
#include "sharding/subgroups.h"
#include "sharding/tables_state.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::sharding {

using embedding::TableBatch;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

namespace {

constexpr const char* kBagCollection = "sharding.embedding_bag_collection";

/// Where a block of rows from another rank, or from here, goes.
struct Home {
  std::size_t source = 0;  // 0: the exchange; 1, 2: tables that stay here; 3: sums of hosts
  std::size_t place = 0;   // number of the block in its source
  std::size_t rank = 0;    // that looks it up; of the exchange
  std::size_t feature = 0;
  std::int64_t columns = 0;
  std::int64_t column = 0;
  bool is_added = false;
  bool is_divided = false;
};

/// A block of a source: its columns, its feature and the rank that looks it up.
struct RowsOfFeature {
  std::int64_t columns = 0;
  std::size_t feature = 0;
  std::size_t rank = 0;
};

/// Rows on their way home: from their rank, in one tensor or one per rank, and from their host.
struct Homeward {
  comm::Awaitable<Exchange::Parts> direct;
  comm::Awaitable<at::Tensor> hosted;
};

// Rows that are lent: those of rank 0 are the first source, as if they were all; those of the
// others come behind the other kinds.
constexpr std::size_t kNumSources = 4;
std::size_t source_of_rank(std::size_t rank) { return rank == 0 ? 0 : kNumSources - 1 + rank; }

comm::Awaitable<Exchange::Parts> in_one_part(const comm::Awaitable<at::Tensor>& pending) {
  return comm::Awaitable<Exchange::Parts>([pending] { return Exchange::Parts{pending.wait()}; });
}

}  // namespace

struct ShardedEmbeddingBagCollection::State : TablesState {
  State(std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan, const comm::Group& own,
        bool weighted, const ShardedOptions& given)
      : TablesState(kBagCollection, std::move(tables), std::move(plan), own, given,
                    /*is_pooled=*/true),
        is_weighted(weighted),
        options(given) {
    options.device = numbered(options.device);
    InputDistOptions input;
    input.is_weighted = is_weighted;
    input.weights_come_later = is_weighted && options.weights_come_later;
    input.longest_bags = options.longest_bags;
    input.needs_one_batch = true;
    make_tables(options, std::move(input), options_text());
    for (const Output& output : layout->outputs) {
      names.push_back(output.name);
      dims.push_back(output.columns);
    }
    find_homes();
    lends = layout->has_routes && keeps_own_rows() && comm::can_lend(group);
    if (layout->has_hosted) hosts.emplace(group, layout->topology.local_size);
  }

  void read_unread() override { unread->read_all(); }
  std::string options_text() const;
  void find_homes();
  /// Numbers that come home from rank r, and from host h for all of its ranks.
  std::int64_t direct_size(const DistContext& context, std::size_t rank) const;
  std::int64_t hosted_size(const DistContext& context, std::size_t host) const;
  /// Whether the rows for this rank's own samples can be read while the others travel; which.
  bool keeps_own_rows() const;
  embedding::FeatureRange own_rows() const;
  Homeward send_home(const DistContext& context, const embedding::PreparedRows& looked_up) const;
  CombinePlan combine_plan(const DistContext& context) const;

  bool is_weighted;
  ShardedOptions options;
  std::vector<std::string> names;
  std::vector<std::int64_t> dims;
  std::int64_t num_columns = 0;
  bool lends = false;  // rows and gradients are read where the rank that made them has them
  std::vector<Home> homes;
  /// In the order in which a source has them.
  std::vector<std::vector<RowsOfFeature>> blocks{kNumSources};
  std::optional<HostGroups> hosts;  // if rows are summed inside hosts
  std::shared_ptr<UnreadRows> unread = std::make_shared<UnreadRows>();
};

using BagState = ShardedEmbeddingBagCollection::State;

// What must be the same on all ranks, for the passes to fit together.
std::string BagState::options_text() const {
  std::ostringstream text;
  const auto form = static_cast<int>(options.gradients);
  text << "options: " << embedding::name_of(options.optimizer.kind) << ", "
       << (form == 0   ? "dense"
           : form == 1 ? "sparse"
                       : "fused")
       << " gradients, " << (options.exact_row_norms ? "exact" : "local") << " row norms, "
       << (is_weighted ? "weighted" : "not weighted")
       << (options.weights_come_later ? " later" : "") << ", wire formats "
       << static_cast<int>(options.codecs.forward.format()) << " and "
       << static_cast<int>(options.codecs.backward.format()) << ", " << layout->topology.local_size
       << " ranks per host";
  return text.str();
}

void BagState::find_homes() {
  std::vector<std::int64_t> begins;
  for (const std::int64_t dim : dims) {
    begins.push_back(num_columns);
    num_columns += dim;
  }
  // Output, column and row decide the order in which blocks are put down and summed.
  std::vector<std::pair<std::tuple<std::size_t, std::int64_t, std::int64_t>, Home>> found;
  const auto add = [&](std::size_t source, const Route& route, std::size_t rank = 0) {
    const Shard& shard = layout->shard(route);
    Home home;
    home.source = source;
    home.place = blocks[source].size();
    home.rank = rank;
    home.feature = route.feature;
    home.columns = shard.columns;
    home.column = begins[route.output] + shard.column;
    home.is_divided = layout->is_row_cut(route.table) &&
                      layout->tables[route.table].pooling == embedding::PoolingType::kMean;
    blocks[source].push_back({shard.columns, route.feature, rank});
    found.push_back({{route.output, shard.column, shard.row}, home});
  };
  for (std::size_t rank = 0; rank < layout->routes.size(); ++rank) {
    for (const Route& route : layout->routes[rank]) {
      if (!layout->is_hosted(route.table)) add(0, route, rank);
    }
  }
  // The ranks of a host have the same hosted routes; their rows come as one sum.
  const auto local_size = static_cast<std::size_t>(layout->topology.local_size);
  for (std::size_t first = 0; first < layout->routes.size(); first += local_size) {
    for (const Route& route : layout->routes[first]) {
      if (layout->is_hosted(route.table)) add(3, route);
    }
  }
  for (const std::size_t r : local->stepped_routes()) add(1, layout->local[r]);
  for (const std::size_t r : local->dense_routes()) add(2, layout->local[r]);
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i].second.is_added = i > 0 && found[i].second.column == found[i - 1].second.column;
    homes.push_back(found[i].second);
  }
}

std::int64_t BagState::direct_size(const DistContext& context, std::size_t rank) const {
  std::int64_t size = 0;
  for (const Route& route : layout->routes[rank]) {
    if (layout->is_hosted(route.table)) continue;
    size += context.strides[route.feature] * layout->shard(route).columns;
  }
  return size;
}

std::int64_t BagState::hosted_size(const DistContext& context, std::size_t host) const {
  std::int64_t size = 0;
  for (const Route& route :
       layout->routes[host * static_cast<std::size_t>(layout->topology.local_size)]) {
    if (!layout->is_hosted(route.table)) continue;
    size += context.strides[route.feature] * layout->shard(route).columns;
  }
  return size;
}

bool BagState::keeps_own_rows() const {
  // One rank sends nothing, and what a codec rounds is rounded at home too.
  const auto& codecs = options.codecs;
  return group.size() > 1 && !layout->has_hosted && options.device.is_cpu() &&
         codecs.forward.is_identity() && codecs.backward.is_identity();
}

embedding::FeatureRange BagState::own_rows() const {
  if (!keeps_own_rows()) return {};
  const auto rank = static_cast<std::size_t>(group.rank());
  const auto num_routes = static_cast<std::int64_t>(layout->routes[rank].size());
  return {group.rank() * num_routes, (group.rank() + 1) * num_routes};
}

Homeward BagState::send_home(const DistContext& context,
                             const embedding::PreparedRows& looked_up) const {
  const at::Tensor& rows = looked_up.rows;
  const auto& own = layout->routes[static_cast<std::size_t>(group.rank())];
  const std::size_t world = layout->routes.size();
  // The rows for a rank lie together, those of hosted tables last.
  Sizes direct(world, 0);
  Sizes hosted(world, 0);
  Sizes received;
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t k = 0; k < own.size(); ++k) {
      (layout->is_hosted(own[k].table) ? hosted : direct)[r] +=
          context.batches[r][k] * layout->shard(own[k]).columns;
    }
    received.push_back(direct_size(context, r));
  }
  const auto exchange = [&](const at::Tensor& values, const Sizes& sent, const Sizes& arriving,
                            const comm::Group& over) {
    // While rows and gradients travel, backward's part that needs neither is done.
    return exchange_flat(values, sent, arriving, over, options.codecs, gradient_factor(over),
                         looked_up.prepare, {looked_up.look_up_later, unread});
  };
  const comm::NoWait<at::Tensor> nothing(at::empty({0}, rows.options().requires_grad(false)));
  if (!layout->has_routes) return {in_one_part(nothing), nothing};
  if (lends) {
    return {lend_rows(rows, direct, received, group, gradient_factor(group), looked_up.prepare,
                      {looked_up.look_up_later, unread}),
            nothing};
  }
  if (!layout->has_hosted) return {in_one_part(exchange(rows, direct, received, group)), nothing};
  std::vector<at::Tensor> direct_rows;
  std::vector<std::vector<at::Tensor>> by_local_rank(
      static_cast<std::size_t>(layout->topology.local_size));
  Sizes sums(by_local_rank.size(), 0);
  Sizes across;
  std::int64_t begin = 0;
  for (std::size_t r = 0; r < world; ++r) {
    const std::size_t local_rank = r % by_local_rank.size();
    direct_rows.push_back(rows.narrow(0, begin, direct[r]));
    by_local_rank[local_rank].push_back(rows.narrow(0, begin + direct[r], hosted[r]));
    begin += direct[r] + hosted[r];
    sums[local_rank] += hosted[r];
    if (local_rank == static_cast<std::size_t>(hosts->intra.rank())) across.push_back(hosted[r]);
  }
  std::vector<at::Tensor> hosted_rows;
  for (const auto& parts : by_local_rank) {
    hosted_rows.insert(hosted_rows.end(), parts.begin(), parts.end());
  }
  const Request summed =
      reduce_scatter_v_pooled(at::cat(hosted_rows), sums, hosts->intra, options.codecs);
  const auto pending = exchange(at::cat(direct_rows), direct, received, group);
  Sizes arriving;
  for (std::size_t host = 0; host < world / by_local_rank.size(); ++host) {
    arriving.push_back(hosted_size(context, host));
  }
  return {in_one_part(pending), exchange(summed.wait(), across, arriving, hosts->cross)};
}

CombinePlan BagState::combine_plan(const DistContext& context) const {
  CombinePlan plan;
  plan.rows = context.features.stride();
  plan.columns = num_columns;
  plan.factors.resize(layout->features.size());
  plan.inverse.resize(layout->features.size());
  std::vector<std::vector<std::int64_t>> begins(blocks.size());
  for (std::size_t source = 0; source < blocks.size(); ++source) {
    std::int64_t begin = 0;
    std::size_t rank = 0;
    for (const RowsOfFeature& block : blocks[source]) {
      if (lends && block.rank != rank) begin = 0;  // a tensor of its own
      rank = block.rank;
      begins[source].push_back(begin);
      begin += block.columns * context.strides[block.feature];
    }
  }
  if (lends) {
    plan.gradient_memory = [group = group](std::size_t source, std::int64_t size) {
      const auto own = source_of_rank(static_cast<std::size_t>(group.rank()));
      const bool stays = source == own || (source > 0 && source < kNumSources);
      return stays ? core::empty_kept({size}, at::kFloat) : comm::lendable(size, at::kFloat, group);
    };
  }
  for (const Home& home : homes) {
    const std::size_t source = lends && home.source == 0 ? source_of_rank(home.rank) : home.source;
    plan.pieces.push_back({source, begins[home.source][home.place], context.strides[home.feature],
                           home.columns, home.column, home.feature, home.is_added,
                           home.is_divided});
    at::Tensor& factor = plan.factors[home.feature];
    if (home.is_divided && !factor.defined()) {
      factor = context.features.feature(context.places[home.feature])
                   .lengths()
                   .to(at::kFloat)
                   .clamp_min(1)
                   .reciprocal();
    }
  }
  const auto& inverse = context.features.inverse_indices_or_none();
  for (std::size_t f = 0; inverse && f < layout->features.size(); ++f) {
    const auto& known = inverse->first;
    const auto found = std::find(known.rbegin(), known.rend(), layout->features[f]);
    plan.inverse[f] = inverse->second[known.rend() - found - 1].to(at::kLong).contiguous();
  }
  return plan;
}

ShardedEmbeddingBagCollection::ShardedEmbeddingBagCollection(
    std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan, const comm::Group& group,
    bool is_weighted, const ShardedOptions& options)
    : torch::nn::Module("ShardedEmbeddingBagCollection"),
      state_(std::make_shared<State>(std::move(tables), std::move(plan), group, is_weighted,
                                     options)) {
  tables_state_ = state_;
  register_shards(*this, "embedding_bags", state_->local->weights());
}

ShardedEmbeddingBagCollection::~ShardedEmbeddingBagCollection() = default;

KeyedTensor ShardedEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

comm::LazyAwaitable<KeyedTensor> ShardedEmbeddingBagCollection::compute_and_output_dist(
    const DistributedInput& input) {
  const bool is_later = state_->is_weighted && state_->options.weights_come_later;
  return compute_and_output_dist(
      input, is_later ? input.context->features.weights_or_none() : at::Tensor());
}

comm::LazyAwaitable<KeyedTensor> ShardedEmbeddingBagCollection::compute_and_output_dist(
    const DistributedInput& input, const at::Tensor& weights) {
  const std::shared_ptr<DistContext> context = input.context;
  const std::shared_ptr<State> state = state_;
  const bool is_later = state->is_weighted && state->options.weights_come_later;
  TESSERA_CHECK_VALUE(is_later || !weights.defined(), kBagCollection,
                      ": weights are given to the rows; ask for weights_come_later.");
  if (is_later) state->sender->send_weights(*context, weights);
  const TableBatch* routed = state->local->routed();
  const auto nothing = at::TensorOptions(at::kFloat).device(state->options.device);
  // A rank without rows still takes part, and so do the weights it was sent.
  embedding::PreparedRows looked_up;
  if (routed != nullptr) {
    embedding::RowMemory memory;
    if (state->lends) {
      memory = [&](std::int64_t size) { return comm::lendable(size, at::kFloat, state->group); };
    }
    looked_up = routed->pooled_ahead(context->lookup_input(), state->own_rows(), memory);
  } else {
    looked_up.rows = context->weights.defined() ? context->weights : at::empty({0}, nothing);
  }
  const Homeward pending = state->send_home(*context, looked_up);
  const auto look_up = [&](const TableBatch* batch, const std::vector<std::size_t>& local) {
    return batch == nullptr
               ? at::empty({0}, nothing)
               : batch->pooled(local_input(*state->layout, *context, local, state->is_weighted));
  };
  const at::Tensor stepped = look_up(state->local->local_stepped(), state->local->stepped_routes());
  const at::Tensor dense = look_up(state->local->local_dense(), state->local->dense_routes());
  const bool is_recorded = at::GradMode::is_enabled();
  return comm::LazyAwaitable<KeyedTensor>([=] {
    const at::AutoGradMode recorded(is_recorded);
    CombinePlan plan = state->combine_plan(*context);
    plan.owner = state;  // backward hands gradients to its tables
    const Exchange::Parts& direct = pending.direct.wait();
    std::vector<at::Tensor> sources{direct[0], stepped, dense, pending.hosted.wait()};
    sources.insert(sources.end(), direct.begin() + 1, direct.end());
    return KeyedTensor(state->names, state->dims, combine(std::move(plan), sources));
  });
}

const std::vector<embedding::EmbeddingBagConfig>&
ShardedEmbeddingBagCollection::embedding_bag_configs() const noexcept {
  return state_->layout->tables;
}

ShardedEmbeddingBagCollection::NoSync::NoSync(std::shared_ptr<State> state)
    : state_(std::move(state)), was_kept_(state_->local->keep_local_gradients(true)) {}

ShardedEmbeddingBagCollection::NoSync::~NoSync() { state_->local->keep_local_gradients(was_kept_); }

}  // namespace tessera::sharding
