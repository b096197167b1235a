// Gradients that are kept: sparse ones over several passes, clipped and stepped; dense ones.

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "sharding/sharded_tables.h"
#include "support/ranks.h"
#include "tessera/comm/collectives.h"

namespace tessera::sharding {
namespace {

using embedding::GradientForm;
using embedding::OptimizerKind;
using embedding::RowOptimizer;
using tessera::testing::Bags;
using tessera::testing::is_close;
using tessera::testing::Job;
using tessera::testing::joined;
using tessera::testing::run_ranks;
using tessera::testing::table;

Job job_of(int world) {
  Job job;
  job.tables = {table("rows", 11, 4, {"f0", "f1"}), table("whole", 7, 3, {"f2"}),
                table("columns", 9, 8, {"f3", "f0"}), table("copies", 6, 5, {"f4"})};
  job.wishes = {{"rows", row_wise()},
                {"whole", table_wise(world - 1)},
                {"columns", column_wise({world - 1, 0})},
                {"copies", data_parallel().with_kernel(ComputeKernel::kFused)}};
  for (int rank = 0; rank < world; ++rank) job.batches.push_back(rank + 2);
  job.options.optimizer.kind = OptimizerKind::kAdam;
  job.options.optimizer.learning_rate = 0.1;
  job.options.gradients = GradientForm::kSparse;
  return job;
}

// The gradients of one pass of all ranks, averaged, into the weights of `tables`.
void backward_alone(const Job& job, int step, embedding::EmbeddingBagCollection& tables) {
  std::vector<Bags> parts;
  for (int rank = 0; rank < job.world(); ++rank) parts.push_back(job.bags(step, rank));
  const auto output = tables.forward(joined(parts).kjt(false));
  at::Tensor loss = at::zeros({});
  std::int64_t begin = 0;
  for (int rank = 0; rank < job.world(); ++rank) {
    for (const auto& name : output.keys()) {
      const at::Tensor own = output[name].narrow(0, begin, job.batches[rank]);
      loss = loss + (own * job.coefficients(step, rank, name, own)).sum() / job.world();
    }
    begin += job.batches[rank];
  }
  loss.backward();
}

void backward(const Job& job, int step, int rank, ShardedEmbeddingBagCollection& tables) {
  const auto output = tables.forward(job.bags(step, rank).kjt(false));
  at::Tensor loss = at::zeros({});
  for (const auto& name : output.keys()) {
    loss = loss + (output[name] * job.coefficients(step, rank, name, output[name])).sum();
  }
  loss.backward();
}

std::unique_ptr<embedding::EmbeddingBagCollection> make_alone(const Job& job, GradientForm form) {
  embedding::TableBatchOptions options;
  options.gradients = form;
  auto tables =
      std::make_unique<embedding::EmbeddingBagCollection>(job.tables, false, at::kCPU, options);
  const at::NoGradGuard no_grad;
  for (const auto& [name, weight] : job.initial()) tables->weight(name).copy_(weight);
  return tables;
}

std::unique_ptr<ShardedEmbeddingBagCollection> make_sharded(const Job& job,
                                                            const comm::Group& group) {
  ShardedOptions options = job.options;
  options.local_size = group.size();
  auto tables = std::make_unique<ShardedEmbeddingBagCollection>(
      job.tables, make_module_plan(job.tables, job.wishes, {group.size(), group.size()}), group,
      false, options);
  tables->load_tables(job.initial());
  return tables;
}

class BagGradientsKept : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, BagGradientsKept, ::testing::Values(1, 2, 3));

TEST_P(BagGradientsKept, AddUpAreClippedAndStep) {
  const Job job = job_of(GetParam());
  for (const double max_norm : {1e9, 0.5}) {
    const auto alone = make_alone(job, GradientForm::kSparse);
    std::vector<std::pair<std::string, at::Tensor>> weights;
    for (const auto& config : job.tables) {
      weights.emplace_back(config.name, alone->weight(config.name));
    }
    RowOptimizer optimizer(weights, job.options.optimizer);
    std::vector<double> norms;
    for (int round = 0; round < 2; ++round) {
      for (int pass = 0; pass < 3; ++pass) backward_alone(job, round * 3 + pass, *alone);
      norms.push_back(optimizer.clip_grad_norm(max_norm));
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const bool is_deferred : {false, true}) {
      run_ranks(job.world(), [&](const comm::Group& group) {
        const auto tables = make_sharded(job, group);
        for (int round = 0; round < 2; ++round) {
          if (is_deferred) {
            const auto kept = tables->no_sync();
            for (int pass = 0; pass < 2; ++pass) {
              backward(job, round * 3 + pass, group.rank(), *tables);
            }
            EXPECT_THROW(tables->step(), c10::ValueError);
          } else {
            for (int pass = 0; pass < 2; ++pass) {
              backward(job, round * 3 + pass, group.rank(), *tables);
            }
          }
          backward(job, round * 3 + 2, group.rank(), *tables);
          EXPECT_NEAR(tables->clip_grad_norm(max_norm), norms[round], 1e-5 * norms[round]);
          tables->step();
          tables->zero_grad_rows();
        }
        const auto now = tables->gather_tables();
        for (const auto& [name, weight] : weights) {
          EXPECT_TRUE(is_close(now.at(name), weight.detach(), 1e-5)) << name;
        }
      });
    }
  }
}

// Shards have dense gradients of their part, averaged; copies have those of the rank's own loss.
TEST_P(BagGradientsKept, AreDenseIfThePlanSaysSo) {
  Job job = job_of(GetParam());
  job.options.gradients = GradientForm::kFused;
  job.options.optimizer.kind = OptimizerKind::kRowWiseAdagrad;
  job.options.exact_row_norms = true;  // of tables with dense gradients nobody takes any
  for (auto& [name, wish] : job.wishes) {
    if (name != "whole") wish = wish.with_kernel(ComputeKernel::kDense);
  }
  const auto alone = make_alone(job, GradientForm::kDense);
  for (int pass = 0; pass < 2; ++pass) backward_alone(job, pass, *alone);
  run_ranks(job.world(), [&](const comm::Group& group) {
    const auto tables = make_sharded(job, group);
    for (int pass = 0; pass < 2; ++pass) backward(job, pass, group.rank(), *tables);
    std::set<std::string> seen;
    for (const auto& shard : tables->local_shards()) {
      if (shard.table == "whole") {
        EXPECT_FALSE(shard.weight.grad().defined());
        continue;
      }
      at::Tensor gradient = shard.weight.grad();
      if (shard.place.rows == 0) continue;
      ASSERT_TRUE(gradient.defined()) << shard.name;
      if (shard.table == "copies" && group.size() > 1) {
        gradient = comm::all_reduce(gradient, group) / group.size();
      }
      const at::Tensor part = alone->weight(shard.table)
                                  .grad()
                                  .narrow(0, shard.place.row, shard.place.rows)
                                  .narrow(1, shard.place.column, shard.place.columns);
      EXPECT_TRUE(is_close(gradient, part, 1e-5)) << shard.name;
    }
  });
}

// Parameters are the shards, by table; a second shard of a table has a name of its own.
TEST(BagParameters, AreTheShardsOfThisRank) {
  run_ranks(2, [](const comm::Group& group) {
    const std::vector<embedding::EmbeddingBagConfig> tables{table("a", 5, 6), table("b", 4, 2)};
    const auto plan =
        make_module_plan(tables, {{"a", column_wise({0, 1, 0})}, {"b", row_wise()}}, {2, 2});
    ShardedEmbeddingBagCollection collection(tables, plan, group);
    std::map<std::string, std::vector<std::int64_t>> shapes;
    for (const auto& item : collection.named_parameters()) {
      shapes[item.key()] = item.value().sizes().vec();
      EXPECT_TRUE(item.value().requires_grad());
    }
    std::map<std::string, std::vector<std::int64_t>> expected{{"embedding_bags.a.weight", {5, 2}},
                                                              {"embedding_bags.b.weight", {2, 2}}};
    if (group.rank() == 0) expected["embedding_bags.a.weight_1"] = {5, 2};
    EXPECT_EQ(shapes, expected);
    std::vector<std::string> names;
    for (const auto& shard : collection.local_shards()) names.push_back(shard.name);
    EXPECT_EQ(names, group.rank() == 0 ? (std::vector<std::string>{"a", "a#1", "b"})
                                       : (std::vector<std::string>{"a", "b"}));
    // Bounds of the whole table, and the same copies everywhere.
    for (const auto& shard : collection.local_shards()) {
      const double bound = std::sqrt(1.0 / static_cast<double>(shard.table_rows));
      EXPECT_LE(shard.weight.abs().max().item<float>(), bound);
    }
  });
}

TEST(BagParameters, CopiesStartAlike) {
  run_ranks(3, [](const comm::Group& group) {
    at::manual_seed(static_cast<std::uint64_t>(group.rank()));
    auto config = table("a", 5, 6);
    config.init_fn = [&](at::Tensor weight) { weight.fill_(group.rank() + 1); };
    const auto plan = make_module_plan({config}, {{"a", data_parallel()}}, {3, 3});
    ShardedEmbeddingBagCollection collection({config}, plan, group);
    EXPECT_TRUE(at::equal(collection.local_shards()[0].weight.detach(), at::ones({5, 6})));
  });
}

// Who waits for a late rank sorts its ids meanwhile; who comes late finds everything there.
TEST(BagGradients, ALateRankChangesNoBit) {
  constexpr int kWorld = 2;
  for (const GradientForm form : {GradientForm::kFused, GradientForm::kSparse}) {
    Job job = job_of(kWorld);
    job.options.gradients = form;
    std::map<int, testing::Weights> found;  // by the rank that is late
    for (const int late : {-1, 0, 1}) {
      run_ranks(kWorld, [&](const comm::Group& group) {
        const int rank = group.rank();
        const auto tables = make_sharded(job, group);
        const auto dawdle = [&] {
          if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        };
        for (int step = 0; step < 3; ++step) {
          const auto ids = tables->input_dist(job.bags(step, rank).kjt(false)).wait().wait();
          dawdle();
          const auto output = tables->compute_and_output_dist(ids).wait();
          at::Tensor loss = at::zeros({});
          for (const auto& name : output.keys()) {
            loss = loss + (output[name] * job.coefficients(step, rank, name, output[name])).sum();
          }
          dawdle();
          loss.backward();
          if (form == GradientForm::kSparse) {
            tables->step();
            tables->zero_grad_rows();
          }
        }
        const auto whole = tables->gather_tables();
        if (rank == 0) found[late] = whole;
      });
    }
    for (const auto& [late, tables] : found) {
      for (const auto& [name, weight] : tables) {
        EXPECT_TRUE(weight.equal(found[-1].at(name))) << "rank " << late << " late, " << name;
      }
    }
  }
}

// A step between a lookup and the wait for its rows does not reach them.
TEST(BagGradients, RowsAreThoseOfWhenTheLookupBegan) {
  constexpr int kWorld = 2;
  enum class Change { kBackward, kStep, kLoad };
  for (const Change change : {Change::kBackward, Change::kStep, Change::kLoad}) {
    Job job = job_of(kWorld);
    if (change != Change::kStep) job.options.gradients = GradientForm::kFused;
    run_ranks(kWorld, [&](const comm::Group& group) {
      std::vector<at::Tensor> found;
      for (const bool waits_first : {true, false}) {
        const auto tables = make_sharded(job, group);
        const auto first = tables->input_dist(job.bags(0, group.rank()).kjt(false)).wait().wait();
        const auto second = tables->input_dist(job.bags(1, group.rank()).kjt(false)).wait().wait();
        const at::Tensor loss = tables->compute_and_output_dist(first).wait().values().sum();
        std::map<std::string, at::Tensor> other;
        for (const auto& [name, weight] : tables->gather_tables()) other[name] = weight + 1;
        const auto pending = tables->compute_and_output_dist(second);
        if (waits_first) (void)pending.wait();
        if (change != Change::kLoad) loss.backward();
        if (change == Change::kStep) tables->step();
        if (change == Change::kLoad) tables->load_tables(other);
        found.push_back(pending.wait().values().detach());
        const at::Tensor after = tables->forward(job.bags(1, group.rank()).kjt(false)).values();
        EXPECT_FALSE(at::equal(after, found.back()));  // the change was one
      }
      EXPECT_TRUE(at::equal(found[0], found[1]));
    });
  }
}

}  // namespace
}  // namespace tessera::sharding
