// Random tables, plans, optimizers, worlds and batches against one process.

#include <gtest/gtest.h>

#include <random>

#include "sharding/sharded_tables.h"
#include "support/ranks.h"

namespace tessera::sharding {
namespace {

using embedding::OptimizerKind;
using embedding::PoolingType;
using tessera::testing::Job;
using tessera::testing::run_alone;
using tessera::testing::run_ranks;
using tessera::testing::run_sharded;

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  int below(int limit) { return static_cast<int>(random_() % static_cast<std::uint64_t>(limit)); }
  bool flip() { return below(2) == 0; }

 private:
  std::mt19937_64 random_;
};

Placement random_placement(Dice& dice, const Topology& topology, std::int64_t columns) {
  const int hosts = topology.num_hosts();
  const auto some = [&](int limit, int first) {
    std::vector<int> ranks;
    const int count = 1 + dice.below(static_cast<int>(std::min<std::int64_t>(columns, 4)));
    for (int i = 0; i < count; ++i) ranks.push_back(first + dice.below(limit));
    return ranks;
  };
  switch (dice.below(7)) {
    case 0:
      return data_parallel().with_kernel(ComputeKernel::kFused);
    case 1:
      return table_wise(dice.below(topology.world_size));
    case 2:
      return row_wise();
    case 3:
      return column_wise(some(topology.world_size, 0));
    case 4:
      return table_row_wise(dice.below(hosts));
    case 5:
      return table_column_wise(some(topology.local_size, dice.below(hosts) * topology.local_size));
    default: {
      std::vector<int> parts;
      for (int h = 0; h < hosts && h < columns; ++h) parts.push_back(h);
      return grid_shard(parts);
    }
  }
}

Job random_job(std::uint64_t seed) {
  Dice dice(seed);
  Job job;
  job.seed = seed;
  const int world = 1 + dice.below(4);
  job.local_size = world == 4 && dice.flip() ? 2 : world;
  job.is_weighted = dice.flip();
  job.is_variable = dice.below(3) == 0;
  job.steps = 2;
  // The rules whose numbers do not depend on where the columns are cut.
  const std::vector<OptimizerKind> kinds{OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                                         OptimizerKind::kAdam, OptimizerKind::kAdamW};
  job.options.optimizer.kind = kinds[static_cast<std::size_t>(dice.below(4))];
  job.options.optimizer.learning_rate = 0.05;
  job.options.optimizer.eps = 1e-3;  // small gradients do not become large steps
  job.options.gradients =
      dice.below(3) == 0 ? embedding::GradientForm::kSparse : embedding::GradientForm::kFused;
  job.tolerance = 1e-5;
  const int num_tables = 1 + dice.below(5);
  for (int t = 0; t < num_tables; ++t) {
    std::vector<std::string> features;
    const int count = 1 + dice.below(3);
    for (int f = 0; f < count; ++f) {
      const std::string name = "f" + std::to_string(dice.below(6));
      if (std::find(features.begin(), features.end(), name) == features.end()) {
        features.push_back(name);
      }
    }
    job.tables.push_back(
        tessera::testing::table("t" + std::to_string(t), 1 + dice.below(20), 1 + dice.below(9),
                                features, dice.flip() ? PoolingType::kMean : PoolingType::kSum));
    job.wishes.emplace(job.tables.back().name, random_placement(dice, {world, job.local_size},
                                                                job.tables.back().embedding_dim));
  }
  for (int rank = 0; rank < world; ++rank) job.batches.push_back(dice.below(6));
  return job;
}

TEST(BagProperty, AnyPlanIsOneProcess) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Job job = random_job(seed);
    const auto expected = run_alone(job);
    run_ranks(job.world(), [&](const comm::Group& group) { run_sharded(job, expected, group); });
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::sharding
