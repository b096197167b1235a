#include "tessera/sharding/sharded_embedding_bag_collection.h"

#include <algorithm>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "sharding/combine.h"
#include "sharding/flat_exchange.h"
#include "sharding/input_dist.h"
#include "sharding/local_tables.h"
#include "sharding/table_layout.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/topology.h"
#include "tessera/core/check.h"

namespace tessera::sharding {

using embedding::LookupInput;
using embedding::TableBatch;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

namespace {

constexpr const char* kOperation = "sharding.embedding_bag_collection";

Topology topology_of(const comm::Group& group, int local_size) {
  return {group.size(), local_size > 0 ? local_size : comm::get_local_size(group.size())};
}

/// Where a block of rows from another rank, or from here, goes.
struct Home {
  std::size_t source = 0;  // 0: the exchange; 1, 2: tables that stay here
  std::size_t place = 0;   // number of the block in its source
  std::size_t feature = 0;
  std::int64_t columns = 0;
  std::int64_t column = 0;
  bool is_added = false;
  bool is_divided = false;
};

}  // namespace

struct ShardedEmbeddingBagCollection::State {
  State(std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan, const comm::Group& own,
        bool weighted, const ShardedOptions& given)
      : group(own), is_weighted(weighted), options(given) {
    layout = std::make_shared<const TableLayout>(kOperation, std::move(tables), std::move(plan),
                                                 topology_of(group, options.local_size),
                                                 /*is_pooled=*/true);
    check_same_layout(*layout, group);
    local =
        std::make_unique<LocalTables>(layout, group,
                                      LocalTablesOptions{options.optimizer, options.gradients,
                                                         options.exact_row_norms, options.device});
    InputDistOptions input;
    input.is_weighted = is_weighted;
    input.bounds_check = options.bounds_check;
    input.device = options.device;
    input.needs_one_batch = true;
    sender = std::make_shared<const InputSender>(layout, group, input);
    for (const Output& output : layout->outputs) {
      names.push_back(output.name);
      dims.push_back(output.columns);
    }
    find_homes();
  }

  void find_homes();
  LookupInput local_input(const DistContext& context, const std::vector<std::size_t>& routes) const;
  CombinePlan combine_plan(const DistContext& context) const;

  comm::Group group;
  bool is_weighted;
  ShardedOptions options;
  std::shared_ptr<const TableLayout> layout;
  std::unique_ptr<LocalTables> local;
  std::shared_ptr<const InputSender> sender;
  std::vector<std::string> names;
  std::vector<std::int64_t> dims;
  std::int64_t num_columns = 0;
  std::vector<Home> homes;
  /// The columns and the feature of each block, in the order in which a source has them.
  std::vector<std::vector<std::pair<std::int64_t, std::size_t>>> blocks{3};
};

using State = ShardedEmbeddingBagCollection::State;

void State::find_homes() {
  std::vector<std::int64_t> begins;
  for (const std::int64_t dim : dims) {
    begins.push_back(num_columns);
    num_columns += dim;
  }
  // Output, column and row decide the order in which blocks are put down and summed.
  std::vector<std::pair<std::tuple<std::size_t, std::int64_t, std::int64_t>, Home>> found;
  const auto add = [&](std::size_t source, const Route& route) {
    const Shard& shard = layout->shard(route);
    Home home;
    home.source = source;
    home.place = blocks[source].size();
    home.feature = route.feature;
    home.columns = shard.columns;
    home.column = begins[route.output] + shard.column;
    home.is_divided = layout->is_row_cut(route.table) &&
                      layout->tables[route.table].pooling == embedding::PoolingType::kMean;
    blocks[source].emplace_back(shard.columns, route.feature);
    found.push_back({{route.output, shard.column, shard.row}, home});
  };
  for (const auto& routes : layout->routes) {
    for (const Route& route : routes) add(0, route);
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

LookupInput State::local_input(const DistContext& context,
                               const std::vector<std::size_t>& routes) const {
  std::vector<std::int64_t> order;
  for (const std::size_t r : routes) {
    order.push_back(static_cast<std::int64_t>(context.places[layout->local[r].feature]));
  }
  const KeyedJaggedTensor& all = context.features;
  bool is_in_order = order.size() == all.keys().size();
  for (std::size_t i = 0; is_in_order && i < order.size(); ++i) {
    is_in_order = order[i] == static_cast<std::int64_t>(i);
  }
  const KeyedJaggedTensor own = is_in_order ? all : all.permute(order);
  LookupInput input;
  input.ids = own.values().contiguous();
  input.offsets = own.offsets().contiguous();
  if (is_weighted) input.weights = own.weights().to(at::kFloat).contiguous();
  input.batch_sizes = own.stride_per_key();
  return input;
}

CombinePlan State::combine_plan(const DistContext& context) const {
  CombinePlan plan;
  plan.rows = context.features.stride();
  plan.columns = num_columns;
  plan.factors.resize(layout->features.size());
  plan.inverse.resize(layout->features.size());
  std::vector<std::vector<std::int64_t>> begins(blocks.size());
  for (std::size_t source = 0; source < blocks.size(); ++source) {
    std::int64_t begin = 0;
    for (const auto& [columns, feature] : blocks[source]) {
      begins[source].push_back(begin);
      begin += columns * context.strides[feature];
    }
  }
  for (const Home& home : homes) {
    plan.pieces.push_back({home.source, begins[home.source][home.place],
                           context.strides[home.feature], home.columns, home.column, home.feature,
                           home.is_added, home.is_divided});
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
    std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan, comm::Group group,
    bool is_weighted, ShardedOptions options)
    : torch::nn::Module("ShardedEmbeddingBagCollection"),
      state_(std::make_shared<State>(std::move(tables), std::move(plan), group, is_weighted,
                                     options)) {
  const auto holder =
      register_module("embedding_bags", std::make_shared<torch::nn::Module>("embedding_bags"));
  std::map<std::string, std::pair<std::shared_ptr<torch::nn::Module>, int>> children;
  for (const LocalShard& shard : state_->local->weights()) {
    auto& [child, number] = children[shard.table];
    if (child == nullptr) {
      child = holder->register_module(shard.table, std::make_shared<torch::nn::Module>("Table"));
    }
    child->register_parameter(number == 0 ? "weight" : "weight_" + std::to_string(number),
                              shard.weight);
    ++number;
  }
}

ShardedEmbeddingBagCollection::~ShardedEmbeddingBagCollection() = default;

KeyedTensor ShardedEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

comm::LazyAwaitable<KeyedTensor> ShardedEmbeddingBagCollection::compute_and_output_dist(
    const DistributedInput& input) {
  const std::shared_ptr<DistContext> context = input.context;
  const std::shared_ptr<State> state = state_;
  const TableBatch* routed = state->local->routed();
  const auto nothing = at::TensorOptions(at::kFloat).device(state->options.device);
  // A rank without rows still takes part, and so do the weights it was sent.
  const at::Tensor rows = routed != nullptr            ? routed->pooled(context->lookup_input())
                          : context->weights.defined() ? context->weights
                                                       : at::empty({0}, nothing);
  Sizes sent;
  Sizes received;
  const auto& routes = state->layout->routes;
  const auto& own = routes[static_cast<std::size_t>(state->group.rank())];
  for (std::size_t r = 0; r < routes.size(); ++r) {
    std::int64_t away = 0;
    for (std::size_t k = 0; k < own.size(); ++k) {
      away += context->batches[r][k] * state->layout->shard(own[k]).columns;
    }
    std::int64_t home = 0;
    for (const Route& route : routes[r]) {
      home += context->strides[route.feature] * state->layout->shard(route).columns;
    }
    sent.push_back(away);
    received.push_back(home);
  }
  const auto pending = exchange_flat(rows, sent, received, state->group, state->options.codecs,
                                     gradient_factor(state->group));
  const auto look_up = [&](const TableBatch* batch, const std::vector<std::size_t>& local) {
    return batch == nullptr ? at::empty({0}, nothing)
                            : batch->pooled(state->local_input(*context, local));
  };
  const at::Tensor stepped = look_up(state->local->local_stepped(), state->local->stepped_routes());
  const at::Tensor dense = look_up(state->local->local_dense(), state->local->dense_routes());
  const bool is_recorded = at::GradMode::is_enabled();
  return comm::LazyAwaitable<KeyedTensor>([=] {
    const at::AutoGradMode recorded(is_recorded);
    CombinePlan plan = state->combine_plan(*context);
    plan.owner = state;  // backward hands gradients to its tables
    return KeyedTensor(state->names, state->dims,
                       combine(std::move(plan), {pending.wait(), stepped, dense}));
  });
}

const comm::Group& ShardedEmbeddingBagCollection::group() const noexcept { return state_->group; }

const ModulePlan& ShardedEmbeddingBagCollection::plan() const noexcept {
  return state_->layout->plan;
}

const std::vector<embedding::EmbeddingBagConfig>&
ShardedEmbeddingBagCollection::embedding_bag_configs() const noexcept {
  return state_->layout->tables;
}

std::vector<LocalShard> ShardedEmbeddingBagCollection::local_shards() const {
  return state_->local->shards();
}

std::shared_ptr<const InputSender> ShardedEmbeddingBagCollection::input_sender() const {
  return state_->sender;
}

std::vector<std::shared_ptr<embedding::RowOptimizer>> ShardedEmbeddingBagCollection::optimizers()
    const {
  return state_->local->optimizers();
}

void ShardedEmbeddingBagCollection::load_tables(const std::map<std::string, at::Tensor>& tables) {
  load_shards(*state_->layout, state_->local->weights(), tables);
}

std::map<std::string, at::Tensor> ShardedEmbeddingBagCollection::gather_tables() const {
  return gather_shards(*state_->layout, state_->local->weights(), state_->group);
}

void ShardedEmbeddingBagCollection::step() { state_->local->step(); }
void ShardedEmbeddingBagCollection::zero_grad_rows() { state_->local->zero_grad(); }
double ShardedEmbeddingBagCollection::clip_grad_norm(double max_norm) {
  return state_->local->clip_grad_norm(max_norm);
}
void ShardedEmbeddingBagCollection::set_learning_rate(double learning_rate) {
  state_->local->set_learning_rate(learning_rate);
}

}  // namespace tessera::sharding
