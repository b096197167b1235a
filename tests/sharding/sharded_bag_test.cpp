// Sharded tables against one process that has all tables and all samples: what comes out, what the
// tables are after one and after three steps, what the optimizer keeps.

#include <gtest/gtest.h>

#include "sharding/sharded_tables.h"
#include "support/ranks.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::sharding {
namespace {

using embedding::OptimizerKind;
using embedding::PoolingType;
using tessera::testing::each_of_three;
using tessera::testing::Expected;
using tessera::testing::Job;
using tessera::testing::run_alone;
using tessera::testing::run_ranks;
using tessera::testing::run_sharded;
using tessera::testing::table;
using tessera::testing::test_options;
using tessera::testing::three_by_columns;
using tessera::testing::three_on_ranks;
using tessera::testing::three_tables;

void check(const Job& job, comm::Engine engine = comm::Engine::kAuto) {
  const Expected expected = run_alone(job);
  run_ranks(
      job.world(), [&](const comm::Group& group) { run_sharded(job, expected, group); },
      test_options(engine));
}

Placement fused_data_parallel() { return data_parallel().with_kernel(ComputeKernel::kFused); }

class Bag : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Bag, ::testing::Values(1, 2, 3, 4));

TEST_P(Bag, TableWise) {
  Job job = three_tables(GetParam());
  job.wishes = three_on_ranks(GetParam());
  check(job);
}

TEST_P(Bag, RowWise) {
  Job job = three_tables(GetParam());
  job.wishes = each_of_three(row_wise());
  check(job);
}

TEST_P(Bag, ColumnWise) {
  Job job = three_tables(GetParam());
  job.wishes = three_by_columns(GetParam());
  check(job);
}

TEST_P(Bag, DataParallel) {
  Job job = three_tables(GetParam());
  job.wishes = each_of_three(fused_data_parallel());
  check(job);
}

TEST_P(Bag, Mixed) {
  Job job = three_tables(GetParam());
  job.wishes = {{"a", fused_data_parallel()}, {"b", row_wise()}, {"c", table_wise(GetParam() - 1)}};
  job.options.optimizer.kind = OptimizerKind::kRowWiseAdagrad;
  check(job);
}

// One of each kind of sharding, and features that two tables share.
Job job_of_all_kinds(int world, PoolingType pooling = PoolingType::kSum) {
  Job job = three_tables(world);
  job.tables = {table("rows", 11, 4, {"f0", "f1"}, pooling), table("whole", 7, 3, {"f2"}, pooling),
                table("columns", 9, 8, {"f3", "f0"}, pooling),
                table("copies", 6, 5, {"f4"}, pooling), table("sum", 8, 4, {"f2"})};
  job.wishes = {{"rows", row_wise()},
                {"whole", table_wise(world - 1)},
                {"columns", column_wise({world - 1, 0, 0})},
                {"copies", fused_data_parallel()},
                {"sum", table_wise(0)}};
  return job;
}

// A row-wise mean divides its own columns and no others.
TEST_P(Bag, Mean) { check(job_of_all_kinds(GetParam(), PoolingType::kMean)); }

TEST_P(Bag, WeightsAndTheirGradients) {
  for (const PoolingType pooling : {PoolingType::kSum, PoolingType::kMean}) {
    Job job = job_of_all_kinds(GetParam(), pooling);
    job.is_weighted = true;
    check(job);
  }
}

TEST_P(Bag, UnevenAndEmptyBatches) {
  Job job = job_of_all_kinds(GetParam());
  const std::vector<std::int64_t> sizes{4, 0, 1, 7};
  for (int seed = 1; seed <= 2; ++seed) {
    job.seed = static_cast<std::uint64_t>(seed);
    for (std::size_t r = 0; r < job.batches.size(); ++r) {
      job.batches[r] = seed == 1 ? sizes[r] : sizes[3 - r];
    }
    check(job);
  }
  std::fill(job.batches.begin(), job.batches.end(), 0);
  check(job);
}

TEST_P(Bag, MoreRanksThanRowsAndTables) {
  Job job = three_tables(GetParam());
  job.tables = {table("a", 1, 4), table("b", 5, 2, {"f0", "f1"}, PoolingType::kMean)};
  job.wishes = {{"a", row_wise()}, {"b", row_wise()}};
  check(job);
  job.wishes = {{"a", table_wise(GetParam() - 1)}, {"b", table_wise(GetParam() - 1)}};
  job.is_weighted = true;
  check(job);
}

TEST_P(Bag, RowsAsNamed) {
  Job job = three_tables(GetParam());
  std::vector<std::int64_t> rows(static_cast<std::size_t>(GetParam()), 0);
  rows.back() = 20;  // the others have none
  job.wishes = {{"a", row_wise()}, {"b", row_wise()}, {"c", row_wise(rows)}};
  check(job);
}

TEST_P(Bag, ShortIds) {
  Job job = job_of_all_kinds(GetParam());
  job.ids_type = at::kInt;
  check(job);
}

TEST_P(Bag, VariableBatch) {
  for (const PoolingType pooling : {PoolingType::kSum, PoolingType::kMean}) {
    Job job = job_of_all_kinds(GetParam(), pooling);
    job.is_variable = true;
    job.batches.back() = 0;
    job.is_weighted = pooling == PoolingType::kMean;
    check(job);
  }
}

TEST_P(Bag, SparseGradients) {
  Job job = job_of_all_kinds(GetParam());
  job.options.gradients = embedding::GradientForm::kSparse;
  check(job);
}

TEST_P(Bag, ExactRowNorms) {
  for (const OptimizerKind kind :
       {OptimizerKind::kRowWiseAdagrad, OptimizerKind::kPartialRowWiseAdam, OptimizerKind::kLamb,
        OptimizerKind::kPartialRowWiseLamb, OptimizerKind::kLarsSgd}) {
    Job job = job_of_all_kinds(GetParam());
    job.options.optimizer.kind = kind;
    job.options.optimizer.learning_rate = 0.05;
    job.options.optimizer.weight_decay = 0.1;
    job.options.optimizer.eps = 1e-4;
    job.options.exact_row_norms = true;
    job.options.gradients = kind == OptimizerKind::kLamb ? embedding::GradientForm::kSparse
                                                         : embedding::GradientForm::kFused;
    job.batches.back() = 0;
    job.tolerance = 1e-5;
    check(job);
  }
}

TEST_P(Bag, NarrowRows) {
  Job job = job_of_all_kinds(GetParam());
  job.tables[0].data_type = embedding::DataType::kFP16;
  job.tables[2].data_type = embedding::DataType::kBF16;
  job.options.optimizer.kind = OptimizerKind::kSgd;
  job.tolerance = 1e-2;  // one unit of the last of bfloat16's digits
  check(job);
}

TEST(BagHosts, TableRowWiseAndGrid) {
  Job job = job_of_all_kinds(4, PoolingType::kMean);
  job.local_size = 2;
  job.wishes = {{"rows", table_row_wise(1)},
                {"whole", table_row_wise(0)},
                {"columns", grid_shard({1, 0})},
                {"copies", row_wise()},
                {"sum", table_column_wise({2, 3})}};
  job.batches = {3, 0, 5, 2};
  check(job);
}

// Sums inside hosts of tables with fewer rows than ranks, and with one rank's batch empty; several
// modules share the groups of the hosts.
TEST(BagHosts, SumsInHosts) {
  Job job = job_of_all_kinds(4);
  job.local_size = 2;
  job.tables.push_back(table("one", 1, 4, {"f5", "f1"}, PoolingType::kMean));
  job.wishes = {{"rows", grid_shard({0, 1})},     {"whole", table_row_wise(1)},
                {"columns", column_wise({3, 0})}, {"copies", fused_data_parallel()},
                {"sum", table_wise(1)},           {"one", table_row_wise(0)}};
  for (const bool is_variable : {false, true}) {
    job.is_variable = is_variable;
    job.is_weighted = is_variable;
    job.batches = {3, 1, 0, 4};
    const Expected expected = run_alone(job);
    run_ranks(4, [&](const comm::Group& group) {
      run_sharded(job, expected, group);
      run_sharded(job, expected, group);
    });
  }
  // What cannot be summed in its encoded form goes straight home.
  job.is_weighted = false;
  job.options.codecs.forward = comm::Codec({.format = comm::WireFormat::kInt8});
  job.steps = 1;
  job.tolerance = 0.1;
  check(job);
}

TEST(BagEngines, Gloo) { check(job_of_all_kinds(3, PoolingType::kMean), comm::Engine::kGloo); }

// Types in order of their first table, in a type by rank, then as configured.
TEST(BagKeys, AreInTheOrderOfTypesAndRanks) {
  run_ranks(2, [](const comm::Group& group) {
    const std::vector<embedding::EmbeddingBagConfig> tables{
        table("t0", 4, 4, {"f0"}), table("t1", 4, 4, {"f1"}), table("t2", 4, 4, {"f2"}),
        table("t3", 4, 4, {"f3"}), table("t4", 4, 4, {"f4"})};
    const auto plan = make_module_plan(tables,
                                       {{"t0", row_wise()},
                                        {"t1", table_wise(1)},
                                        {"t2", table_wise(0)},
                                        {"t3", column_wise({0, 1})},
                                        {"t4", table_wise(0)}},
                                       {2, 2});
    ShardedEmbeddingBagCollection collection(tables, plan, group);
    const auto bags =
        tessera::testing::random_bags({"f4", "f3", "f2", "f1", "f0"}, {4, 4, 4, 4, 4}, 3, 1);
    const auto output = collection.forward(bags.kjt(false));
    EXPECT_EQ(output.keys(), (std::vector<std::string>{"f0", "f2", "f4", "f1", "f3"}));
  });
}

TEST(BagGradients, AreSummedWithoutDivision) {
  for (const bool is_divided : {true, false}) {
    set_gradient_division(is_divided);
    run_ranks(2, [&](const comm::Group& group) {
      const std::vector<embedding::EmbeddingBagConfig> tables{table("a", 2, 3), table("b", 2, 3)};
      const auto plan =
          make_module_plan(tables, {{"a", row_wise()}, {"b", fused_data_parallel()}}, {2, 2});
      ShardedOptions options;
      options.optimizer.learning_rate = 1;
      ShardedEmbeddingBagCollection collection(tables, plan, group, false, options);
      collection.load_tables({{"a", at::zeros({2, 3})}, {"b", at::zeros({2, 3})}});
      tessera::testing::Bags bags{{"a", "b"}, {{{1}}, {{1}}}, {{{1}}, {{1}}}, {}};
      collection.forward(bags.kjt(false)).values().sum().backward();
      const auto now = collection.gather_tables();
      EXPECT_EQ(now.at("a")[1][0].item<float>(), is_divided ? -1 : -2);
      EXPECT_EQ(now.at("b")[1][0].item<float>(), -1);
    });
  }
  set_gradient_division(true);
}

// Two modules with one message for their sizes, and two batches under way.
TEST(BagSteps, InputsOfSeveralModulesAndBatchesTravelTogether) {
  Job job = job_of_all_kinds(3);
  Job other = three_tables(3);
  other.wishes = {{"a", row_wise()}, {"b", table_wise(1)}, {"c", table_wise(0)}};
  other.seed = 5;
  const Expected expected = run_alone(job);
  const Expected others = run_alone(other);
  run_ranks(3, [&](const comm::Group& group) {
    const auto make = [&](const Job& from) {
      auto made = std::make_shared<ShardedEmbeddingBagCollection>(
          from.tables, make_module_plan(from.tables, from.wishes, {3, 3}), group, false,
          from.options);
      made->load_tables(from.initial());
      return made;
    };
    const auto first = make(job);
    const auto second = make(other);
    const auto inputs = [&](int step) {
      return fused_input_dist({{first.get(), job.bags(step, group.rank()).kjt(false)},
                               {second.get(), other.bags(step, group.rank()).kjt(false)}});
    };
    auto next = inputs(0);
    for (int step = 0; step < 3; ++step) {
      const auto now = next;
      if (step < 2) next = inputs(step + 1);
      const auto a = now[0].wait();
      const auto b = now[1].wait();
      const auto rows = first->compute_and_output_dist(a.wait());
      const auto other_rows = second->compute_and_output_dist(b.wait());
      at::Tensor loss = at::zeros({});
      const auto add = [&](const Job& from, const Expected& wanted,
                           const jagged::KeyedTensor& output) {
        for (const auto& name : output.keys()) {
          EXPECT_TRUE(tessera::testing::is_close(
              output[name], wanted.outputs[step][group.rank()].at(name), from.tolerance));
          loss = loss +
                 (output[name] * from.coefficients(step, group.rank(), name, output[name])).sum();
        }
      };
      add(job, expected, *rows);
      add(other, others, *other_rows);
      loss.backward();
    }
    const auto tables = first->gather_tables();
    for (const auto& [name, weight] : expected.tables.back()) {
      EXPECT_TRUE(tessera::testing::is_close(tables.at(name), weight, job.tolerance)) << name;
    }
  });
}

// Nothing is recorded, and nothing is stepped.
TEST(BagSteps, WithoutGradient) {
  const Job job = job_of_all_kinds(2);
  const Expected expected = run_alone(job);
  run_ranks(2, [&](const comm::Group& group) {
    ShardedEmbeddingBagCollection tables(
        job.tables, make_module_plan(job.tables, job.wishes, {2, 2}), group, false, job.options);
    tables.load_tables(job.initial());
    const at::NoGradGuard no_grad;
    const auto output = tables.forward(job.bags(0, group.rank()).kjt(false));
    EXPECT_FALSE(output.values().requires_grad());
    for (const auto& name : output.keys()) {
      EXPECT_TRUE(tessera::testing::is_close(
          output[name], expected.outputs[0][group.rank()].at(name), job.tolerance));
    }
  });
}

}  // namespace
}  // namespace tessera::sharding
