// Position weights before sharded tables, against one process that has all samples.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "checkpoint/quiet.h"
#include "sharding/sharded_tables.h"
#include "support/error_text.h"
#include "support/ranks.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/comm/collectives.h"
#include "tessera/embedding/feature_processed_collection.h"
#include "tessera/embedding/position_weighted.h"
#include "tessera/sharding/distributed_model_parallel.h"
#include "tessera/sharding/sharded_feature_processed_collection.h"

namespace tessera::sharding {
namespace {

using embedding::EmbeddingBagCollection;
using embedding::FeatureProcessedEmbeddingBagCollection;
using embedding::GradientForm;
using embedding::GroupedPositionWeightedModule;
using embedding::PoolingType;
using jagged::KeyedJaggedTensor;
using tessera::testing::Bags;
using tessera::testing::error_text;
using tessera::testing::is_close;
using tessera::testing::joined;
using tessera::testing::random_bags;
using tessera::testing::random_rows;
using tessera::testing::run_ranks;
using tessera::testing::table;
using Tensors = std::map<std::string, at::Tensor>;

constexpr double kRate = 0.1;
constexpr double kTolerance = 3e-6;

// Feature x in two tables, z pooled by mean, w without position weights.
std::vector<embedding::EmbeddingBagConfig> tables() {
  return {table("a", 11, 4, {"x", "y"}), table("b", 7, 6, {"z"}, PoolingType::kMean),
          table("c", 5, 4, {"x"}), table("d", 6, 2, {"w"})};
}

Tensors initial_rows() {
  return {{"a", random_rows(11, 4, 1)},
          {"b", random_rows(7, 6, 2)},
          {"c", random_rows(5, 4, 3)},
          {"d", random_rows(6, 2, 4)}};
}

std::shared_ptr<GroupedPositionWeightedModule> processor() {
  auto made = std::make_shared<GroupedPositionWeightedModule>(
      embedding::LongestBags{{"x", 4}, {"y", 5}, {"z", 4}});
  std::uint64_t seed = 10;
  for (at::Tensor& weight : made->parameters()) {
    weight.detach().copy_(random_rows(1, weight.numel(), seed++)[0]);
  }
  return made;
}

Bags batch(int step, int rank, std::int64_t size) {
  return random_bags({"w", "z", "y", "x"}, {6, 7, 11, 5}, size,
                     static_cast<std::uint64_t>(1000 + step * 10 + rank));
}

std::shared_ptr<FeatureProcessedEmbeddingBagCollection> alone() {
  embedding::TableBatchOptions options;
  options.gradients = GradientForm::kFused;
  options.optimizer.learning_rate = kRate;
  auto bags = std::make_shared<EmbeddingBagCollection>(tables(), true, at::kCPU, options);
  const at::NoGradGuard no_grad;
  for (const auto& [name, rows] : initial_rows()) bags->weight(name).copy_(rows);
  return std::make_shared<FeatureProcessedEmbeddingBagCollection>(bags, processor());
}

// Different for every output and sample; the ranks' losses are averaged.
at::Tensor loss_of(const jagged::KeyedTensor& pooled) {
  at::Tensor loss = at::zeros({});
  for (const auto& name : pooled.keys()) {
    const double factor = 0.02 * (1.0 + static_cast<double>(std::hash<std::string>()(name) % 7));
    loss = loss + factor * pooled[name].square().sum();
  }
  return loss;
}

void step(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    ASSERT_TRUE(parameter.grad().defined());
    parameter.sub_(parameter.grad(), kRate);
    parameter.mutable_grad() = at::Tensor();
  }
}

struct Expected {
  std::vector<std::vector<Tensors>> outputs;  // step, rank, name
  std::vector<Tensors> rows;                  // after each step
  std::vector<std::vector<at::Tensor>> position_weights;
};

constexpr int kSteps = 3;

Expected run_alone(const std::vector<std::int64_t>& batches) {
  Expected expected;
  const auto whole = alone();
  for (int s = 0; s < kSteps; ++s) {
    std::vector<Bags> parts;
    for (std::size_t r = 0; r < batches.size(); ++r) {
      parts.push_back(batch(s, static_cast<int>(r), batches[r]));
    }
    const auto pooled = whole->forward(joined(parts).kjt(false));
    (loss_of(pooled) / static_cast<double>(batches.size())).backward();
    std::int64_t begin = 0;
    expected.outputs.emplace_back();
    for (const std::int64_t size : batches) {
      expected.outputs.back().emplace_back();
      for (const auto& name : pooled.keys()) {
        expected.outputs.back().back()[name] = pooled[name].detach().narrow(0, begin, size);
      }
      begin += size;
    }
    step(whole->processor()->parameters());
    expected.rows.emplace_back();
    for (const auto& config : tables()) {
      expected.rows.back()[config.name] = whole->weight(config.name).detach().clone();
    }
    expected.position_weights.emplace_back();
    for (const at::Tensor& weight : whole->processor()->parameters()) {
      expected.position_weights.back().push_back(weight.detach().clone());
    }
  }
  return expected;
}

void average_gradients(const std::vector<at::Tensor>& parameters, const comm::Group& group) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    parameter.mutable_grad() = comm::all_reduce(parameter.grad(), group) / group.size();
  }
}

std::vector<std::pair<std::string, Placement>> ways(int world, int local_size) {
  const int last = world - 1;
  return {{"data_parallel", data_parallel().with_kernel(ComputeKernel::kFused)},
          {"table_wise", table_wise(last)},
          {"row_wise", row_wise()},
          {"column_wise", column_wise({last, 0})},
          {"table_row_wise", table_row_wise(world / local_size - 1)},
          {"table_column_wise", table_column_wise({last, last})},
          {"grid_shard", grid_shard({0, world / local_size - 1})}};
}

class FeatureProcessed : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FeatureProcessed, ::testing::Values(1, 2, 3, 4));

TEST_P(FeatureProcessed, TrainsAsOneProcessUnderEveryPlan) {
  const int world = GetParam();
  const int local_size = world == 4 ? 2 : world;
  std::vector<std::int64_t> batches{3, 0, 5, 2};  // uneven, and an empty rank
  batches.resize(static_cast<std::size_t>(world));
  const Expected expected = run_alone(batches);
  const auto all = ways(world, local_size);
  run_ranks(world, [&](const comm::Group& group) {
    const int rank = group.rank();
    ShardedOptions options;
    options.optimizer.learning_rate = kRate;
    options.local_size = local_size;
    // Every type for all tables, and every type beside others.
    for (std::size_t w = 0; w < 2 * all.size(); ++w) {
      std::map<std::string, Placement> wishes;
      for (std::size_t t = 0; t < tables().size(); ++t) {
        const std::size_t way = w < all.size() ? w : (w + 2 * t) % all.size();
        wishes.emplace(tables()[t].name, all[way].second);
      }
      SCOPED_TRACE(all[w % all.size()].first + (w < all.size() ? "" : ", mixed"));
      ShardedFeatureProcessedEmbeddingBagCollection sharded(
          tables(), processor(), make_module_plan(tables(), wishes, {world, local_size}), group,
          options);
      sharded.load_tables(initial_rows());
      for (int s = 0; s < kSteps; ++s) {
        const auto pooled =
            sharded.forward(batch(s, rank, batches[static_cast<std::size_t>(rank)]).kjt(false));
        for (const auto& [name, rows] : expected.outputs[s][rank]) {
          ASSERT_TRUE(is_close(pooled[name], rows, kTolerance)) << name << ", step " << s;
        }
        loss_of(pooled).backward();
        average_gradients(sharded.processor()->parameters(), group);
        step(sharded.processor()->parameters());
        const auto rows = sharded.gather_tables();
        for (const auto& [name, weight] : expected.rows[s]) {
          ASSERT_TRUE(is_close(rows.at(name), weight, kTolerance)) << name << ", step " << s;
        }
        const auto weights = sharded.processor()->parameters();
        for (std::size_t i = 0; i < weights.size(); ++i) {
          ASSERT_TRUE(is_close(weights[i], expected.position_weights[s][i], kTolerance))
              << "position weights " << i << ", step " << s;
        }
      }
    }
  });
}

TEST(FeatureProcessedSteps, IdsSentAheadMeetTheParametersOfTheirTurn) {
  const Expected expected = run_alone({3, 2});
  run_ranks(2, [&](const comm::Group& group) {
    ShardedOptions options;
    options.optimizer.learning_rate = kRate;
    ShardedFeatureProcessedEmbeddingBagCollection sharded(
        tables(), processor(),
        make_module_plan(tables(),
                         {{"a", row_wise()},
                          {"b", table_wise(1)},
                          {"c", column_wise({1, 0})},
                          {"d", data_parallel().with_kernel(ComputeKernel::kFused)}},
                         {2, 2}),
        group, options);
    sharded.load_tables(initial_rows());
    std::vector<comm::Awaitable<DistributedInput>> ahead;
    for (int s = 0; s < kSteps; ++s) {  // all ids travel before the first step
      ahead.push_back(
          sharded.input_dist(batch(s, group.rank(), group.rank() == 0 ? 3 : 2).kjt(false)).wait());
    }
    for (int s = 0; s < kSteps; ++s) {
      const auto pooled = sharded.compute_and_output_dist(ahead[s].wait()).wait();
      for (const auto& [name, rows] : expected.outputs[s][group.rank()]) {
        EXPECT_TRUE(is_close(pooled[name], rows, kTolerance)) << name << ", step " << s;
      }
      loss_of(pooled).backward();
      average_gradients(sharded.processor()->parameters(), group);
      step(sharded.processor()->parameters());
    }
  });
}

struct Model : torch::nn::Module {
  Model() {
    processed = register_module("processed", alone());
    layer = register_module("layer", torch::nn::Linear(20, 1));
    const at::NoGradGuard no_grad;
    layer->weight.copy_(random_rows(1, 20, 5));
    layer->bias.zero_();
  }

  at::Tensor forward(const KeyedJaggedTensor& features) {
    const auto pooled = processed->forward(features);
    std::vector<at::Tensor> columns;
    for (const char* name : {"x@a", "y", "z", "x@c", "w"}) columns.push_back(pooled[name]);
    return layer->forward(at::cat(columns, 1)).square().sum();
  }

  std::vector<at::Tensor> dense() const {
    auto parameters = processed->processor()->parameters();
    for (const at::Tensor& parameter : layer->parameters()) parameters.push_back(parameter);
    return parameters;
  }

  std::shared_ptr<FeatureProcessedEmbeddingBagCollection> processed;
  torch::nn::Linear layer = nullptr;
};

TEST_P(FeatureProcessed, ModelJoinsRanksWithFewerBatchesAndKeepsItsNames) {
  const int world = GetParam();
  const auto count = [](int rank) { return 1 + rank; };
  Model whole;
  torch::optim::SGD optimizer(whole.dense(), kRate / 10);
  for (int s = 0; s < count(world - 1); ++s) {
    optimizer.zero_grad();
    std::vector<Bags> parts;
    for (int rank = 0; rank < world; ++rank) {
      if (s < count(rank)) parts.push_back(batch(s, rank, 2));
    }
    (whole.forward(joined(parts).kjt(false)) / world).backward();
    optimizer.step();
  }
  Tensors expected;
  for (const auto& item : whole.named_parameters()) expected[item.key()] = item.value().detach();
  run_ranks(world, [&](const comm::Group& group) {
    ShardingPlan plan;
    plan.modules["processed"] = make_module_plan(tables(),
                                                 {{"a", row_wise()},
                                                  {"b", table_wise(world - 1)},
                                                  {"c", column_wise({0, world - 1})},
                                                  {"d", data_parallel()}},
                                                 {world, world});
    ModelParallelOptions options;
    options.tables.optimizer.learning_rate = kRate;
    DistributedModelParallel model(std::make_shared<Model>(), plan, group, options);
    const auto parameters = dense_parameters_of(model.parts());
    EXPECT_EQ(parameters.size(), 6U);  // position weights, the layer, and the whole table d
    torch::optim::SGD dense(model.module()->dense(), kRate / 10);
    const at::Tensor replica =
        model.module()
            ->named_parameters()["processed._embedding_bag_collection.embedding_bags.d.weight"];
    torch::optim::SGD tables_here({replica}, kRate);
    model.join([&] {
      for (int s = 0; s < count(group.rank()); ++s) {
        dense.zero_grad();
        tables_here.zero_grad();
        model(batch(s, group.rank(), 2).kjt(false)).backward();
        dense.step();
        tables_here.step();
      }
    });
    const Tensors state = state_dict_of(model.parts());
    ASSERT_EQ(state.size(), expected.size());
    for (const auto& [name, tensor] : expected) {
      ASSERT_TRUE(state.count(name)) << name;
      EXPECT_TRUE(is_close(state.at(name), tensor, kTolerance)) << name;
    }
  });
}

ShardingPlan model_plan(int world, const Placement& all) {
  std::map<std::string, Placement> wishes;
  for (const auto& config : tables()) wishes.emplace(config.name, all);
  ShardingPlan plan;
  plan.modules["processed"] = make_module_plan(tables(), wishes, {world, world});
  return plan;
}

TEST(FeatureProcessedState, IsSavedAndLoadedUnderAnotherPlan) {
  std::string folder = (std::filesystem::temp_directory_path() / "tessera-fp-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  Tensors expected;
  run_ranks(2, [&](const comm::Group& group) {
    DistributedModelParallel model(std::make_shared<Model>(), model_plan(2, row_wise()), group);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& weight : model.module()->processed->processor()->parameters()) {
      weight.add_(1);
    }
    checkpoint::State state;
    checkpoint::add_module(state, model.module());
    checkpoint::save(folder, 1, state, group, checkpoint::testing::quiet());
    const Tensors whole = state_dict_of(model.parts());
    if (group.rank() == 0) expected = whole;
  });
  run_ranks(3, [&](const comm::Group& group) {
    DistributedModelParallel model(std::make_shared<Model>(), model_plan(3, column_wise({2, 0})),
                                   group);
    Tensors zeros;
    for (const auto& [name, rows] : initial_rows()) zeros[name] = at::zeros_like(rows);
    for (const auto& each : sharded_modules_of(model.parts())) each.second->load_tables(zeros);
    checkpoint::State state;
    checkpoint::add_module(state, model.module());
    checkpoint::load(folder, state, group, checkpoint::testing::quiet_load());
    const Tensors loaded = state_dict_of(model.parts());
    ASSERT_EQ(loaded.size(), expected.size());
    for (const auto& [name, tensor] : loaded) {
      EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name;
    }
    // The sharded module by itself takes its part.
    const auto own = std::dynamic_pointer_cast<ShardedFeatureProcessedEmbeddingBagCollection>(
        sharded_modules_of(model.parts())[0].second);
    own->load_tables(zeros);
    for (const at::Tensor& weight : own->processor()->parameters()) weight.detach().zero_();
    checkpoint::State part;
    checkpoint::add_module(part, own, "model.processed.", "optimizer.processed.");
    checkpoint::load(folder, part, group, checkpoint::testing::quiet_load());
    for (const auto& [name, tensor] : state_dict_of(model.parts())) {
      EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name;
    }
  });
  std::filesystem::remove_all(folder);
}

TEST(FeatureProcessedErrors, AreTheSameOnAllRanks) {
  run_ranks(2, [](const comm::Group& group) {
    ShardedFeatureProcessedEmbeddingBagCollection sharded(
        tables(), processor(),
        make_module_plan(
            tables(),
            {{"a", row_wise()}, {"b", row_wise()}, {"c", table_wise(0)}, {"d", table_wise(0)}},
            {2, 2}),
        group);
    Bags bags = batch(0, group.rank(), 3);
    if (group.rank() == 1) {
      bags.ids[1][2] = {1, 2, 3, 1, 2};
      bags.weights[1][2] = {1, 1, 1, 1, 1};
    }
    EXPECT_EQ(error_text([&] { sharded.forward(bags.kjt(false)); }),
              "sharding.embedding_bag_collection: on rank 1, embed.position_weighted: feature 'z', "
              "sample 2 has 5 ids, but there are weights for 4 positions.");
    // The ranks are together again.
    EXPECT_EQ(sharded.forward(batch(0, group.rank(), 3).kjt(false)).values().size(0), 3);

    ShardedEmbeddingBagCollection plain(
        {table("a", 11, 4, {"x"})},
        make_module_plan({table("a", 11, 4, {"x"})}, {{"a", row_wise()}}, {2, 2}), group, true);
    const auto input = plain.input_dist(batch(0, 0, 1).kjt(true)).wait().wait();
    EXPECT_NE(error_text([&] {
                plain.compute_and_output_dist(input, at::ones({1})).wait();
              }).find("ask for weights_come_later"),
              std::string::npos);
  });
}

TEST(FeatureProcessedErrors, SayWhatIsWrongWithTheModule) {
  run_ranks(1, [](const comm::Group& group) {
    ShardingPlan plan;
    plan.modules["processed"] = make_module_plan(
        tables(), {{"a", row_wise()}, {"b", row_wise()}, {"c", row_wise()}, {"d", row_wise()}},
        {1, 1});
    DistributedModelParallel model(std::make_shared<Model>(), plan, group);
    EXPECT_NE(error_text([&] {
                model.module()->processed->bags()->forward(batch(0, 0, 1).kjt(true));
              }).find("call forward of the whole collection"),
              std::string::npos);
    const auto sharded = std::dynamic_pointer_cast<ShardedFeatureProcessedEmbeddingBagCollection>(
        sharded_modules_of(model.parts())[0].second);
    ASSERT_NE(sharded, nullptr);
    const auto input = sharded->bags()->input_dist(batch(0, 0, 1).kjt(false)).wait().wait();
    EXPECT_NE(error_text([&] {
                sharded->bags()->compute_and_output_dist(input, at::ones({99})).wait();
              }).find("there are 99 weights for "),
              std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::sharding
