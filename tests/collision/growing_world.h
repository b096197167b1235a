// tests/collision/growing_world.h — one stream of samples, dealt to any number of ranks.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/collision/growing_tables.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::testing {

using collision::GrowingEmbeddingBagCollection;
using collision::GrowingTable;
using collision::GrowingTables;

/// What a run leaves: weights, optimizer state, count and last step of every id of every table.
struct Left {
  std::vector<float> weight;
  std::vector<float> state;
  std::int64_t count = 0;
  std::int64_t last_step = 0;
  bool operator==(const Left&) const = default;
};
using Remains = std::map<std::string, std::map<std::int64_t, Left>>;

inline std::vector<float> floats_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kFloat).contiguous().view({-1});
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

/// Tables "a" (feature f, bags) and "b" (features g and h, one id each), three and two columns.
inline std::vector<GrowingTable> two_tables() {
  GrowingTable a;
  a.config.name = "a";
  a.config.embedding_dim = 3;
  a.config.feature_names = {"f"};
  a.seed = 11;
  GrowingTable b;
  b.config.name = "b";
  b.config.embedding_dim = 2;
  b.config.feature_names = {"g", "h"};
  b.config.pooling = embedding::PoolingType::kMean;
  b.seed = 12;
  return {a, b};
}

inline collision::GrowingOptions adagrad() {
  collision::GrowingOptions options;
  options.optimizer.kind = embedding::OptimizerKind::kRowWiseAdagrad;
  options.optimizer.learning_rate = 0.1;
  options.optimizer.initial_accumulator = 0.25;
  return options;
}

/// The samples of one step of all ranks: bags of f, then one id of g and of h each.
struct Samples {
  std::vector<std::vector<std::int64_t>> f;
  std::vector<std::int64_t> g, h;
  at::Tensor gradient;  // [samples, 7]
};

inline Samples samples_of(std::int64_t step, std::int64_t count = 24) {
  std::mt19937_64 random(static_cast<std::uint64_t>(step) * 977 + 5);
  const auto draw = [&] {
    // Few ids often, many seldom; negative and huge ones among them.
    const auto common = static_cast<std::int64_t>(random() % 20) - 10;
    return random() % 3 == 0 ? static_cast<std::int64_t>(random() % 400) * 0x123456789abcdLL
                             : common;
  };
  Samples samples;
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<std::int64_t> bag(random() % 4);
    for (std::int64_t& id : bag) id = draw();
    samples.f.push_back(std::move(bag));
    samples.g.push_back(draw());
    samples.h.push_back(draw());
  }
  samples.gradient = at::empty({count, 7}, at::kFloat);
  auto* value = samples.gradient.data_ptr<float>();
  for (std::int64_t i = 0; i < samples.gradient.numel(); ++i) {
    value[i] = static_cast<float>(random() >> 40) * 0x1p-23F - 1.0F;
  }
  return samples;
}

inline jagged::KeyedJaggedTensor features_of(const Samples& samples, std::size_t begin,
                                             std::size_t end) {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> lengths;
  for (std::size_t i = begin; i < end; ++i) {
    ids.insert(ids.end(), samples.f[i].begin(), samples.f[i].end());
    lengths.push_back(static_cast<std::int32_t>(samples.f[i].size()));
  }
  for (const auto* one : {&samples.g, &samples.h}) {
    ids.insert(ids.end(), one->begin() + static_cast<std::ptrdiff_t>(begin),
               one->begin() + static_cast<std::ptrdiff_t>(end));
    lengths.insert(lengths.end(), end - begin, 1);
  }
  jagged::KeyedJaggedFields fields;
  fields.lengths = at::tensor(lengths, at::kInt);
  fields.stride = static_cast<std::int64_t>(end - begin);
  return {{"f", "g", "h"}, at::tensor(ids, at::kLong), fields};
}

inline std::pair<std::size_t, std::size_t> part_of(const Samples& samples,
                                                   const comm::Group& group) {
  const std::size_t count = samples.g.size();
  const auto rank = static_cast<std::size_t>(group.rank());
  const auto world = static_cast<std::size_t>(group.size());
  return {count * rank / world, count * (rank + 1) / world};
}

/// One training step; what comes out for this rank's samples.
inline at::Tensor train(GrowingEmbeddingBagCollection& tables, std::int64_t step) {
  sharding::set_gradient_division(false);
  const Samples samples = samples_of(step);
  const auto [begin, end] = part_of(samples, tables.group());
  const jagged::KeyedTensor pooled = tables.forward(features_of(samples, begin, end));
  const auto first = static_cast<std::int64_t>(begin);
  const auto count = static_cast<std::int64_t>(end - begin);
  const at::Tensor wanted = samples.gradient.narrow(0, first, count);
  const at::Tensor together = jagged::KeyedTensor::regroup({pooled}, {{"f", "g", "h"}}).front();
  (together * wanted).sum().backward();
  return together.detach();
}

inline void add_remains(GrowingTables& tables, Remains& remains) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (const auto& shard : tables.local_shards()) {
    const collision::IdList list = tables.export_ids(shard.table);
    for (std::size_t i = 0; i < list.ids.size(); ++i) {
      Left left;
      left.weight = floats_of(shard.weight[list.rows[i]]);
      const auto state = shard.state.find("momentum1");
      if (state != shard.state.end()) left.state = floats_of(state->second[list.rows[i]]);
      left.count = list.counts[i];
      left.last_step = list.last_steps[i];
      const bool is_new = remains[shard.table].emplace(list.ids[i], left).second;
      if (!is_new) throw std::logic_error("two ranks have id " + std::to_string(list.ids[i]));
    }
  }
  for (const GrowingTable& table : tables.growing_tables()) {
    const at::Tensor row = tables.unknown_row(table.config.name);
    if (row.defined()) remains["unknown of " + table.config.name][0].weight = floats_of(row);
  }
}

}  // namespace tessera::testing
