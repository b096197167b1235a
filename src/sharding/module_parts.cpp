#include "sharding/module_parts.h"

#include <map>
#include <numeric>

#include <ATen/ops/empty.h>

#include "tessera/comm/topology.h"

namespace tessera::sharding {

using jagged::KeyedJaggedTensor;

Topology topology_of(const comm::Group& group, int local_size) {
  return {group.size(), local_size > 0 ? local_size : comm::get_local_size(group.size())};
}

at::Device numbered(at::Device device) {
  return at::empty({0}, at::TensorOptions(device)).device();
}

void register_shards(torch::nn::Module& owner, const char* holder,
                     const std::vector<LocalShard>& shards) {
  const auto all = owner.register_module(holder, std::make_shared<torch::nn::Module>(holder));
  std::map<std::string, std::pair<std::shared_ptr<torch::nn::Module>, int>> children;
  for (const LocalShard& shard : shards) {
    auto& [child, number] = children[shard.table];
    if (child == nullptr) {
      child = all->register_module(shard.table, std::make_shared<torch::nn::Module>("Table"));
    }
    child->register_parameter(number == 0 ? "weight" : "weight_" + std::to_string(number),
                              shard.weight);
    ++number;
  }
}

embedding::LookupInput local_input(const TableLayout& layout, const DistContext& context,
                                   const std::vector<std::size_t>& routes, bool is_weighted) {
  std::vector<std::int64_t> order;
  order.reserve(routes.size());
  for (const std::size_t r : routes) {
    order.push_back(static_cast<std::int64_t>(context.places[layout.local[r].feature]));
  }
  std::vector<std::int64_t> identity(context.features.keys().size());
  std::iota(identity.begin(), identity.end(), 0);
  const KeyedJaggedTensor own =
      order == identity ? context.features : context.features.permute(order);
  embedding::LookupInput input;
  input.ids = own.values().contiguous();
  input.offsets = own.offsets().contiguous();
  if (is_weighted) input.weights = own.weights().to(at::kFloat).contiguous();
  input.batch_sizes = own.stride_per_key();
  return input;
}

}  // namespace tessera::sharding
