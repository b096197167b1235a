// tests/sharding/sharded_tables.h — a job on sharded tables, and the same job on one process.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/group.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/sharding/plan.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::testing {

using embedding::EmbeddingBagConfig;
using jagged::KeyedJaggedTensor;
using Weights = std::map<std::string, at::Tensor>;

inline EmbeddingBagConfig table(const std::string& name, std::int64_t rows, std::int64_t columns,
                                std::vector<std::string> features = {},
                                embedding::PoolingType pooling = embedding::PoolingType::kSum) {
  EmbeddingBagConfig config;
  config.name = name;
  config.num_embeddings = rows;
  config.embedding_dim = columns;
  config.feature_names = std::move(features);
  config.pooling = pooling;
  return config;
}

/// Bags of ids by feature and sample.
struct Bags {
  std::vector<std::string> keys;
  std::vector<std::vector<std::vector<std::int64_t>>> ids;
  std::vector<std::vector<std::vector<float>>> weights;
  /// Of a variable batch: which of the bags of a feature each sample of the full batch has.
  std::vector<std::vector<std::int64_t>> inverse;

  /// Every sample with bags of its own.
  Bags expanded() const {
    if (inverse.empty()) return *this;
    Bags all;
    all.keys = keys;
    all.ids.resize(keys.size());
    all.weights.resize(keys.size());
    for (std::size_t f = 0; f < keys.size(); ++f) {
      for (const std::int64_t sample : inverse[f]) {
        all.ids[f].push_back(ids[f][static_cast<std::size_t>(sample)]);
        all.weights[f].push_back(weights[f][static_cast<std::size_t>(sample)]);
      }
    }
    return all;
  }

  /// Numbers of the elements of `expanded`, summed over the samples that share a bag.
  at::Tensor folded(const at::Tensor& numbers) const {
    if (inverse.empty()) return numbers;
    std::vector<at::Tensor> parts;
    std::int64_t next = 0;
    for (std::size_t f = 0; f < keys.size(); ++f) {
      std::vector<at::Tensor> sums;
      for (const auto& bag : ids[f]) {
        sums.push_back(at::zeros({static_cast<std::int64_t>(bag.size())}));
      }
      for (const std::int64_t sample : inverse[f]) {
        at::Tensor& sum = sums[static_cast<std::size_t>(sample)];
        sum += numbers.narrow(0, next, sum.numel());
        next += sum.numel();
      }
      parts.insert(parts.end(), sums.begin(), sums.end());
    }
    return parts.empty() ? at::zeros({0}) : at::cat(parts);
  }

  KeyedJaggedTensor kjt(bool is_weighted, at::ScalarType ids_type = at::kLong,
                        at::ScalarType lengths_type = at::kInt) const {
    std::vector<std::int64_t> values;
    std::vector<std::int64_t> lengths;
    std::vector<float> all_weights;
    for (std::size_t f = 0; f < keys.size(); ++f) {
      for (std::size_t b = 0; b < ids[f].size(); ++b) {
        lengths.push_back(static_cast<std::int64_t>(ids[f][b].size()));
        values.insert(values.end(), ids[f][b].begin(), ids[f][b].end());
        all_weights.insert(all_weights.end(), weights[f][b].begin(), weights[f][b].end());
      }
    }
    jagged::KeyedJaggedFields fields;
    fields.lengths = at::tensor(lengths, at::kLong).to(lengths_type);
    if (inverse.empty()) {
      fields.stride = keys.empty() ? 0 : static_cast<std::int64_t>(ids[0].size());
    } else {
      std::vector<std::int64_t> strides;
      std::vector<at::Tensor> rows;
      for (std::size_t f = 0; f < keys.size(); ++f) {
        strides.push_back(static_cast<std::int64_t>(ids[f].size()));
        rows.push_back(at::tensor(inverse[f], at::kLong));
      }
      fields.stride_per_key_per_rank = at::tensor(strides, at::kLong).unsqueeze(1);
      fields.inverse_indices.emplace(keys, at::stack(rows));
    }
    if (is_weighted) fields.weights = at::tensor(all_weights, at::kFloat);
    return KeyedJaggedTensor(keys, at::tensor(values, at::kLong).to(ids_type), fields);
  }
};

/// Random bags; `rows[f]` bounds the ids of feature f.
inline Bags random_bags(const std::vector<std::string>& keys, const std::vector<std::int64_t>& rows,
                        std::int64_t batch, std::uint64_t seed, std::int64_t longest = 4) {
  std::mt19937_64 random(seed);
  Bags bags;
  bags.keys = keys;
  bags.ids.resize(keys.size());
  bags.weights.resize(keys.size());
  for (std::size_t f = 0; f < keys.size(); ++f) {
    bags.ids[f].resize(static_cast<std::size_t>(batch));
    bags.weights[f].resize(static_cast<std::size_t>(batch));
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto length = static_cast<std::int64_t>(random() % (longest + 1));
      for (std::int64_t i = 0; i < length; ++i) {
        bags.ids[f][b].push_back(static_cast<std::int64_t>(random() % rows[f]));
        bags.weights[f][b].push_back(static_cast<float>(random() % 1000) / 500.0F - 0.7F);
      }
    }
  }
  return bags;
}

/// The samples of all parts, one after the other.
inline Bags joined(const std::vector<Bags>& parts) {
  Bags all = parts[0];
  for (std::size_t p = 1; p < parts.size(); ++p) {
    for (std::size_t f = 0; f < all.keys.size(); ++f) {
      all.ids[f].insert(all.ids[f].end(), parts[p].ids[f].begin(), parts[p].ids[f].end());
      all.weights[f].insert(all.weights[f].end(), parts[p].weights[f].begin(),
                            parts[p].weights[f].end());
    }
  }
  return all;
}

inline at::Tensor random_rows(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({rows, columns}, generator, at::TensorOptions(at::kFloat));
}

/// Tables, a plan, and some steps of training.
struct Job {
  std::vector<EmbeddingBagConfig> tables;
  std::map<std::string, sharding::Placement> wishes;
  std::vector<std::int64_t> batches;  // of each rank
  sharding::ShardedOptions options = {};
  bool is_weighted = false;
  int steps = 3;
  int local_size = 0;
  std::uint64_t seed = 1;
  bool compares_state = true;
  at::ScalarType ids_type = at::kLong;
  double tolerance = 2e-6;
  /// Every feature has a batch of its own.
  bool is_variable = false;

  int world() const { return static_cast<int>(batches.size()); }

  Weights initial() const {
    Weights weights;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      weights[tables[t].name] =
          random_rows(tables[t].num_embeddings, tables[t].embedding_dim, seed * 100 + t)
              .to(embedding::scalar_type(tables[t].data_type));
    }
    return weights;
  }

  Bags bags(int step, int rank) const {
    const std::int64_t batch = batches[static_cast<std::size_t>(rank)];
    Bags bags = bags_of(step, rank, batch);
    if (!is_variable) return bags;
    // As many bags as samples at most; the samples share them, and every bag has one. (The rows of
    // a bag that no sample has are looked up and step with a gradient of zero.)
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(step * 10 + rank));
    for (std::size_t f = 0; f < bags.keys.size(); ++f) {
      const std::size_t count = batch == 0 ? 0 : 1 + random() % static_cast<std::size_t>(batch);
      bags.ids[f].resize(count);
      bags.weights[f].resize(count);
      bags.inverse.emplace_back();
      for (std::int64_t b = 0; b < batch; ++b) {
        const std::size_t bag = static_cast<std::size_t>(b) < count ? b : random() % count;
        bags.inverse[f].push_back(static_cast<std::int64_t>(bag));
      }
      std::shuffle(bags.inverse[f].begin(), bags.inverse[f].end(), random);
    }
    return bags;
  }

  Bags bags_of(int step, int rank, std::int64_t batch) const {
    std::vector<std::string> keys{"unused"};
    std::vector<std::int64_t> rows{10};
    for (std::size_t t = tables.size(); t-- > 0;) {
      for (const auto& feature : tables[t].features()) {
        const auto found = std::find(keys.begin(), keys.end(), feature);
        if (found == keys.end()) {
          keys.push_back(feature);
          rows.push_back(tables[t].num_embeddings);
        } else {
          auto& most = rows[static_cast<std::size_t>(found - keys.begin())];
          most = std::min(most, tables[t].num_embeddings);
        }
      }
    }
    return random_bags(
        keys, rows, batch,
        seed * 10000 + static_cast<std::uint64_t>(step) * 100 + static_cast<std::uint64_t>(rank));
  }

  /// What the loss of a rank multiplies its output of a name with.
  at::Tensor coefficients(int step, int rank, const std::string& name,
                          const at::Tensor& output) const {
    return random_rows(output.size(0), output.size(1),
                       seed + 7 * std::hash<std::string>()(name) % 1000 +
                           static_cast<std::uint64_t>(step * 50 + rank))
        .to(output.device());
  }
};

/// Three tables of different widths, and five samples on every rank.
inline Job three_tables(int world, std::vector<std::string> features_of_c = {"f2"}) {
  Job job;
  job.tables = {table("a", 11, 4, {"f0", "f1"}), table("b", 7, 3),
                table("c", 20, 8, std::move(features_of_c))};
  for (int rank = 0; rank < world; ++rank) job.batches.push_back(5);
  job.options.optimizer.kind = embedding::OptimizerKind::kAdam;
  job.options.optimizer.learning_rate = 0.1;
  return job;
}

// Ways to cut the three tables, the whole of each kind.
using Wishes = std::map<std::string, sharding::Placement>;

inline Wishes each_of_three(const sharding::Placement& placement) {
  return {{"a", placement}, {"b", placement}, {"c", placement}};
}

inline Wishes three_on_ranks(int world) {
  return {{"a", sharding::table_wise(world - 1)},
          {"b", sharding::table_wise(0)},
          {"c", sharding::table_wise(0)}};
}

inline Wishes three_by_columns(int world) {
  std::vector<int> ranks;
  for (int i = 0; i < 3; ++i) ranks.push_back(i % world);
  return {{"a", sharding::column_wise(ranks)},
          {"b", sharding::column_wise({0})},
          {"c", sharding::table_column_wise(ranks)}};
}

/// What one process that has all samples gets.
struct Expected {
  std::vector<std::vector<std::map<std::string, at::Tensor>>> outputs;  // step, rank, name
  std::vector<Weights> tables;                                          // after each step
  std::vector<std::vector<at::Tensor>> weight_gradients;                // step, rank; if weighted
  std::map<std::string, at::Tensor> state;
};

inline Expected run_alone(const Job& job) {
  embedding::TableBatchOptions options;
  options.gradients = embedding::GradientForm::kFused;
  options.optimizer = job.options.optimizer;
  options.bounds_check = job.options.bounds_check;
  embedding::EmbeddingBagCollection tables(job.tables, job.is_weighted, at::kCPU, options);
  {
    const at::NoGradGuard no_grad;
    for (const auto& [name, weight] : job.initial()) tables.weight(name).copy_(weight);
  }
  Expected expected;
  for (int step = 0; step < job.steps; ++step) {
    std::vector<Bags> parts;
    for (int rank = 0; rank < job.world(); ++rank) {
      parts.push_back(job.bags(step, rank).expanded());
    }
    KeyedJaggedTensor all = joined(parts).kjt(job.is_weighted, job.ids_type);
    if (job.is_weighted) all = all.with_weights(all.weights().clone().requires_grad_(true));
    const auto output = tables.forward(all);
    expected.outputs.emplace_back(job.batches.size());
    at::Tensor loss = at::zeros({});
    std::int64_t begin = 0;
    for (int rank = 0; rank < job.world(); ++rank) {
      const std::int64_t batch = job.batches[static_cast<std::size_t>(rank)];
      for (const auto& name : output.keys()) {
        const at::Tensor own = output[name].narrow(0, begin, batch);
        expected.outputs[step][rank][name] = own.detach().clone();
        loss = loss + (own * job.coefficients(step, rank, name, own)).sum() / job.world();
      }
      begin += batch;
    }
    loss.backward();
    expected.tables.emplace_back();
    for (const auto& config : job.tables) {
      expected.tables[step][config.name] = tables.weight(config.name).detach().clone();
    }
    if (job.is_weighted) {
      // Weights belong to one rank; the gradient of its own loss is not averaged.
      const at::Tensor gradient = all.weights().grad() * job.world();
      expected.weight_gradients.emplace_back();
      for (int rank = 0; rank < job.world(); ++rank) {
        std::vector<at::Tensor> pieces;
        for (std::size_t f = 0; f < parts[0].keys.size(); ++f) {
          std::int64_t from = all.offset_per_key()[f];
          for (int r = 0; r < rank; ++r) {
            for (const auto& bag : parts[r].ids[f]) from += static_cast<std::int64_t>(bag.size());
          }
          std::int64_t count = 0;
          for (const auto& bag : parts[rank].ids[f]) {
            count += static_cast<std::int64_t>(bag.size());
          }
          pieces.push_back(gradient.narrow(0, from, count));
        }
        expected.weight_gradients[step].push_back(at::cat(pieces));
      }
    }
  }
  for (const auto& [name, tensor] : tables.batch().optimizer()->state_dict()) {
    expected.state[name] = tensor.clone();
  }
  return expected;
}

inline bool is_close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return a.sizes() == b.sizes() &&
         at::allclose(a.cpu().to(at::kFloat), b.cpu().to(at::kFloat), tolerance, tolerance);
}

inline void expect_state(const Job& job, const Expected& expected,
                         const std::vector<sharding::LocalShard>& shards) {
  for (const auto& shard : shards) {
    for (const auto& [name, own] : shard.state) {
      const at::Tensor whole = expected.state.at(shard.table + "." + name);
      at::Tensor part = whole.narrow(0, shard.place.row, shard.place.rows);
      if (part.dim() == 2) part = part.narrow(1, shard.place.column, shard.place.columns);
      EXPECT_TRUE(is_close(own, part, job.tolerance)) << shard.name << "." << name;
    }
  }
}

/// Runs the job on this rank, on the device of its options, and compares outputs, tables and state
/// with one process.
inline void run_sharded(const Job& job, const Expected& expected, const comm::Group& group) {
  sharding::ShardedOptions options = job.options;
  options.local_size = job.local_size > 0 ? job.local_size : group.size();
  const auto plan =
      sharding::make_module_plan(job.tables, job.wishes, {group.size(), options.local_size});
  sharding::ShardedEmbeddingBagCollection tables(job.tables, plan, group, job.is_weighted, options);
  tables.load_tables(job.initial());
  const int rank = group.rank();
  for (int step = 0; step < job.steps; ++step) {
    KeyedJaggedTensor features =
        job.bags(step, rank).kjt(job.is_weighted, job.ids_type).to(options.device);
    if (job.is_weighted) {
      features = features.with_weights(features.weights().clone().requires_grad_(true));
    }
    const auto output = tables.forward(features);
    at::Tensor loss = at::zeros({});
    ASSERT_EQ(output.keys().size(), expected.outputs[step][rank].size());
    ASSERT_EQ(output.values().device().type(), options.device.type());
    for (const auto& name : output.keys()) {
      ASSERT_TRUE(is_close(output[name], expected.outputs[step][rank].at(name), job.tolerance))
          << "step " << step << ", rank " << rank << ", " << name << "\n"
          << output[name] << expected.outputs[step][rank].at(name);
      loss = loss + (output[name] * job.coefficients(step, rank, name, output[name])).sum();
    }
    loss.backward();
    if (job.options.gradients == embedding::GradientForm::kSparse) {
      tables.step();
      tables.zero_grad_rows();
    }
    if (job.is_weighted) {
      EXPECT_TRUE(is_close(features.weights().grad(),
                           job.bags(step, rank).folded(expected.weight_gradients[step][rank]),
                           job.tolerance))
          << "weights, step " << step << ", rank " << rank;
    }
    const auto now = tables.gather_tables();
    for (const auto& [name, weight] : expected.tables[step]) {
      ASSERT_TRUE(is_close(now.at(name), weight, job.tolerance))
          << "step " << step << ", rank " << rank << ", table " << name << " differs by "
          << (now.at(name) - weight).abs().max();
    }
  }
  if (job.compares_state) expect_state(job, expected, tables.local_shards());
}

}  // namespace tessera::testing
