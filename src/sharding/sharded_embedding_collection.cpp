#include "tessera/sharding/sharded_embedding_collection.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "sharding/flat_exchange.h"
#include "sharding/module_parts.h"
#include "sharding/tables_state.h"
#include "tessera/jagged/inverse_indices.h"

namespace tessera::sharding {

using embedding::NamedRows;
using embedding::TableBatch;
using jagged::JaggedTensor;
using jagged::KeyedJaggedTensor;

namespace {

constexpr const char* kCollection = "sharding.embedding_collection";

/// Rows of some ids of one feature, as one source has them.
struct Block {
  std::size_t source = 0;  // 0: the exchange; 1, 2: tables that stay here
  std::size_t place = 0;   // number of the block in its source
};

/// Some columns of an output: one block, or several whose rows are dealt out by id.
struct ColumnPart {
  std::int64_t column = 0;
  std::vector<Block> blocks;
};

/// How many ids the bags of each segment hold together; `bags` are their numbers of bags.
Sizes ids_of_segments(const at::Tensor& lengths, const Sizes& bags) {
  const at::Tensor host = lengths.cpu().contiguous();
  const auto* next = host.const_data_ptr<std::int32_t>();
  Sizes counts;
  counts.reserve(bags.size());
  for (const std::int64_t count : bags) {
    std::int64_t ids = 0;
    for (std::int64_t b = 0; b < count; ++b) ids += *next++;
    counts.push_back(ids);
  }
  return counts;
}

/// Where each of 0, 1, 2 … stands in `order`.
at::Tensor inverse_of(const at::Tensor& order) {
  return at::empty_like(order).scatter_(0, order, at::arange(order.numel(), order.options()));
}

}  // namespace

struct ShardedEmbeddingCollection::State : TablesState {
  State(std::vector<embedding::EmbeddingConfig> tables, ModulePlan plan, const comm::Group& own,
        const ShardedSequenceOptions& given)
      : TablesState(kCollection, std::move(tables), std::move(plan), own, given,
                    /*is_pooled=*/false),
        options(given) {
    options.device = numbered(options.device);
    InputDistOptions input;
    input.needs_source = true;
    input.sends_ids_once = options.use_index_dedup;
    make_tables(options, std::move(input));
    find_parts();
  }

  void find_parts();
  /// The blocks of the exchange: from each rank, route by route.
  std::vector<at::Tensor> blocks_of(const at::Tensor& flat, const Sizes& ids) const;
  at::Tensor rows_of(const DistContext& context, std::size_t output,
                     const std::vector<std::vector<at::Tensor>>& blocks,
                     const std::vector<at::Tensor>& sources) const;
  NamedRows results(const DistContext& context, const std::vector<std::vector<at::Tensor>>& blocks,
                    const Sizes& ids_received) const;
  std::vector<at::Tensor> local_blocks(const DistContext& context, const TableBatch* batch,
                                       const std::vector<std::size_t>& routes) const;

  ShardedSequenceOptions options;
  std::vector<Route> routes;                   // all that is sent, rank by rank
  std::vector<std::vector<ColumnPart>> parts;  // of each output, by column
  /// The output of a table and a feature.
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> output_of;
};

using RowState = ShardedEmbeddingCollection::State;

void RowState::find_parts() {
  struct Found {
    std::size_t output;
    std::int64_t column;
    std::int64_t row;
    Block block;
    auto order() const { return std::tuple(output, column, row); }
  };
  std::vector<Found> found;
  const auto add = [&](std::size_t source, std::size_t place, const Route& route) {
    const Shard& shard = layout->shard(route);
    found.push_back({route.output, shard.column, shard.row, {source, place}});
  };
  for (const auto& own : layout->routes) {
    for (const Route& route : own) {
      add(0, routes.size(), route);
      routes.push_back(route);
    }
  }
  const auto add_local = [&](std::size_t source, const std::vector<std::size_t>& numbers) {
    for (std::size_t i = 0; i < numbers.size(); ++i) add(source, i, layout->local[numbers[i]]);
  };
  add_local(1, local->stepped_routes());
  add_local(2, local->dense_routes());
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return a.order() < b.order(); });
  for (std::size_t o = 0; o < layout->outputs.size(); ++o) {
    output_of[{layout->outputs[o].table, layout->outputs[o].feature}] = o;
  }
  parts.resize(layout->outputs.size());
  for (const Found& each : found) {
    auto& columns = parts[each.output];
    if (columns.empty() || columns.back().column != each.column) {
      columns.push_back({each.column, {}});
    }
    columns.back().blocks.push_back(each.block);
  }
}

std::vector<at::Tensor> RowState::blocks_of(const at::Tensor& flat, const Sizes& ids) const {
  Sizes sizes;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    sizes.push_back(ids[i] * layout->shard(routes[i]).columns);
  }
  // One cut, not many views: its gradient is put together once.
  std::vector<at::Tensor> blocks = flat.split_with_sizes(sizes);
  for (std::size_t i = 0; i < routes.size(); ++i) {
    blocks[i] = blocks[i].reshape({ids[i], layout->shard(routes[i]).columns});
  }
  return blocks;
}

std::vector<at::Tensor> RowState::local_blocks(const DistContext& context, const TableBatch* batch,
                                               const std::vector<std::size_t>& numbers) const {
  if (batch == nullptr) return {};
  Sizes sizes;
  for (const std::size_t r : numbers) {
    const Route& route = layout->local[r];
    sizes.push_back(context.features.length_per_key()[context.places[route.feature]] *
                    layout->tables[route.table].embedding_dim);
  }
  std::vector<at::Tensor> blocks =
      batch->sequence(local_input(*layout, context, numbers, /*is_weighted=*/false))
          .split_with_sizes(sizes);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::int64_t columns = layout->tables[layout->local[numbers[i]].table].embedding_dim;
    blocks[i] = blocks[i].reshape({sizes[i] / columns, columns});
  }
  return blocks;
}

at::Tensor RowState::rows_of(const DistContext& context, std::size_t output,
                             const std::vector<std::vector<at::Tensor>>& blocks,
                             const std::vector<at::Tensor>& sources) const {
  const std::size_t feature = layout->outputs[output].feature;
  const std::int64_t first = context.features.offset_per_key()[context.places[feature]];
  std::vector<at::Tensor> columns;
  for (const ColumnPart& part : parts[output]) {
    std::vector<at::Tensor> rows;
    std::vector<at::Tensor> order;
    for (const Block& block : part.blocks) {
      rows.push_back(blocks[block.source][block.place]);
      if (part.blocks.size() > 1) order.push_back(sources[block.place]);
    }
    columns.push_back(rows.size() == 1
                          ? rows[0]
                          : at::cat(rows).index_select(0, inverse_of(at::cat(order) - first)));
  }
  return columns.size() == 1 ? columns[0] : at::cat(columns, 1);
}

NamedRows RowState::results(const DistContext& context,
                            const std::vector<std::vector<at::Tensor>>& blocks,
                            const Sizes& ids_received) const {
  std::vector<at::Tensor> sources;
  if (context.sent.source.defined()) sources = context.sent.source.split_with_sizes(ids_received);
  std::vector<at::Tensor> rows;
  for (std::size_t o = 0; o < layout->outputs.size(); ++o) {
    rows.push_back(rows_of(context, o, blocks, sources));
  }
  const bool is_once = context.given.has_value();
  const KeyedJaggedTensor& given = is_once ? *context.given : context.features;
  NamedRows named;
  for (std::size_t o = 0; o < layout->outputs.size(); ++o) {
    const Output& output = layout->outputs[o];
    const std::size_t place = is_once ? output.feature : context.places[output.feature];
    at::Tensor own = rows[o];
    if (is_once) {
      // The ids of a space are spread over its features; so are their rows.
      std::vector<at::Tensor> shared;
      for (std::size_t f = 0; f < layout->features.size(); ++f) {
        if (context.space_of[f] != context.space_of[output.feature]) continue;
        shared.push_back(rows[output_of.at({output.table, f})]);
      }
      const std::int64_t begin = given.offset_per_key()[place];
      const std::int64_t end = given.offset_per_key()[place + 1];
      own = (shared.size() == 1 ? shared[0] : at::cat(shared))
                .index_select(0, context.place_in_space.narrow(0, begin, end - begin));
    }
    const JaggedTensor feature = given.feature(place);
    JaggedTensor bags(own, options.need_indices ? feature.values() : at::Tensor(),
                      feature.lengths());
    if (context.inverse) {
      const std::string& name = layout->features[output.feature];
      bags = jagged::spread_bags(bags, jagged::inverse_of(*context.inverse, name, kCollection));
    }
    named.emplace_back(output.name, std::move(bags));
  }
  return named;
}

ShardedEmbeddingCollection::ShardedEmbeddingCollection(
    std::vector<embedding::EmbeddingConfig> tables, ModulePlan plan, const comm::Group& group,
    const ShardedSequenceOptions& options)
    : torch::nn::Module("ShardedEmbeddingCollection"),
      state_(std::make_shared<State>(std::move(tables), std::move(plan), group, options)) {
  tables_state_ = state_;
  register_shards(*this, "embeddings", state_->local->weights());
}

ShardedEmbeddingCollection::~ShardedEmbeddingCollection() = default;

NamedRows ShardedEmbeddingCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

comm::LazyAwaitable<NamedRows> ShardedEmbeddingCollection::compute_and_output_dist(
    const DistributedInput& input) {
  const std::shared_ptr<DistContext> context = input.context;
  const std::shared_ptr<State> state = state_;
  const TableLayout& layout = *state->layout;
  const TableBatch* routed = state->local->routed();
  // A rank without rows still takes part.
  const at::Tensor rows =
      routed != nullptr
          ? routed->sequence(context->lookup_input())
          : at::empty({0}, at::TensorOptions(at::kFloat).device(state->options.device));
  const auto& own = layout.routes[static_cast<std::size_t>(state->group.rank())];
  Sizes bags;
  for (const Sizes& rank : context->batches) bags.insert(bags.end(), rank.begin(), rank.end());
  const Sizes asked = ids_of_segments(context->lengths, bags);
  bags.clear();
  for (const Route& route : state->routes) bags.push_back(context->strides[route.feature]);
  const Sizes ids = ids_of_segments(context->sent.lengths, bags);
  Sizes sent;
  Sizes received;
  std::size_t next = 0;
  for (std::size_t r = 0; r < layout.routes.size(); ++r) {
    sent.push_back(0);
    for (std::size_t k = 0; k < own.size(); ++k) {
      sent.back() += asked[r * own.size() + k] * layout.shard(own[k]).columns;
    }
    received.push_back(0);
    for (const Route& route : layout.routes[r]) {
      received.back() += ids[next++] * layout.shard(route).columns;
    }
  }
  const auto pending = exchange_flat(rows, sent, received, state->group, state->options.codecs,
                                     gradient_factor(state->group));
  const auto stepped =
      state->local_blocks(*context, state->local->local_stepped(), state->local->stepped_routes());
  const auto dense =
      state->local_blocks(*context, state->local->local_dense(), state->local->dense_routes());
  const bool is_recorded = at::GradMode::is_enabled();
  return comm::LazyAwaitable<NamedRows>([=] {
    const at::AutoGradMode recorded(is_recorded);
    return state->results(*context, {state->blocks_of(pending.wait(), ids), stepped, dense}, ids);
  });
}

const std::vector<embedding::EmbeddingConfig>& ShardedEmbeddingCollection::embedding_configs()
    const noexcept {
  return state_->layout->tables;
}

}  // namespace tessera::sharding
