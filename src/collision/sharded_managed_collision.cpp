#include "tessera/collision/sharded_managed_collision.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "collision/mapped_features.h"
#include "sharding/agreement.h"
#include "tessera/collision/id_table.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::collision {
namespace {

using embedding::EmbeddingTableConfig;
using jagged::KeyedJaggedTensor;
using sharding::Fault;
using sharding::ShardingType;

constexpr const char* kSharded = "collision.sharded";
constexpr std::int64_t kAnyId = std::numeric_limits<std::int64_t>::max();

std::vector<std::int64_t> row_sums(const at::Tensor& table) {
  const at::Tensor sums = table.sum(1).contiguous();
  const auto* first = sums.const_data_ptr<std::int64_t>();
  return {first, first + sums.numel()};
}

/// Which rank has an id of a table. Where columns are cut, it is the one with the first columns of
/// the row.
struct Owners {
  std::vector<std::int64_t> ranks;   // that have rows, in order of the rows
  std::vector<std::int64_t> bounds;  // of their rows: one more
  bool has_others = false;           // other ranks have other columns of the rows
  bool is_by_range = false;
  std::int64_t input_size = kAnyId;

  at::Tensor of(const at::Tensor& ids) const {
    const at::Tensor all = at::tensor(ranks, at::kLong);
    if (ranks.size() == 1) return all.expand({ids.numel()});
    const auto count = static_cast<std::int64_t>(ranks.size());
    if (is_by_range) {
      const std::int64_t size = input_size / count + (input_size % count == 0 ? 0 : 1);
      return all.index_select(0, at::floor_divide(ids, size).clamp(0, count - 1));
    }
    // Buckets in contiguous runs, as many as a rank has rows.
    std::vector<std::int64_t> first;
    for (std::size_t i = 1; i + 1 < bounds.size(); ++i) {
      first.push_back(kNumBuckets * bounds[i] / bounds.back());
    }
    at::Tensor buckets = ids.contiguous().clone();
    auto* bucket = buckets.data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < buckets.numel(); ++i) bucket[i] = bucket_of(bucket[i]);
    return all.index_select(
        0, at::bucketize(buckets, at::tensor(first, at::kLong), /*out_int32=*/false, true));
  }
};

Owners owners_of(const EmbeddingTableConfig& table, const sharding::ParameterSharding& sharding,
                 const MchOptions& module) {
  TESSERA_CHECK_VALUE(sharding.type != ShardingType::kDataParallel, kSharded, ": table '",
                      table.name, "' is to lie ", sharding::name_of(sharding.type),
                      "; ids have one owner each. Cut it by table, rows or columns.");
  Owners owners;
  std::vector<sharding::Shard> shards = sharding.shards;
  std::erase_if(shards, [](const sharding::Shard& shard) { return shard.rows == 0; });
  std::sort(shards.begin(), shards.end(), [](const auto& one, const auto& other) {
    return std::tie(one.row, one.column) < std::tie(other.row, other.column);
  });
  for (const sharding::Shard& shard : shards) {
    if (shard.column != 0) {
      TESSERA_CHECK_VALUE(!owners.bounds.empty() && owners.bounds.back() == shard.row, kSharded,
                          ": the columns of table '", table.name,
                          "' are not all cut at the same rows.");
      owners.has_others = true;
      continue;
    }
    owners.ranks.push_back(shard.rank);
    owners.bounds.push_back(shard.row);
  }
  owners.bounds.push_back(table.num_embeddings);
  owners.is_by_range = module.input_hash_func && module.input_hash_size != kAnyId;
  owners.input_size = module.input_hash_size;
  return owners;
}

}  // namespace

struct ManagedCollisionContext {
  std::optional<MappedFeatures> features;
  at::Tensor places;    // of each id of the features among those that were sent
  at::Tensor sent;      // [ranks, tables]: how many different ids went to each
  at::Tensor received;  // and came from each
  at::Tensor ids;       // [ids, 2] that arrived: id and count; rank by rank, table by table
};

struct ShardedManagedCollisionCollection::State {
  comm::Group group;
  std::vector<EmbeddingTableConfig> tables;
  std::vector<Owners> owners;
  /// The whole tables' modules, for what they make of ids before they are sent.
  std::vector<std::shared_ptr<MCHManagedCollisionModule>> whole;
  std::vector<std::shared_ptr<MCHManagedCollisionModule>> parts;  // null: none on this rank

  std::size_t number_of(const std::string& table) const {
    for (std::size_t t = 0; t < tables.size(); ++t) {
      if (tables[t].name == table) return t;
    }
    TESSERA_CHECK_INDEX(false, kSharded, ": there is no table '", table, "'.");
  }
};

ShardedManagedCollisionCollection::ShardedManagedCollisionCollection(
    const ManagedCollisionModules& modules, std::vector<EmbeddingTableConfig> tables,
    const sharding::ModulePlan& plan, comm::Group group)
    : torch::nn::Module("ShardedManagedCollisionCollection"),
      state_(std::make_shared<State>(State{std::move(group), std::move(tables), {}, {}, {}})) {
  State& state = *state_;
  const ManagedCollisionCollection checked(modules, state.tables);
  const auto holder = register_module("_managed_collision_modules",
                                      std::make_shared<torch::nn::Module>("ManagedCollision"));
  for (const EmbeddingTableConfig& table : state.tables) {
    const auto sharding = plan.find(table.name);
    TESSERA_CHECK_VALUE(sharding != plan.end(), kSharded, ": the plan has no table '", table.name,
                        "'.");
    auto whole = std::dynamic_pointer_cast<MCHManagedCollisionModule>(modules.at(table.name));
    TESSERA_CHECK_VALUE(whole != nullptr, kSharded, ": the module of table '", table.name,
                        "' is no MCHManagedCollisionModule, which is what can be sharded.");
    Owners owners = owners_of(table, sharding->second, whole->options());
    TESSERA_CHECK_VALUE(whole->num_ids() == 0 || owners.ranks.size() == 1, kSharded, ": table '",
                        table.name, "' has ", whole->num_ids(),
                        " ids already; their rows cannot be dealt over ranks. Shard it before it "
                        "is trained, or table_wise.");
    std::shared_ptr<MCHManagedCollisionModule> part;
    const auto own = std::find(owners.ranks.begin(), owners.ranks.end(), state.group.rank());
    if (own != owners.ranks.end()) {
      const auto place = static_cast<std::size_t>(own - owners.ranks.begin());
      part =
          std::dynamic_pointer_cast<MCHManagedCollisionModule>(whole->rebuild_with_output_id_range(
              owners.bounds[place], owners.bounds[place + 1], owners.bounds));
      part->set_unknown_row(table.num_embeddings - 1);
      if (whole->num_ids() > 0) part->load_state_dict(whole->state_dict());
      part->train(whole->is_training());
      holder->register_module(table.name, part);
    }
    state.owners.push_back(std::move(owners));
    state.whole.push_back(std::move(whole));
    state.parts.push_back(std::move(part));
  }
}

ShardedManagedCollisionCollection::~ShardedManagedCollisionCollection() = default;

const std::vector<EmbeddingTableConfig>& ShardedManagedCollisionCollection::embedding_configs()
    const noexcept {
  return state_->tables;
}
std::vector<EmbeddingTableConfig> ShardedManagedCollisionCollection::mapped_configs() const {
  return mapped_configs_of(state_->tables);
}
const comm::Group& ShardedManagedCollisionCollection::group() const noexcept {
  return state_->group;
}

std::shared_ptr<MCHManagedCollisionModule> ShardedManagedCollisionCollection::part(
    const std::string& table) const {
  return state_->parts[state_->number_of(table)];
}

const std::vector<std::int64_t>& ShardedManagedCollisionCollection::bounds(
    const std::string& table) const {
  return state_->owners[state_->number_of(table)].bounds;
}

at::Tensor ShardedManagedCollisionCollection::owners(const std::string& table,
                                                     const at::Tensor& ids) const {
  return state_->owners[state_->number_of(table)].of(ids);
}

std::map<std::string, std::optional<at::Tensor>> ShardedManagedCollisionCollection::evict() {
  std::map<std::string, std::optional<at::Tensor>> evicted;
  for (std::size_t t = 0; t < state_->tables.size(); ++t) {
    const auto& part = state_->parts[t];
    evicted[state_->tables[t].name] = part == nullptr ? std::nullopt : part->evict();
  }
  // Ranks with other columns of the rows learn of them.
  std::vector<at::Tensor> own;
  for (std::size_t t = 0; t < state_->tables.size(); ++t) {
    if (!state_->owners[t].has_others) continue;
    const at::Tensor rows =
        evicted[state_->tables[t].name].value_or(at::empty({0}, at::kLong)).cpu();
    own.push_back(at::stack({at::full_like(rows, static_cast<std::int64_t>(t)), rows}, 1));
  }
  if (own.empty()) return evicted;
  const at::Tensor all = comm::all_gather_v(at::cat(own), state_->group);
  for (std::size_t t = 0; t < state_->tables.size(); ++t) {
    if (!state_->owners[t].has_others) continue;
    const at::Tensor is_its = all.select(1, 0) == static_cast<std::int64_t>(t);
    const at::Tensor rows = all.select(1, 1).masked_select(is_its);
    auto& found = evicted[state_->tables[t].name];
    if (rows.numel() > 0) {
      found = rows;
    } else {
      found.reset();
    }
  }
  return evicted;
}

namespace {

/// Different ids of every table, [ids, 2] with how often each came, in the order in which they are
/// sent: rank by rank, table by table.
at::Tensor ids_to_send(const std::vector<Owners>& owners,
                       const std::vector<std::shared_ptr<MCHManagedCollisionModule>>& modules,
                       std::int64_t world, ManagedCollisionContext& context) {
  std::vector<at::Tensor> pieces;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> reverse;
  std::int64_t first = 0;
  for (std::size_t t = 0; t < owners.size(); ++t) {
    const at::Tensor given = context.features->ids_of(t).to(at::kCPU);
    const auto [ids, places, counts] =
        at::_unique2(modules[t]->preprocess(given).to(at::kLong), /*sorted=*/true,
                     /*return_inverse=*/true, /*return_counts=*/true);
    const at::Tensor target = owners[t].of(ids);
    context.sent.select(1, static_cast<std::int64_t>(t)).copy_(at::bincount(target, {}, world));
    pieces.push_back(at::stack({ids, counts}, 1));
    targets.push_back(target);
    reverse.push_back(places + first);
    first += ids.numel();
  }
  // By rank; tables stay in order.
  const at::Tensor order = at::argsort(at::cat(targets), /*stable=*/true, /*dim=*/0);
  at::Tensor place_of = at::empty_like(order);
  place_of.index_copy_(0, order, at::arange(order.numel(), order.options()));
  context.places = place_of.index_select(0, at::cat(reverse));
  return at::cat(pieces).index_select(0, order);
}

}  // namespace

ManagedCollisionDist ShardedManagedCollisionCollection::input_dist(
    const KeyedJaggedTensor& features) {
  const at::NoGradGuard no_grad;
  const auto state = state_;
  const auto world = static_cast<std::int64_t>(state->group.size());
  auto context = std::make_shared<ManagedCollisionContext>();
  const auto num_tables = static_cast<std::int64_t>(state->tables.size());
  context->sent = at::zeros({world, num_tables}, at::kLong);
  Fault fault;
  at::Tensor ids = at::empty({0, 2}, at::kLong);
  try {
    context->features.emplace(state->tables, features);
    ids = ids_to_send(state->owners, state->whole, world, *context);
  } catch (const c10::ValueError& error) {  // told to all ranks with the sizes
    fault = {Fault::Kind::kValue, error.what_without_backtrace()};
    context->sent.zero_();
  }
  const bool is_faulty = fault.kind != Fault::Kind::kNone;
  const at::Tensor flags = at::full({world, 1}, is_faulty ? 1 : 0, at::kLong);
  const auto sizes = comm::all_to_all_async(at::cat({context->sent, flags}, 1), state->group);
  return ManagedCollisionDist([state, context, ids, fault, sizes, num_tables] {
    const at::Tensor received = sizes.wait();
    if (received.select(1, num_tables).any().item<bool>()) {
      sharding::raise_together(kSharded, fault, "ids", state->group);
    }
    context->received = received.narrow(1, 0, num_tables).contiguous();
    const auto pending = comm::all_to_all_v_async(ids, row_sums(context->sent), state->group,
                                                  row_sums(context->received));
    return comm::Awaitable<ManagedCollisionInput>([context, pending] {
      context->ids = pending.wait();
      return ManagedCollisionInput{context};
    });
  });
}

comm::LazyAwaitable<KeyedJaggedTensor> ShardedManagedCollisionCollection::compute_and_output_dist(
    const ManagedCollisionInput& input) {
  const at::NoGradGuard no_grad;
  const auto context = input.context;
  const State& state = *state_;
  const std::size_t num_tables = state.tables.size();
  const at::Tensor sizes = context->received.flatten();
  const auto* size = sizes.const_data_ptr<std::int64_t>();
  const auto parts = context->ids.split_with_sizes({size, static_cast<std::size_t>(sizes.numel())});
  std::vector<at::Tensor> rows(parts.size(), at::empty({0}, at::kLong));
  for (std::size_t t = 0; t < num_tables; ++t) {
    if (state.parts[t] == nullptr) continue;
    std::vector<at::Tensor> own;
    std::vector<std::int64_t> counts;
    for (std::size_t i = t; i < parts.size(); i += num_tables) {
      own.push_back(parts[i]);
      counts.push_back(parts[i].size(0));
    }
    const at::Tensor all = at::cat(own);
    const at::Tensor ids = all.select(1, 0).contiguous();
    state.parts[t]->profile(ids, all.select(1, 1).contiguous());
    const auto found = state.parts[t]->remap(ids).split_with_sizes(counts);
    for (std::size_t rank = 0; rank < found.size(); ++rank) {
      rows[rank * num_tables + t] = found[rank];
    }
  }
  const auto pending = comm::all_to_all_v_async(at::cat(rows), row_sums(context->received),
                                                state.group, row_sums(context->sent));
  return comm::LazyAwaitable<KeyedJaggedTensor>([context, pending] {
    return context->features->with_rows(pending.wait().index_select(0, context->places));
  });
}

KeyedJaggedTensor ShardedManagedCollisionCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

// ---- tables behind it ----

namespace {

/// Resets the rows of this rank that got another id.
void reset_evicted(ShardedManagedCollisionCollection& ids, const sharding::ShardedTables& tables) {
  const auto evicted = ids.evict();
  const auto optimizers = tables.optimizers();
  for (const sharding::LocalShard& shard : tables.local_shards()) {
    const auto& rows = evicted.at(shard.table);
    if (!rows) continue;
    const at::Tensor own = *rows - shard.place.row;
    const at::Tensor here = own.masked_select((own >= 0).logical_and_(own < shard.place.rows));
    const auto config =
        std::find_if(ids.embedding_configs().begin(), ids.embedding_configs().end(),
                     [&](const EmbeddingTableConfig& table) { return table.name == shard.table; });
    std::vector<at::Tensor> states;
    embedding::OptimizerOptions options;
    for (const auto& optimizer : optimizers) {
      if (!optimizer->has_table(shard.name)) continue;
      options = optimizer->options();
      for (const auto& [name, state] : shard.state) states.push_back(state);
    }
    reset_rows(*config, shard.weight, here, states, options);
  }
}

/// Maps the ids of a batch, and then looks the rows up.
template <class Tables>
auto look_up(ShardedManagedCollisionCollection& ids, Tables& tables, bool returns_remapped,
             const ManagedCollisionInput& input) {
  const KeyedJaggedTensor mapped = ids.compute_and_output_dist(input).wait();
  reset_evicted(ids, tables);
  auto rows = tables.compute_and_output_dist(tables.input_dist(mapped).wait().wait());
  return std::pair(std::move(rows), returns_remapped ? RemappedFeatures(mapped) : std::nullopt);
}

}  // namespace

ShardedManagedCollisionEmbeddingBagCollection::ShardedManagedCollisionEmbeddingBagCollection(
    std::vector<embedding::EmbeddingBagConfig> tables, const ManagedCollisionModules& modules,
    const sharding::ModulePlan& plan, const comm::Group& group, bool return_remapped_features,
    bool is_weighted, const sharding::ShardedOptions& options)
    : torch::nn::Module("ShardedManagedCollisionEmbeddingBagCollection"),
      ids_(register_module("_managed_collision_collection",
                           std::make_shared<ShardedManagedCollisionCollection>(
                               modules, std::move(tables), plan, group))),
      tables_(register_module("_embedding_module",
                              std::make_shared<sharding::ShardedEmbeddingBagCollection>(
                                  ids_->mapped_configs(), plan, group, is_weighted, options))),
      returns_remapped_(return_remapped_features) {}

std::pair<comm::LazyAwaitable<jagged::KeyedTensor>, RemappedFeatures>
ShardedManagedCollisionEmbeddingBagCollection::compute_and_output_dist(
    const ManagedCollisionInput& input) {
  return look_up(*ids_, *tables_, returns_remapped_, input);
}

std::pair<jagged::KeyedTensor, RemappedFeatures>
ShardedManagedCollisionEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  auto [rows, mapped] = compute_and_output_dist(input_dist(features).wait().wait());
  return {rows.wait(), std::move(mapped)};
}

ShardedManagedCollisionEmbeddingCollection::ShardedManagedCollisionEmbeddingCollection(
    std::vector<embedding::EmbeddingConfig> tables, const ManagedCollisionModules& modules,
    const sharding::ModulePlan& plan, const comm::Group& group, bool return_remapped_features,
    const sharding::ShardedSequenceOptions& options)
    : torch::nn::Module("ShardedManagedCollisionEmbeddingCollection"),
      ids_(register_module("_managed_collision_collection",
                           std::make_shared<ShardedManagedCollisionCollection>(
                               modules, std::move(tables), plan, group))),
      tables_(register_module("_embedding_module",
                              std::make_shared<sharding::ShardedEmbeddingCollection>(
                                  ids_->mapped_configs(), plan, group, options))),
      returns_remapped_(return_remapped_features) {}

std::pair<comm::LazyAwaitable<embedding::NamedRows>, RemappedFeatures>
ShardedManagedCollisionEmbeddingCollection::compute_and_output_dist(
    const ManagedCollisionInput& input) {
  return look_up(*ids_, *tables_, returns_remapped_, input);
}

std::pair<embedding::NamedRows, RemappedFeatures>
ShardedManagedCollisionEmbeddingCollection::forward(const KeyedJaggedTensor& features) {
  auto [rows, mapped] = compute_and_output_dist(input_dist(features).wait().wait());
  return {rows.wait(), std::move(mapped)};
}

}  // namespace tessera::collision
