#include "tessera/sharding/sharded_module.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "sharding/flat_exchange.h"
#include "sharding/input_dist.h"
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

ShardedTables::~ShardedTables() = default;

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
    const auto sender = module->input_sender();
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
