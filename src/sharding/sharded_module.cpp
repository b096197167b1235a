#include "tessera/sharding/sharded_module.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "sharding/flat_exchange.h"
#include "sharding/module_parts.h"
#include "sharding/tables_state.h"
#include "tessera/core/check.h"

namespace tessera::sharding {

using comm::Awaitable;
using jagged::KeyedJaggedTensor;

namespace {

struct Batch {
  std::shared_ptr<const InputSender> sender;
  std::shared_ptr<DistContext> context;
  std::int64_t column;
};

// The numbers all ranks have for each other; raises what is wrong on all of them.
void read(const std::vector<Batch>& batches, const at::Tensor& numbers) {
  const std::int64_t columns = numbers.size(1);
  for (const Batch& batch : batches) {
    if (!batch.sender->read_message(*batch.context, numbers.const_data_ptr<std::int64_t>(), columns,
                                    batch.column)) {
      batch.sender->raise(*batch.context);
    }
  }
}

}  // namespace

TablesState::TablesState(const char* operation, std::vector<embedding::EmbeddingTableConfig> tables,
                         ModulePlan plan, const comm::Group& own_group,
                         const ShardedOptions& options, bool is_pooled)
    : group(own_group),
      layout(std::make_shared<const TableLayout>(operation, std::move(tables), std::move(plan),
                                                 topology_of(group, options.local_size), is_pooled,
                                                 is_pooled && options.codecs.forward.is_linear())) {
}

TablesState::TablesState(const comm::Group& own_group,
                         std::shared_ptr<const TableLayout> own_layout)
    : group(own_group), layout(std::move(own_layout)) {}

LocalTables& TablesState::fixed_rows(const char* call) const {
  TESSERA_CHECK_VALUE(local != nullptr, layout->operation, ": ", call,
                      " is for tables with a fixed number of rows.");
  return *local;
}

void TablesState::make_tables(const ShardedOptions& options, InputDistOptions input,
                              const std::string& words) {
  const at::Device device = numbered(options.device);
  check_same_layout(*layout, group, words);
  local = std::make_unique<LocalTables>(
      layout, group,
      LocalTablesOptions{options.optimizer, options.gradients, options.exact_row_norms, device,
                         options.host_rows, options.cache_policy});
  input.bounds_check = options.bounds_check;
  input.device = device;
  sender = std::make_shared<const InputSender>(layout, group, std::move(input));
}

ShardedTables::~ShardedTables() = default;

const comm::Group& ShardedTables::group() const noexcept { return tables_state_->group; }
const ModulePlan& ShardedTables::plan() const noexcept { return tables_state_->layout->plan; }
std::vector<LocalShard> ShardedTables::local_shards() const { return tables_state_->shards(); }
std::vector<std::shared_ptr<embedding::RowOptimizer>> ShardedTables::optimizers() const {
  return tables_state_->optimizers();
}
void ShardedTables::load_tables(const std::map<std::string, at::Tensor>& tables) {
  tables_state_->read_unread();
  write_back();
  load_shards(*tables_state_->layout, tables_state_->fixed_rows("load_tables").weights(), tables);
}
void ShardedTables::write_back() const {
  if (tables_state_->local != nullptr) tables_state_->local->write_back();
}
void ShardedTables::prefetch(const DistributedInput& input) const {
  const auto& local = tables_state_->local;
  if (local == nullptr || local->routed() == nullptr) return;
  local->routed()->prefetch(input.context->lookup_input());
}
std::vector<embedding::RowCacheStatistics> ShardedTables::cache_statistics() const {
  const auto& local = tables_state_->local;
  if (local == nullptr || local->routed() == nullptr) return {};
  return local->routed()->cache_statistics();
}
std::map<std::string, at::Tensor> ShardedTables::gather_tables() const {
  write_back();
  return gather_shards(*tables_state_->layout, tables_state_->fixed_rows("gather_tables").weights(),
                       group());
}
void ShardedTables::step() {
  tables_state_->read_unread();
  tables_state_->fixed_rows("step").step();
}
void ShardedTables::zero_grad_rows() { tables_state_->fixed_rows("zero_grad_rows").zero_grad(); }
double ShardedTables::clip_grad_norm(double max_norm) {
  return tables_state_->fixed_rows("clip_grad_norm").clip_grad_norm(max_norm);
}
void ShardedTables::set_learning_rate(double learning_rate) {
  tables_state_->set_learning_rate(learning_rate);
}
bool ShardedTables::keep_local_gradients(bool is_kept) {
  return tables_state_->fixed_rows("keep_local_gradients").keep_local_gradients(is_kept);
}

InputDist ShardedTables::input_dist(const KeyedJaggedTensor& features) {
  return fused_input_dist({{this, features}})[0];
}

std::vector<InputDist> fused_input_dist(
    const std::vector<std::pair<ShardedTables*, KeyedJaggedTensor>>& inputs) {
  TESSERA_CHECK_VALUE(!inputs.empty(), "sharding.fused_input_dist: there are no modules.");
  const comm::Group& group = inputs[0].first->group();
  std::vector<Batch> batches;
  std::int64_t columns = 0;
  for (const auto& [module, features] : inputs) {
    TESSERA_CHECK_VALUE(module->group() == group,
                        "sharding.fused_input_dist: the modules are of different groups.");
    const auto& sender = module->tables_state()->sender;
    batches.push_back({sender, sender->prepare(features), columns});
    columns += sender->message_size();
  }
  at::Tensor message = at::zeros({group.size(), columns}, at::kLong);
  for (const Batch& batch : batches) {
    batch.sender->write_message(*batch.context, message.data_ptr<std::int64_t>(), columns,
                                batch.column);
  }
  const Awaitable<at::Tensor> arrived = exchange_numbers(message, group);
  const Awaitable<bool> agreed([arrived, batches] {
    read(batches, arrived.wait());
    return true;
  });
  std::vector<InputDist> pending;
  pending.reserve(batches.size());
  for (const Batch& batch : batches) {
    pending.push_back(InputDist([batch, agreed] {
      agreed.wait();
      return batch.sender->send(batch.context);
    }));
  }
  return pending;
}

}  // namespace tessera::sharding
