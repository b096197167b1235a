#include "tessera/collision/growing_tables.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "collision/growing_state.h"
#include "collision/home_rows.h"
#include "embedding/row_state.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::collision {
namespace {

using jagged::JaggedTensor;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;
using sharding::DistContext;

/// The first id of every bag of a key, from zero, and the end of the last. `lengths`: of all keys.
std::vector<std::int64_t> offsets_of(const KeyedJaggedTensor& features, std::size_t place,
                                     const std::int64_t* lengths) {
  const std::int64_t* length = lengths + features.lengths_offset_per_key()[place];
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(features.stride_per_key()[place]) + 1);
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) offsets[b + 1] = offsets[b] + length[b];
  return offsets;
}

std::vector<std::int64_t> one_by_one(std::size_t count) {
  std::vector<std::int64_t> offsets(count + 1);
  for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<std::int64_t>(i);
  return offsets;
}

/// Row 0 of the tensors is nobody's.
IdList with_tensor_rows(IdList list) {
  for (std::int64_t& row : list.rows) ++row;
  return list;
}

void check_batch(const DistContext& context) {
  TESSERA_CHECK_VALUE(!context.features.variable_stride_per_key(),
                      "collision.growing_tables: features with batches of their own are not for "
                      "growing tables. Give all features one batch.");
}

}  // namespace

GrowingTables::GrowingTables(const char* name, std::vector<GrowingTable> tables,
                             const std::map<std::string, sharding::Placement>& wishes,
                             const comm::Group& group, const GrowingOptions& options,
                             bool is_pooled)
    : torch::nn::Module(name),
      state_(std::make_shared<GrowingState>(std::move(tables), wishes, group, options, is_pooled)) {
  tables_state_ = state_;
}

GrowingTables::~GrowingTables() = default;

const std::vector<GrowingTable>& GrowingTables::growing_tables() const noexcept {
  return state_->tables;
}

std::int64_t GrowingTables::num_calls() const noexcept { return state_->num_calls; }

std::vector<Growth> GrowingTables::growth() const {
  std::vector<Growth> all;
  for (const auto& part : state_->parts) {
    Growth one = part->growth;
    one.ids = part->ids.size();
    one.bytes = part->bytes();
    all.push_back(std::move(one));
  }
  return all;
}

std::vector<Growth> GrowingTables::total_growth() const {
  constexpr std::int64_t kNumbers = 7;
  const auto num_tables = static_cast<std::int64_t>(state_->tables.size());
  at::Tensor sums = at::zeros({num_tables, kNumbers}, at::kLong);
  auto* sum = sums.data_ptr<std::int64_t>();
  const auto own = growth();
  for (std::size_t p = 0; p < own.size(); ++p) {
    const std::int64_t numbers[kNumbers] = {own[p].ids,     own[p].admitted,  own[p].refused,
                                            own[p].evicted, own[p].sightings, own[p].hits,
                                            own[p].bytes};
    std::copy_n(numbers, kNumbers,
                sum + static_cast<std::int64_t>(state_->parts[p]->table) * kNumbers);
  }
  if (group().size() > 1) comm::all_reduce_(sums, group());
  std::vector<Growth> all;
  for (const GrowingTable& table : state_->tables) {
    all.push_back({table.config.name, sum[0], sum[1], sum[2], sum[3], sum[4], sum[5], sum[6]});
    sum += kNumbers;
  }
  return all;
}

IdList GrowingTables::export_ids(const std::string& table) const {
  const GrowingPart* part = state_->part_of(table);
  if (part == nullptr) return {};
  return with_tensor_rows(part->ids.export_ids());
}

at::Tensor GrowingTables::weights_of(const std::string& table) const {
  const GrowingPart* part = state_->part_of(table);
  if (part != nullptr) return part->weight->tensor();
  return at::empty({0, state_->tables[state_->number_of(table)].config.embedding_dim}, at::kFloat);
}

at::Tensor GrowingTables::unknown_row(const std::string& table) const {
  const std::size_t number = state_->number_of(table);
  if (state_->tables[number].unknown != UnknownIds::kRow) return {};
  return state_->unknown_rows->row(number).squeeze(0);
}

std::shared_ptr<GrowingChanges> GrowingTables::track_changes() {
  const std::shared_ptr<GrowingChanges> changes(new GrowingChanges(state_));
  state_->followers.push_back(changes);
  return changes;
}

GrowingChanges::GrowingChanges(std::shared_ptr<GrowingState> state)
    : state_(std::move(state)), base_calls_(state_->num_calls) {}

void GrowingChanges::forget() {
  base_calls_ = state_->num_calls;
  removed_.clear();
}

IdList GrowingChanges::changed_ids(const std::string& table) const {
  const GrowingPart* part = state_->part_of(table);
  return part == nullptr ? IdList{} : with_tensor_rows(part->ids.export_ids(base_calls_));
}

const std::vector<std::int64_t>& GrowingChanges::removed_ids(const std::string& table) const {
  static const std::vector<std::int64_t> kNone;
  state_->number_of(table);  // throws for a table that is not there
  const auto found = removed_.find(table);
  return found == removed_.end() ? kNone : found->second;
}

std::vector<std::int64_t> GrowingChanges::take_removed_ids(const std::string& table) {
  std::vector<std::int64_t> removed = removed_ids(table);
  removed_.erase(table);
  return removed;
}

GrowingRows GrowingTables::export_rows(const std::string& table) const {
  const at::NoGradGuard no_grad;
  GrowingRows rows;
  const GrowingPart* part = state_->part_of(table);
  rows.ids = export_ids(table);
  const at::Tensor places = at::tensor(rows.ids.rows, at::kLong);
  if (part == nullptr) {
    rows.weight = weights_of(table);
    return rows;
  }
  rows.sketch = part->ids.export_sketch();
  rows.weight = part->weight->tensor().index_select(0, places);
  for (const auto& [name, tensor] : part->state) {
    rows.state[name] = tensor->tensor().index_select(0, places);
  }
  return rows;
}

namespace {

// Those of a part's buckets, checked.
PreparedRows prepared(GrowingPart& of, const GrowingRows& rows) {
  GrowingPart* const part = &of;
  const std::string& table = part->config->config.name;
  const auto count = static_cast<std::int64_t>(rows.ids.ids.size());
  const auto fits = [&](const at::Tensor& given, const at::Tensor& own) {
    return given.defined() && given.dim() == own.dim() && given.size(0) == count &&
           given.sizes().slice(1) == own.sizes().slice(1);
  };
  TESSERA_CHECK_VALUE(fits(rows.weight, part->weight->tensor()),
                      "collision.growing_tables: table '", table, "' has ", count,
                      " ids, but its rows are not as many, or of another ", "width than ",
                      part->config->config.embedding_dim, ".");
  for (const auto& [name, tensor] : part->state) {
    const auto found = rows.state.find(name);
    TESSERA_CHECK_VALUE(found != rows.state.end() && fits(found->second, tensor->tensor()),
                        "collision.growing_tables: table '", table, "' has ", count,
                        " ids, but not as much of ", name, " of its optimizer.");
  }
  const IdTableOptions& options = part->ids.options();
  const auto is_own = [&](std::int64_t bucket) {
    return options.first_bucket <= bucket && bucket < options.end_bucket;
  };
  IdList own;
  for (std::size_t i = 0; i < rows.ids.ids.size(); ++i) {
    if (!is_own(bucket_of(rows.ids.ids[i]))) continue;
    own.rows.push_back(static_cast<std::int64_t>(i));
    own.ids.push_back(rows.ids.ids[i]);
    own.counts.push_back(rows.ids.counts.at(i));
    own.last_steps.push_back(rows.ids.last_steps.at(i));
  }
  constexpr std::size_t kCounters = 4 * 4096;
  IdSketch sketch;
  for (std::size_t i = 0; i < rows.sketch.buckets.size(); ++i) {
    if (!is_own(rows.sketch.buckets[i])) continue;
    sketch.buckets.push_back(rows.sketch.buckets[i]);
    sketch.sightings.push_back(rows.sketch.sightings.at(i));
    const auto first = rows.sketch.counters.begin() + static_cast<std::ptrdiff_t>(i * kCounters);
    sketch.counters.insert(sketch.counters.end(), first, first + kCounters);
  }
  IdTable ids(options);
  try {
    ids.load(own.ids, own.counts, own.last_steps);
    ids.load_sketch(sketch);
  } catch (const IdTableError& error) {
    TESSERA_CHECK_VALUE(false, "collision.growing_tables: ", error.what());
  }
  const at::Tensor places = at::tensor(own.rows, at::kLong);
  std::map<std::string, at::Tensor> states;
  for (const auto& [name, tensor] : part->state) {
    states[name] = rows.state.at(name).index_select(0, places);
  }
  TESSERA_CHECK_VALUE(part->reserve(ids.num_rows()), "collision.growing_tables: no memory for ",
                      own.ids.size(), " rows of table '", table,
                      "'; nothing has changed. Set a capacity with eviction, or use more ranks.");
  return {part, std::move(ids), rows.weight.index_select(0, places), std::move(states)};
}

}  // namespace

void GrowingTables::prepare_rows(const std::map<std::string, GrowingRows>& tables) {
  state_->prepared.clear();
  std::vector<PreparedRows> all;
  for (const auto& [table, rows] : tables) {
    GrowingPart* const part = state_->part_of(table);
    if (part != nullptr) all.push_back(prepared(*part, rows));
  }
  state_->prepared = std::move(all);
}

void GrowingTables::take_prepared_rows() {
  state_->read_unread();
  for (PreparedRows& one : state_->prepared) {
    const bool has_memory = one.part->take(std::move(one.ids), one.weight, one.states);
    TESSERA_INTERNAL_ASSERT(has_memory, "rows were prepared without their memory");
  }
  state_->prepared.clear();
}

void GrowingTables::forget_prepared_rows() noexcept { state_->prepared.clear(); }

void GrowingTables::load_rows(const std::string& table, const GrowingRows& rows) {
  prepare_rows({{table, rows}});
  take_prepared_rows();
}

std::map<std::string, at::Tensor> GrowingTables::unknown_state(const std::string& table) const {
  std::map<std::string, at::Tensor> found;
  if (!unknown_row(table).defined()) return found;
  const auto all = state_->unknown_rows->optimizer().state_dict();
  for (const char* name : {"momentum1", "momentum2"}) {
    const auto kept = all.find(table + "." + name);
    if (kept != all.end()) found[name] = kept->second;
  }
  return found;
}

GrowingSteps GrowingTables::num_steps() const {
  GrowingSteps steps;
  if (state_->batch != nullptr) steps.rows = state_->batch->optimizer()->num_steps();
  if (state_->unknown_rows) steps.unknown = state_->unknown_rows->optimizer().num_steps();
  return steps;
}

void GrowingTables::set_progress(std::int64_t num_calls, const GrowingSteps& steps) {
  state_->num_calls = num_calls;
  state_->forget_changes();
  if (state_->batch != nullptr) state_->batch->optimizer()->state().num_steps = steps.rows;
  if (state_->unknown_rows) state_->unknown_rows->optimizer().state().num_steps = steps.unknown;
}

GrowingEmbeddingBagCollection::GrowingEmbeddingBagCollection(
    std::vector<GrowingTable> tables, const comm::Group& group, const GrowingOptions& options,
    const std::map<std::string, sharding::Placement>& wishes)
    : GrowingTables("GrowingEmbeddingBagCollection", std::move(tables), wishes, group, options,
                    /*is_pooled=*/true) {}

KeyedTensor GrowingEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

comm::LazyAwaitable<KeyedTensor> GrowingEmbeddingBagCollection::compute_and_output_dist(
    const sharding::DistributedInput& input) {
  const auto context = input.context;
  const auto state = state_;
  check_batch(*context);
  const bool is_recorded = at::GradMode::is_enabled();
  const auto sent = state->look_up(*context, is_training() && is_recorded);
  return comm::LazyAwaitable<KeyedTensor>([=] {
    const at::AutoGradMode recorded(is_recorded);
    if (sent.pooled) {
      const at::Tensor nothing = at::empty({0}, at::kFloat);
      return state->pooled_home->arrive(*context, *sent.pooled, nothing, nothing, state);
    }
    const auto& outputs = state->layout->outputs;
    HomePlan plan;
    plan.num_bags = context->strides.front();
    std::vector<std::string> names;
    std::vector<std::int64_t> columns;
    for (const auto& output : outputs) {
      HomeBlock block;
      block.first_column = plan.num_columns;
      block.num_columns = output.columns;
      block.is_mean = state->layout->tables[output.table].pooling == embedding::PoolingType::kMean;
      plan.num_columns += block.num_columns;
      plan.blocks.push_back(std::move(block));
      names.push_back(output.name);
      columns.push_back(output.columns);
    }
    const KeyedJaggedTensor& features = context->features.sync();
    const at::Tensor lengths = features.lengths().reshape({-1}).to(at::kLong).contiguous();
    const auto* length = lengths.const_data_ptr<std::int64_t>();
    for_all(outputs.size(), features.values().numel(), [&](std::size_t o) {
      plan.blocks[o].places = state->places_of(*context, o, sent.ids);
      plan.blocks[o].offsets = offsets_of(features, context->places[outputs[o].feature], length);
    });
    return KeyedTensor(std::move(names), std::move(columns),
                       rows_at_home(sent.rows->wait(), std::move(plan)));
  });
}

GrowingEmbeddingCollection::GrowingEmbeddingCollection(
    std::vector<GrowingTable> tables, const comm::Group& group, const GrowingOptions& options,
    const std::map<std::string, sharding::Placement>& wishes)
    : GrowingTables("GrowingEmbeddingCollection", std::move(tables), wishes, group, options,
                    /*is_pooled=*/false) {}

embedding::NamedRows GrowingEmbeddingCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

comm::LazyAwaitable<embedding::NamedRows> GrowingEmbeddingCollection::compute_and_output_dist(
    const sharding::DistributedInput& input) {
  const auto context = input.context;
  const auto state = state_;
  check_batch(*context);
  const bool is_recorded = at::GradMode::is_enabled();
  const auto sent = state->look_up(*context, is_training() && is_recorded);
  return comm::LazyAwaitable<embedding::NamedRows>([=] {
    const at::AutoGradMode recorded(is_recorded);
    const auto& outputs = state->layout->outputs;
    // One pass for all outputs of equally many columns.
    std::map<std::int64_t, std::vector<std::size_t>> by_columns;
    for (std::size_t o = 0; o < outputs.size(); ++o) by_columns[outputs[o].columns].push_back(o);
    const at::Tensor arrived = sent.rows->wait();
    std::vector<at::Tensor> rows(outputs.size());
    for (const auto& [columns, members] : by_columns) {
      HomeBlock block;
      block.num_columns = columns;
      std::vector<std::int64_t> counts;
      for (const std::size_t o : members) {
        const auto places = state->places_of(*context, o, sent.ids);
        counts.push_back(static_cast<std::int64_t>(places.size()));
        block.places.insert(block.places.end(), places.begin(), places.end());
      }
      block.offsets = one_by_one(block.places.size());
      HomePlan plan;
      plan.num_bags = static_cast<std::int64_t>(block.places.size());
      plan.num_columns = columns;
      plan.is_whole = by_columns.size() == 1;
      plan.blocks.push_back(std::move(block));
      const auto parts = rows_at_home(arrived, std::move(plan)).split_with_sizes(counts);
      for (std::size_t i = 0; i < members.size(); ++i) rows[members[i]] = parts[i];
    }
    embedding::NamedRows named;
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      const JaggedTensor given = context->features.feature(context->places[outputs[o].feature]);
      named.emplace_back(outputs[o].name, JaggedTensor(rows[o], at::Tensor(), given.lengths()));
    }
    return named;
  });
}

}  // namespace tessera::collision
