#include "collision/growing_state.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <sstream>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "embedding/row_state.h"
#include "sharding/flat_exchange.h"
#include "sharding/module_parts.h"
#include "tessera/collision/row_init.h"
#include "tessera/core/check.h"

namespace tessera::collision {
namespace {

using embedding::TableBatch;
using sharding::Fault;
using sharding::Route;
using sharding::ShardingType;

constexpr const char* kOperation = "collision.growing_tables";
constexpr const char* kStates[] = {"momentum1", "momentum2"};

std::int64_t total_size(const std::vector<std::vector<std::int64_t>>& lists) {
  std::int64_t total = 0;
  for (const auto& list : lists) total += static_cast<std::int64_t>(list.size());
  return total;
}

/// Buckets in place of rows: what ids are dealt by.
std::vector<embedding::EmbeddingTableConfig> bucket_tables(
    const std::vector<GrowingTable>& tables) {
  std::vector<embedding::EmbeddingTableConfig> configs;
  for (const GrowingTable& table : tables) {
    configs.push_back(table.config);
    configs.back().num_embeddings = kNumBuckets;
  }
  return configs;
}

std::shared_ptr<const sharding::TableLayout> layout_of(
    const std::vector<GrowingTable>& tables,
    const std::map<std::string, sharding::Placement>& wishes, const comm::Group& group,
    int local_size, bool is_pooled) {
  const sharding::Topology topology = sharding::topology_of(group, local_size);
  const auto configs = bucket_tables(tables);
  embedding::check_tables(kOperation, configs);
  std::map<std::string, sharding::Placement> all = wishes;
  for (const auto& config : configs) all.try_emplace(config.name, sharding::row_wise());
  for (const auto& [name, wish] : all) {
    TESSERA_CHECK_VALUE(
        wish.type() == ShardingType::kRowWise || wish.type() == ShardingType::kTableWise,
        kOperation, ": table '", name, "' is to lie ", sharding::name_of(wish.type()),
        "; growing tables lie row_wise or table_wise.");
  }
  auto layout = std::make_shared<sharding::TableLayout>(
      kOperation, configs, sharding::make_module_plan(configs, all, topology), topology, is_pooled);
  layout->cuts_by_hash = true;
  return layout;
}

/// One number for the ids, in whatever order they are given.
std::uint64_t hash_of(std::vector<std::int64_t> ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  std::uint64_t hash = ids.size();
  for (const std::int64_t id : ids) {
    hash = id_hash(static_cast<std::int64_t>(hash + id_hash(id) + 1));
  }
  return hash;
}

/// What must be the same on all ranks besides configs and plan.
std::string words_of(const std::vector<GrowingTable>& tables) {
  std::ostringstream text;
  for (const GrowingTable& table : tables) {
    const IdTableOptions& ids = table.ids;
    text << "'" << table.config.name << "': capacity " << ids.capacity << ", admission "
         << static_cast<int>(ids.admission.kind) << " " << ids.admission.sightings << " "
         << ids.admission.probability << " " << ids.admission.seed << ", eviction "
         << static_cast<int>(ids.eviction.kind) << " " << ids.eviction.decay_exponent << " "
         << ids.eviction.time_to_live << " " << ids.eviction.interval << " " << ids.eviction.share
         << ", refuses " << ids.refuse_when_full << ", protects " << ids.protect.size()
         << " ids of hash " << hash_of(ids.protect) << ", unknown ids "
         << static_cast<int>(table.unknown) << ", seed " << table.seed << ", texts by '"
         << table.text_hash << "'; ";
  }
  return text.str();
}

/// Whether a training call can leave an id without a row.
bool may_refuse(const GrowingTable& table) {
  return table.ids.admission.kind != AdmissionKind::kAlways || table.ids.refuse_when_full;
}

}  // namespace

void for_all(std::size_t count, std::int64_t num_ids,
             const std::function<void(std::size_t)>& each) {
  const auto number = static_cast<std::int64_t>(count);
  const std::int64_t grain = 1 + number * kIdGrain / std::max<std::int64_t>(num_ids, 1);
  std::vector<std::exception_ptr> errors(count);
  at::parallel_for(0, number, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      try {
        each(index(i));
      } catch (...) {
        errors[index(i)] = std::current_exception();
      }
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
}

GrowingPart::GrowingPart(std::size_t number, const GrowingTable& given, int first_bucket,
                         int end_bucket)
    : table(number),
      config(&given),
      ids([&] {
        IdTableOptions options = given.ids;
        options.name = given.config.name;
        options.first_bucket = first_bucket;
        options.end_bucket = end_bucket;
        return options;
      }()),
      weight(std::make_unique<GrowingTensor>(given.config.embedding_dim,
                                             embedding::scalar_type(given.config.data_type))) {
  growth.table = given.config.name;
  TESSERA_CHECK_VALUE(reserve(0), kOperation, ": no memory for table '", given.config.name, "'.");
  resize();
}

bool GrowingPart::reserve(std::int64_t num_ids) noexcept {
  bool has_memory = weight->reserve(num_ids + 1);
  for (auto& [name, tensor] : state) has_memory &= tensor->reserve(num_ids + 1);
  return has_memory;
}

void GrowingPart::resize() {
  weight->resize(ids.num_rows() + 1);
  for (auto& [name, tensor] : state) tensor->resize(ids.num_rows() + 1);
}

void GrowingPart::draw(std::span<const std::int64_t> new_ids, float* values) const {
  const std::int64_t columns = config->config.embedding_dim;
  const double bound = std::sqrt(1.0 / static_cast<double>(columns));
  init_rows(new_ids, config->seed, columns,
            static_cast<float>(config->config.weight_init_min.value_or(-bound)),
            static_cast<float>(config->config.weight_init_max.value_or(bound)),
            {values, new_ids.size() * index(columns)});
}

at::Tensor GrowingPart::first_values(const std::vector<std::int64_t>& new_ids) const {
  at::Tensor values = at::empty(
      {static_cast<std::int64_t>(new_ids.size()), config->config.embedding_dim}, at::kFloat);
  draw(new_ids, values.data_ptr<float>());
  return values;
}

void GrowingPart::fill(const std::vector<std::int64_t>& new_ids,
                       const std::vector<std::int64_t>& rows) {
  if (new_ids.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor& all = weight->tensor();
  if (all.scalar_type() == at::kFloat) {
    // Most rows are new and lie one behind the other: they are drawn where they lie.
    for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
      for (end = begin + 1; end < rows.size() && rows[end] == rows[end - 1] + 1;) ++end;
      draw(std::span(new_ids).subspan(begin, end - begin),
           all.data_ptr<float>() + (rows[begin] + 1) * all.stride(0));
    }
  } else {
    const at::Tensor places = at::tensor(rows, at::kLong) + 1;
    all.index_copy_(0, places, first_values(new_ids).to(all.scalar_type()));
  }
  for (auto& [name, tensor] : state) {
    const std::int64_t width = tensor->tensor().stride(0);
    auto* values = tensor->tensor().data_ptr<float>();
    const auto first = static_cast<float>(name == "momentum1" ? first_state : 0.0);
    for (const std::int64_t row : rows) std::fill_n(values + (row + 1) * width, width, first);
  }
}

bool GrowingPart::take(IdTable loaded, const at::Tensor& rows,
                       const std::map<std::string, at::Tensor>& states) {
  const std::int64_t count = loaded.num_rows();
  if (!reserve(count)) return false;
  const at::NoGradGuard no_grad;
  ids = std::move(loaded);
  resize();
  weight->tensor().narrow(0, 1, count).copy_(rows);
  for (auto& [name, tensor] : state) {
    tensor->tensor().narrow(0, 1, count).copy_(states.at(name));
  }
  return true;
}

std::int64_t GrowingPart::bytes() const { return ids.bytes() + (ids.num_rows() + 1) * row_bytes(); }

std::int64_t GrowingPart::row_bytes() const {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return static_cast<std::int64_t>(tensor.element_size()) * tensor.stride(0);
  };
  std::int64_t bytes = bytes_of(weight->tensor());
  for (const auto& [name, tensor] : state) bytes += bytes_of(tensor->tensor());
  return bytes;
}

IdChanges GrowingPart::plan(const std::vector<std::int64_t>& batch, std::int64_t step,
                            std::vector<std::int64_t>& rows) {
  IdChanges changes = ids.plan_admit(batch, {}, step, rows);
  std::int64_t last = -1;
  for (const std::int64_t row : changes.new_rows) last = std::max(last, row);
  if (reserve(std::max(ids.num_rows(), last + 1))) return changes;
  ids.undo_admitted();
  throw IdMemoryError("id table '" + ids.options().name + "': no memory for " +
                      std::to_string((last + 1) * row_bytes()) + " bytes, " +
                      std::to_string(last + 1) + " rows of " +
                      std::to_string(config->config.embedding_dim) +
                      " columns with their optimizer's state; " + std::to_string(ids.size()) +
                      " ids are held. Set a capacity with eviction, or use more ranks.");
}

void GrowingState::check_tables() const {
  embedding::check_options(kOperation, options.optimizer);
  TESSERA_CHECK_VALUE(!options.optimizer.stochastic_rounding, kOperation,
                      ": rows that are rounded at random depend on their numbers, which differ "
                      "between runs here. Leave stochastic_rounding out.");
  for (const GrowingTable& table : tables) {
    TESSERA_CHECK_VALUE(!table.config.init_fn, kOperation, ": table '", table.config.name,
                        "' has an init_fn. Rows begin from seed and id; give weight_init_min and "
                        "weight_init_max.");
    IdTableOptions ids = table.ids;
    ids.name = table.config.name;
    try {
      const IdTable checked(ids);
    } catch (const std::invalid_argument& error) {
      TESSERA_CHECK_VALUE(false, kOperation, ": ", error.what());
    }
  }
}

GrowingState::GrowingState(std::vector<GrowingTable> given,
                           const std::map<std::string, sharding::Placement>& wishes,
                           const comm::Group& own, const GrowingOptions& wanted, bool is_pooled)
    : TablesState(own, layout_of(given, wishes, own, wanted.local_size, is_pooled)),
      tables(std::move(given)),
      options(wanted) {
  check_tables();
  sharding::check_same_layout(*layout, group, words_of(tables));
  sharding::InputDistOptions input;
  input.needs_source = true;
  input.bounds_check = embedding::BoundsCheckMode::kIgnore;  // any id is legal
  sender = std::make_shared<const sharding::InputSender>(layout, group, std::move(input));
  for (const auto& own_routes : layout->routes) {
    routes.insert(routes.end(), own_routes.begin(), own_routes.end());
  }
  std::vector<std::pair<std::string, std::int64_t>> named;
  bool has_row = false;
  for (const GrowingTable& table : tables) {
    named.emplace_back(table.config.name, table.config.embedding_dim);
    has_row |= table.unknown == UnknownIds::kRow;
    trains_unknown |= table.unknown == UnknownIds::kRow && may_refuse(table);
    is_by_route |= group.size() > 1 && table.config.features().size() > 1;
  }
  if (has_row) unknown_rows = std::make_shared<UnknownRows>(named, group, options.optimizer);
  make_parts();
  if (is_pooled) make_pooled_home();
}

// Ids without a row are replaced one by one, and on several ranks all must know that there are
// none. What a codec rounds is the row of every id.
void GrowingState::make_pooled_home() {
  const bool is_alone = group.size() == 1;
  const bool sends_as_is =
      options.codecs.forward.is_identity() && options.codecs.backward.is_identity();
  if (!is_alone && (is_by_route || !sends_as_is)) return;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    if (layout->is_row_cut(t) || (!is_alone && may_refuse(tables[t]))) return;
  }
  pooled_home.emplace(layout, group, sharding::PooledHomeOptions{.sends_sums = true});
}

void GrowingState::make_parts() {
  const auto& own = layout->routes[index(group.rank())];
  std::map<std::size_t, std::size_t> number_of_part;
  for (std::size_t r = 0; r < own.size(); ++r) {
    const auto [found, is_new] = number_of_part.emplace(own[r].table, parts.size());
    if (is_new) {
      const sharding::Shard& shard = layout->shard(own[r]);
      parts.push_back(std::make_unique<GrowingPart>(own[r].table, tables[own[r].table],
                                                    static_cast<int>(shard.row),
                                                    static_cast<int>(shard.row + shard.rows)));
    }
    parts[found->second]->routes.push_back(r);
  }
  if (parts.empty()) return;
  std::vector<embedding::Table> batch_tables;
  for (const auto& part : parts) {
    batch_tables.push_back({part->config->config.name, part->weight->tensor()});
  }
  std::vector<embedding::Feature> features;
  const auto add = [&](const Route& route) {
    features.push_back({layout->features[route.feature],
                        static_cast<std::int64_t>(number_of_part.at(route.table))});
  };
  for (std::size_t i = 0; i < own.size() * index(group.size()); ++i) {
    add(own[is_by_route ? i / index(group.size()) : i % own.size()]);
  }
  embedding::TableBatchOptions batch_options;
  batch_options.gradients = embedding::GradientForm::kFused;
  batch_options.optimizer = options.optimizer;
  batch_options.bounds_check = embedding::BoundsCheckMode::kIgnore;
  batch = std::make_unique<TableBatch>(std::move(batch_tables), std::move(features), batch_options);
  // The optimizer's state grows with the rows.
  auto& kept = batch->optimizer()->state().tables;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    at::Tensor* const states[] = {&kept[i].momentum1, &kept[i].momentum2};
    for (std::size_t s = 0; s < 2; ++s) {
      if (!states[s]->defined()) continue;
      auto grown = std::make_unique<GrowingTensor>(states[s]->dim() == 2 ? states[s]->size(1) : 0,
                                                   states[s]->scalar_type());
      *states[s] = grown->tensor();
      parts[i]->state[kStates[s]] = std::move(grown);
    }
    const bool is_adagrad = options.optimizer.kind == embedding::OptimizerKind::kAdagrad ||
                            options.optimizer.kind == embedding::OptimizerKind::kRowWiseAdagrad;
    if (is_adagrad) parts[i]->first_state = options.optimizer.initial_accumulator;
    TESSERA_CHECK_VALUE(parts[i]->reserve(0), kOperation, ": no memory for table '",
                        parts[i]->config->config.name, "'.");
    parts[i]->resize();
  }
}

std::vector<sharding::LocalShard> GrowingState::shards() const {
  std::vector<sharding::LocalShard> all;
  for (const auto& part : parts) {
    sharding::LocalShard shard;
    shard.table = shard.name = part->config->config.name;
    shard.table_rows = part->weight->tensor().size(0);
    shard.table_columns = part->weight->tensor().size(1);
    shard.place = {0, 0, shard.table_rows, shard.table_columns, group.rank()};
    shard.weight = part->weight->tensor();
    for (const auto& [name, tensor] : part->state) shard.state[name] = tensor->tensor();
    all.push_back(std::move(shard));
  }
  return all;
}

std::vector<std::shared_ptr<embedding::RowOptimizer>> GrowingState::optimizers() const {
  if (batch == nullptr) return {};
  return {batch->optimizer()};
}

void GrowingState::set_learning_rate(double learning_rate) {
  options.optimizer.learning_rate = learning_rate;
  if (batch != nullptr) batch->optimizer()->set_learning_rate(learning_rate);
  if (unknown_rows) unknown_rows->optimizer().set_learning_rate(learning_rate);
}

std::size_t GrowingState::number_of(const std::string& table) const {
  const auto found = std::find_if(tables.begin(), tables.end(), [&](const GrowingTable& one) {
    return one.config.name == table;
  });
  TESSERA_CHECK_INDEX(found != tables.end(), kOperation, ": there is no table '", table, "'.");
  return static_cast<std::size_t>(found - tables.begin());
}

GrowingPart* GrowingState::part_of(const std::string& table) {
  const std::size_t number = number_of(table);
  for (const auto& part : parts) {
    if (part->table == number) return part.get();
  }
  return nullptr;
}

// All ranks admit, or none does.
void GrowingState::admit(std::vector<std::vector<std::int64_t>>& ids,
                         std::vector<std::vector<std::int64_t>>& rows, bool admits) {
  if (!admits) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      parts[p]->ids.find(ids[p], rows[p], [](std::int64_t count, const auto& run) {
        at::parallel_for(0, count, kIdGrain, run);
      });
    }
    return;
  }
  Fault fault;
  std::vector<IdChanges> changes(parts.size());
  const auto undo = [&] {  // of those that have planned; others are as they were
    for (const auto& part : parts) part->ids.undo_admitted();
  };
  try {
    for_all(parts.size(), total_size(ids),
            [&](std::size_t p) { changes[p] = parts[p]->plan(ids[p], num_calls + 1, rows[p]); });
  } catch (const std::exception& error) {
    if (group.size() == 1) {
      undo();
      throw;
    }
    fault = {Fault::Kind::kValue, std::string(kOperation) + ": on rank " +
                                      std::to_string(group.rank()) + ", " + error.what()};
  }
  if (group.size() > 1) {
    const bool is_faulty = fault.kind != Fault::Kind::kNone;
    const at::Tensor status =
        sharding::exchange_numbers(at::full({group.size(), 1}, is_faulty ? 1 : 0, at::kLong), group)
            .wait();
    if (status.sum().item<std::int64_t>() > 0) {
      undo();
      sharding::raise_together(kOperation, fault, "admission", group);
    }
  }
  keep(changes);
}

void GrowingState::forget_changes() {
  for (const auto& follower : followers) {
    if (const auto one = follower.lock()) one->forget();
  }
}

void GrowingState::keep(const std::vector<IdChanges>& changes) {
  ++num_calls;
  std::erase_if(followers, [](const auto& follower) { return follower.expired(); });
  std::int64_t num_new = 0;
  for (const IdChanges& change : changes)
    num_new += static_cast<std::int64_t>(change.new_ids.size());
  for_all(parts.size(), num_new, [&](std::size_t p) {
    parts[p]->ids.keep_admitted();
    parts[p]->resize();
    parts[p]->fill(changes[p].new_ids, changes[p].new_rows);
  });
  for (std::size_t p = 0; p < parts.size(); ++p) {
    GrowingPart& part = *parts[p];
    for (const auto& follower : followers) {
      const auto one = follower.lock();
      if (one == nullptr || changes[p].evicted_ids.empty()) continue;
      auto& removed = one->removed_[part.config->config.name];
      removed.insert(removed.end(), changes[p].evicted_ids.begin(), changes[p].evicted_ids.end());
    }
    part.growth.admitted += static_cast<std::int64_t>(changes[p].new_ids.size());
    part.growth.evicted += static_cast<std::int64_t>(changes[p].evicted_ids.size());
    part.growth.refused += changes[p].num_refused;
    part.growth.hits += changes[p].num_found;
  }
}

}  // namespace tessera::collision
