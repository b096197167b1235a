// tests/sharding/sharded_rows.h — a job on the single rows of sharded tables, and the same job on
// one process.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "sharding/sharded_tables.h"
#include "tessera/embedding/embedding_collection.h"
#include "tessera/sharding/sharded_embedding_collection.h"

namespace tessera::testing {

/// What one process gets: rows by step, rank and name, the tables after each step, the state.
struct Alone {
  std::vector<std::vector<std::map<std::string, at::Tensor>>> rows;
  std::vector<Weights> tables;
  std::map<std::string, at::Tensor> state;
};

inline std::int64_t num_ids(const Bags& bags, const std::string& key) {
  std::int64_t count = 0;
  for (std::size_t f = 0; f < bags.keys.size(); ++f) {
    if (bags.keys[f] != key) continue;
    for (const auto& bag : bags.ids[f]) count += static_cast<std::int64_t>(bag.size());
  }
  return count;
}

inline std::string feature_of(const std::string& name) { return name.substr(0, name.find('@')); }

inline Alone rows_alone(const Job& job) {
  embedding::TableBatchOptions options;
  options.gradients = embedding::GradientForm::kFused;
  options.optimizer = job.options.optimizer;
  embedding::EmbeddingCollection tables(job.tables, at::kCPU, false, options);
  {
    const at::NoGradGuard no_grad;
    for (const auto& [name, weight] : job.initial()) tables.weight(name).copy_(weight);
  }
  Alone alone;
  for (int step = 0; step < job.steps; ++step) {
    std::vector<Bags> parts;
    for (int rank = 0; rank < job.world(); ++rank) parts.push_back(job.bags(step, rank));
    alone.rows.emplace_back(job.batches.size());
    at::Tensor loss = at::zeros({});
    for (const auto& [name, result] : tables.forward(joined(parts).kjt(false, job.ids_type))) {
      std::int64_t begin = 0;
      for (int rank = 0; rank < job.world(); ++rank) {
        const std::int64_t count = num_ids(parts[rank], feature_of(name));
        const at::Tensor own = result.values().narrow(0, begin, count);
        alone.rows[step][rank][name] = own.detach().clone();
        loss = loss + (own * job.coefficients(step, rank, name, own)).sum() / job.world();
        begin += count;
      }
    }
    loss.backward();
    alone.tables.emplace_back();
    for (const auto& config : job.tables) {
      alone.tables[step][config.name] = tables.weight(config.name).detach().clone();
    }
  }
  for (const auto& [name, tensor] : tables.batch().optimizer()->state_dict()) {
    alone.state[name] = tensor.clone();
  }
  return alone;
}

/// Runs the job on this rank, on the device of its options, and compares with one process. With
/// `is_once`, an id is sent once however often a batch holds it.
inline void rows_sharded(const Job& job, const Alone& alone, bool is_once,
                         const comm::Group& group) {
  sharding::ShardedSequenceOptions options;
  static_cast<sharding::ShardedOptions&>(options) = job.options;
  options.local_size = job.local_size > 0 ? job.local_size : group.size();
  options.need_indices = true;
  options.use_index_dedup = is_once;
  const auto plan =
      sharding::make_module_plan(job.tables, job.wishes, {group.size(), options.local_size});
  sharding::ShardedEmbeddingCollection tables(job.tables, plan, group, options);
  tables.load_tables(job.initial());
  const int rank = group.rank();
  for (int step = 0; step < job.steps; ++step) {
    const auto features = job.bags(step, rank).kjt(false, job.ids_type).to(options.device);
    const auto results = tables.forward(features);
    ASSERT_EQ(results.size(), alone.rows[step][rank].size());
    for (const auto& [name, result] : results) {
      ASSERT_EQ(result.values().device().type(), options.device.type()) << name;
    }
    at::Tensor loss = at::zeros({});
    for (const auto& [name, result] : results) {
      const auto given = features[feature_of(name)];
      ASSERT_TRUE(is_close(result.values(), alone.rows[step][rank].at(name), job.tolerance))
          << "step " << step << ", rank " << rank << ", " << name;
      EXPECT_TRUE(at::equal(result.weights(), given.values())) << name;
      EXPECT_TRUE(at::equal(result.lengths(), given.lengths())) << name;
      loss = loss + (result.values() * job.coefficients(step, rank, name, result.values())).sum();
    }
    loss.backward();
    if (job.options.gradients == embedding::GradientForm::kSparse) {
      tables.step();
      tables.zero_grad_rows();
    }
    const auto now = tables.gather_tables();
    for (const auto& [name, weight] : alone.tables[step]) {
      ASSERT_TRUE(is_close(now.at(name), weight, job.tolerance))
          << "step " << step << ", rank " << rank << ", table " << name << " differs by "
          << (now.at(name) - weight).abs().max();
    }
  }
  for (const sharding::LocalShard& shard : tables.local_shards()) {
    for (const auto& [name, own] : shard.state) {
      at::Tensor part =
          alone.state.at(shard.table + "." + name).narrow(0, shard.place.row, shard.place.rows);
      if (part.dim() == 2) part = part.narrow(1, shard.place.column, shard.place.columns);
      EXPECT_TRUE(is_close(own, part, job.tolerance)) << shard.name << "." << name;
    }
  }
}

}  // namespace tessera::testing
