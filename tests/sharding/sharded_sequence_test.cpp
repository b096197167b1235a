// Rows of single ids of sharded tables, against one process that has all tables and all ids.

#include <gtest/gtest.h>

#include <set>

#include "sharding/sharded_rows.h"
#include "support/error_text.h"
#include "support/ranks.h"

namespace tessera::sharding {
namespace {

using embedding::OptimizerKind;
using tessera::testing::Alone;
using tessera::testing::each_of_three;
using tessera::testing::Job;
using tessera::testing::rows_alone;
using tessera::testing::rows_sharded;
using tessera::testing::run_ranks;
using tessera::testing::table;
using tessera::testing::test_options;
using tessera::testing::three_by_columns;
using tessera::testing::three_on_ranks;
using tessera::testing::three_tables;
using tessera::testing::Weights;

void check(const Job& job, comm::Engine engine = comm::Engine::kAuto) {
  const Alone alone = rows_alone(job);
  for (const bool is_once : {false, true}) {
    run_ranks(
        job.world(), [&](const comm::Group& group) { rows_sharded(job, alone, is_once, group); },
        test_options(engine));
  }
}

/// f1 is looked up in two tables.
Job job_of(int world) { return three_tables(world, {"f2", "f1"}); }

class Sequence : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Sequence, ::testing::Values(1, 2, 3, 4));

TEST_P(Sequence, TableWise) {
  Job job = job_of(GetParam());
  job.wishes = three_on_ranks(GetParam());
  check(job);
}

TEST_P(Sequence, RowWise) {
  Job job = job_of(GetParam());
  job.wishes = each_of_three(row_wise());
  check(job);
}

TEST_P(Sequence, ColumnWise) {
  Job job = job_of(GetParam());
  job.wishes = three_by_columns(GetParam());
  check(job);
}

TEST_P(Sequence, DataParallelFused) {
  Job job = job_of(GetParam());
  job.wishes = each_of_three(data_parallel().with_kernel(ComputeKernel::kFused));
  check(job);
}

TEST_P(Sequence, UnevenAndMissingBatches) {
  Job job = job_of(GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) job.batches[rank] = rank % 2 == 0 ? 3 + rank : 0;
  job.wishes = {{"a", row_wise()},
                {"b", table_wise(0)},
                {"c", data_parallel().with_kernel(ComputeKernel::kFused)}};
  job.ids_type = at::kInt;
  check(job);
}

TEST_P(Sequence, StepsWhenAsked) {
  Job job = job_of(GetParam());
  job.wishes = {{"a", row_wise()}, {"b", table_wise(0)}, {"c", column_wise({0})}};
  job.options.gradients = embedding::GradientForm::kSparse;
  check(job);
}

TEST(SequenceOnHosts, RowsOfAHostAndGrid) {
  Job job = job_of(4);
  job.local_size = 2;
  job.wishes = {{"a", table_row_wise(1)}, {"b", row_wise()}, {"c", grid_shard({1, 0})}};
  check(job);
}

TEST(SequenceOverGloo, GivesTheSame) {
  Job job = job_of(2);
  job.wishes = {{"a", row_wise()}, {"b", table_wise(1)}, {"c", column_wise({1, 0})}};
  check(job, comm::Engine::kGloo);
}

TEST(SequenceWithVariableBatch, KeepsTheBatchOfEachFeature) {
  run_ranks(2, [](const comm::Group& group) {
    const std::vector<embedding::EmbeddingConfig> tables = {table("a", 6, 2, {"x"}),
                                                            table("b", 5, 3, {"y"})};
    const auto plan = make_module_plan(tables, {{"a", row_wise()}, {"b", table_wise(1)}}, {2, 2});
    ShardedEmbeddingCollection sharded(tables, plan, group);
    const Weights weights = {{"a", at::arange(12, at::kFloat).view({6, 2})},
                             {"b", at::arange(15, at::kFloat).view({5, 3})}};
    sharded.load_tables(weights);
    jagged::KeyedJaggedFields fields;
    fields.lengths = at::tensor({2, 0, 1}, at::kInt);  // two samples of x, one of y
    fields.stride_per_key_per_rank = at::tensor({2, 1}, at::kLong).view({2, 1});
    const jagged::KeyedJaggedTensor features({"x", "y"}, at::tensor({5, 0, 4}, at::kLong), fields);
    const auto rows = sharded.forward(features);
    std::map<std::string, jagged::JaggedTensor> by_name(rows.begin(), rows.end());
    EXPECT_TRUE(at::equal(by_name.at("x").values(),
                          at::tensor({10., 11., 0., 1.}, at::kFloat).view({2, 2})));
    EXPECT_TRUE(at::equal(by_name.at("x").lengths(), at::tensor({2, 0}, at::kInt)));
    EXPECT_TRUE(
        at::equal(by_name.at("y").values(), at::tensor({12., 13., 14.}, at::kFloat).view({1, 3})));
  });
}

TEST(SequenceErrors, NameRankFeatureSampleAndId) {
  run_ranks(2, [](const comm::Group& group) {
    const std::vector<embedding::EmbeddingConfig> tables = {table("a", 6, 2, {"x"})};
    const auto plan = make_module_plan(tables, {{"a", row_wise()}}, {2, 2});
    ShardedEmbeddingCollection sharded(tables, plan, group);
    jagged::KeyedJaggedFields fields;
    fields.lengths = at::tensor({1, 1}, at::kInt);
    const jagged::KeyedJaggedTensor features(
        {"x"}, at::tensor({0, group.rank() == 1 ? 6 : 5}, at::kLong), fields);
    // The same text on the rank whose ids are good.
    try {
      sharded.forward(features);
      ADD_FAILURE() << "an id outside the table passed";
    } catch (const c10::IndexError& error) {
      EXPECT_NE(std::string(error.what())
                    .find("on rank 1, feature 'x', sample 1 has id 6, but "
                          "table 'a' has 6 rows."),
                std::string::npos)
          << error.what();
    }
  });
}

TEST(SequencePlans, MayBeRandom) {
  std::mt19937_64 random(11);
  constexpr OptimizerKind kinds[] = {OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                                     OptimizerKind::kAdamW, OptimizerKind::kLarsSgd};
  for (std::uint64_t round = 0; round < 12; ++round) {
    const int world = 1 + static_cast<int>(random() % 4);
    Job job;
    job.seed = 100 + round;
    job.steps = 2;
    job.local_size = world == 4 ? 2 : world;
    job.options.optimizer.kind = kinds[random() % 4];
    job.options.optimizer.learning_rate = 0.05;
    // LARS looks at whole rows: columns of such tables stay together.
    const bool may_cut_columns = job.options.optimizer.kind != OptimizerKind::kLarsSgd;
    for (int t = 0; t < 4; ++t) {
      const std::string name = "t" + std::to_string(t);
      const auto columns = static_cast<std::int64_t>(2 + random() % 6);
      std::vector<std::string> features = {"f" + std::to_string(t)};
      if (random() % 2 == 0) features.push_back("shared");
      job.tables.push_back(
          table(name, static_cast<std::int64_t>(1 + random() % 12), columns, features));
      const int rank = static_cast<int>(random() % world);
      switch (random() % 5) {
        case 0:
          job.wishes.emplace(name, table_wise(rank));
          break;
        case 1:
          job.wishes.emplace(name, row_wise());
          break;
        case 2:
          job.wishes.emplace(name, may_cut_columns ? column_wise({rank, 0}) : row_wise());
          break;
        case 3:
          job.wishes.emplace(name, table_row_wise(rank / job.local_size));
          break;
        default:
          job.wishes.emplace(name, data_parallel().with_kernel(ComputeKernel::kFused));
      }
    }
    for (int rank = 0; rank < world; ++rank) {
      job.batches.push_back(static_cast<std::int64_t>(random() % 5));
    }
    SCOPED_TRACE(round);
    check(job);
  }
}

}  // namespace
}  // namespace tessera::sharding
