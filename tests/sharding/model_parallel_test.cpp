// A model with tables and dense layers over ranks, against the same model in one process that has
// all samples.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "checkpoint/quiet.h"
#include "sharding/sharded_tables.h"
#include "support/error_text.h"
#include "support/ranks.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"
#include "tessera/sharding/distributed_model_parallel.h"

namespace tessera::sharding {
namespace {

using embedding::EmbeddingBagCollection;
using embedding::EmbeddingCollection;
using embedding::GradientForm;
using jagged::KeyedJaggedTensor;
using tessera::testing::Bags;
using tessera::testing::error_text;
using tessera::testing::is_close;
using tessera::testing::joined;
using tessera::testing::random_bags;
using tessera::testing::random_rows;
using tessera::testing::run_ranks;
using tessera::testing::table;

constexpr double kRate = 0.1;

embedding::TableBatchOptions alone_options(GradientForm form) {
  embedding::TableBatchOptions options;
  options.gradients = form;
  options.optimizer.learning_rate = kRate;
  return options;
}

/// Pooled tables, a table of sequences, and layers above.
struct Model : torch::nn::Module {
  explicit Model(GradientForm form = GradientForm::kFused, at::Device device = at::kCPU) {
    bags =
        register_module("bags", std::make_shared<EmbeddingBagCollection>(
                                    std::vector{table("a", 9, 4, {"x"}), table("b", 7, 3, {"y"})},
                                    false, device, alone_options(form)));
    rows = register_module(
        "rows", std::make_shared<EmbeddingCollection>(std::vector{table("c", 8, 2, {"x"})}, device,
                                                      false, alone_options(form)));
    layer = register_module("layer", torch::nn::Linear(9, 1));
    const at::NoGradGuard no_grad;
    layer->weight.copy_(random_rows(1, 9, 5));
    layer->bias.zero_();
    if (device.is_meta()) return;
    bags->weight("a").copy_(random_rows(9, 4, 1));
    bags->weight("b").copy_(random_rows(7, 3, 2));
    rows->weight("c").copy_(random_rows(8, 2, 3));
  }

  at::Tensor forward(const KeyedJaggedTensor& features) {
    const auto pooled = bags->forward(features);
    const auto sequence = rows->forward(features)[0].second;
    const at::Tensor lengths = sequence.lengths().to(at::kLong);
    const at::Tensor sums =
        at::zeros({lengths.size(0), 2})
            .index_add(0, at::arange(lengths.size(0)).repeat_interleave(lengths),
                       sequence.values());
    return layer->forward(at::cat({pooled["x"], pooled["y"], sums}, 1)).squeeze(1);
  }

  std::shared_ptr<EmbeddingBagCollection> bags;
  std::shared_ptr<EmbeddingCollection> rows;
  torch::nn::Linear layer = nullptr;
};

Bags batch(int step, int rank, std::int64_t size = 4) {
  return random_bags({"x", "y"}, {8, 7}, size, static_cast<std::uint64_t>(100 + step * 10 + rank));
}

ShardingPlan plan_for(int world, const std::optional<Placement>& b = {}) {
  const Topology topology{world, world};
  ShardingPlan plan;
  plan.modules["bags"] =
      make_module_plan({table("a", 9, 4, {"x"}), table("b", 7, 3, {"y"})},
                       {{"a", row_wise()}, {"b", b.value_or(table_wise(world - 1))}}, topology);
  plan.modules["rows"] =
      make_module_plan({table("c", 8, 2, {"x"})}, {{"c", column_wise({0, world - 1})}}, topology);
  return plan;
}

ModelParallelOptions options_of(GradientForm form = GradientForm::kFused) {
  ModelParallelOptions options;
  options.tables.gradients = form;
  options.tables.optimizer.learning_rate = kRate;
  return options;
}

/// Every sample weighs the same in one process; each rank has a mean over its own.
at::Tensor loss_of(const at::Tensor& output) { return (output * output).mean(); }

using Tensors = std::map<std::string, at::Tensor>;

Tensors state_of(const Model& model) {
  Tensors state;
  for (const auto& parameter : model.named_parameters()) {
    state[parameter.key()] = parameter.value().detach().clone();
  }
  return state;
}

void expect_same(const Tensors& state, const Tensors& expected) {
  ASSERT_EQ(state.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(state.count(name)) << name;
    EXPECT_TRUE(is_close(state.at(name), tensor, 2e-6)) << name;
  }
}

class ModelParallel : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ModelParallel, ::testing::Values(1, 2, 3, 4));

TEST_P(ModelParallel, TrainsAsOneProcess) {
  const int world = GetParam();
  Model alone;
  torch::optim::SGD dense(alone.layer->parameters(), kRate);
  for (int step = 0; step < 3; ++step) {
    std::vector<Bags> parts;
    for (int rank = 0; rank < world; ++rank) parts.push_back(batch(step, rank));
    dense.zero_grad();
    loss_of(alone.forward(joined(parts).kjt(false))).backward();
    dense.step();
  }
  const Tensors expected = state_of(alone);
  run_ranks(world, [&](const comm::Group& group) {
    DistributedModelParallel model(std::make_shared<Model>(), plan_for(world), group, options_of());
    EXPECT_EQ(dense_parameters_of(model.parts()).size(), 2U);
    torch::optim::SGD optimizer(dense_parameters_of(model.parts()), kRate);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(model(batch(step, group.rank()).kjt(false))).backward();
      optimizer.step();
    }
    expect_same(state_dict_of(model.parts()), expected);
  });
}

TEST_P(ModelParallel, AccumulatesAndClipsAsOneProcess) {
  const int world = GetParam();
  constexpr double kMaxNorm = 0.05;
  Model alone(GradientForm::kDense);
  torch::optim::SGD optimizer(alone.parameters(), kRate);
  double norm = 0;
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 3; ++pass) {
      std::vector<Bags> parts;
      for (int rank = 0; rank < world; ++rank) parts.push_back(batch(step * 3 + pass, rank));
      loss_of(alone.forward(joined(parts).kjt(false))).backward();
    }
    double square = 0;
    for (const at::Tensor& parameter : alone.parameters()) {
      square += parameter.grad().square().sum().item<double>();
    }
    norm = std::sqrt(square);
    ASSERT_GT(norm, kMaxNorm);
    for (at::Tensor& parameter : alone.parameters()) parameter.mutable_grad().mul_(kMaxNorm / norm);
    optimizer.step();
  }
  const Tensors expected = state_of(alone);
  run_ranks(world, [&](const comm::Group& group) {
    const auto everywhere = data_parallel().with_kernel(ComputeKernel::kFused);
    DistributedModelParallel model(std::make_shared<Model>(), plan_for(world, everywhere), group,
                                   options_of(GradientForm::kSparse));
    torch::optim::SGD dense(dense_parameters_of(model.parts()), kRate);
    double own = 0;
    for (int step = 0; step < 2; ++step) {
      zero_grad(model.parts());
      {
        const auto scope = model.no_sync();
        for (int pass = 0; pass < 2; ++pass) {
          loss_of(model(batch(step * 3 + pass, group.rank()).kjt(false))).backward();
        }
      }
      loss_of(model(batch(step * 3 + 2, group.rank()).kjt(false))).backward();
      own = clip_grad_norm(model.parts(), kMaxNorm);
      dense.step();
      step_tables(model.parts());
    }
    EXPECT_NEAR(own, norm, 1e-5 * norm);
    expect_same(state_dict_of(model.parts()), expected);
  });
}

TEST_P(ModelParallel, JoinsRanksWithFewerBatches) {
  const int world = GetParam();
  // Rank r has 1 + 2 r batches. A rank that has run out contributes nothing; sums are divided by
  // all.
  const auto count = [](int rank) { return 1 + 2 * rank; };
  Model alone;
  torch::optim::SGD dense(alone.layer->parameters(), kRate);
  for (int step = 0; step < count(world - 1); ++step) {
    dense.zero_grad();
    std::vector<Bags> parts;
    std::vector<int> ranks;
    for (int rank = 0; rank < world; ++rank) {
      if (step < count(rank)) parts.push_back(batch(step, rank));
    }
    const at::Tensor output = alone.forward(joined(parts).kjt(false));
    ((output * output).sum() / (4.0 * world)).backward();
    dense.step();
  }
  const Tensors expected = state_of(alone);
  run_ranks(world, [&](const comm::Group& group) {
    DistributedModelParallel model(std::make_shared<Model>(), plan_for(world), group, options_of());
    torch::optim::SGD optimizer(dense_parameters_of(model.parts()), kRate);
    model.join([&] {
      for (int step = 0; step < count(group.rank()); ++step) {
        optimizer.zero_grad();
        loss_of(model(batch(step, group.rank()).kjt(false))).backward();
        optimizer.step();
      }
    });
    expect_same(state_dict_of(model.parts()), expected);
  });
}

TEST(ModelParallelState, TakesWholeTensorsUnderAnyPlan) {
  run_ranks(2, [](const comm::Group& group) {
    const Tensors whole = state_of(Model());
    DistributedModelParallel model(std::make_shared<Model>(GradientForm::kFused, at::kMeta),
                                   plan_for(2), group, options_of());
    load_state_dict(model.parts(), whole);
    expect_same(state_dict_of(model.parts()), whole);
    EXPECT_EQ(sharded_modules_of(model.parts()).size(), 2U);
    EXPECT_EQ(plan_of(model.parts()).modules.size(), 2U);

    Tensors wrong = whole;
    wrong.erase("bags.embedding_bags.b.weight");
    EXPECT_NE(error_text([&] {
                load_state_dict(model.parts(), wrong);
              }).find("'bags.embedding_bags.b.weight' is missing"),
              std::string::npos);
    wrong = whole;
    wrong["rows.embeddings.c.weight"] = at::zeros({8, 3});
    EXPECT_NE(error_text([&] {
                load_state_dict(model.parts(), wrong);
              }).find("'rows.embeddings.c.weight' has shape [8, 3], it should have [8, 2]"),
              std::string::npos);
    wrong = whole;
    wrong["stranger"] = at::zeros({1});
    EXPECT_NE(error_text([&] { load_state_dict(model.parts(), wrong); }).find("stranger"),
              std::string::npos);
  });
}

TEST(ModelParallelState, IsSavedAndLoadedUnderAnotherPlanAtAnotherWorld) {
  std::string folder = (std::filesystem::temp_directory_path() / "tessera-model-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  ModelParallelOptions options = options_of();
  options.tables.optimizer.kind = embedding::OptimizerKind::kAdam;
  const auto step = [](auto& model, const comm::Group& group, int number) {
    loss_of(model(batch(number, group.rank()).kjt(false))).backward();
  };
  Tensors expected;
  run_ranks(2, [&](const comm::Group& group) {
    DistributedModelParallel model(std::make_shared<Model>(), plan_for(2), group, options);
    for (int i = 0; i < 2; ++i) step(model, group, i);
    checkpoint::State state;
    checkpoint::add_module(state, model.module());
    checkpoint::save(folder, 2, state, group, checkpoint::testing::quiet());
    const Tensors whole = state_dict_of(model.parts());
    if (group.rank() == 0) expected = whole;
  });
  run_ranks(3, [&](const comm::Group& group) {
    const auto everywhere = data_parallel().with_kernel(ComputeKernel::kFused);
    DistributedModelParallel model(std::make_shared<Model>(GradientForm::kFused, at::kMeta),
                                   plan_for(3, everywhere), group, options);
    checkpoint::State state;
    checkpoint::add_module(state, model.module());
    checkpoint::load(folder, state, group, checkpoint::testing::quiet_load());
    for (const auto& [name, tensor] : state_dict_of(model.parts())) {
      EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name;
    }
    for (const auto& [path, tables] : sharded_modules_of(model.parts())) {
      for (const auto& optimizer : tables->optimizers()) EXPECT_EQ(optimizer->num_steps(), 2);
      for (const LocalShard& shard : tables->local_shards()) {
        if (shard.place.rows == 0) continue;
        EXPECT_GT(shard.state.at("momentum1").abs().sum().item<float>(), 0) << path << shard.name;
      }
    }
    step(model, group, 2);
  });
  std::filesystem::remove_all(folder);
}

TEST_P(ModelParallel, CopiesAreAlikeAndIndependent) {
  const int world = GetParam();
  run_ranks(world, [&](const comm::Group& group) {
    ModelParallelOptions options = options_of();
    options.tables.optimizer.kind = embedding::OptimizerKind::kAdam;
    DistributedModelParallel model(std::make_shared<Model>(), plan_for(world), group, options);
    const auto step = [&](auto& own, int number) {
      loss_of(own(batch(number, group.rank()).kjt(false))).backward();
    };
    step(model, 0);
    set_tables_learning_rate(model.parts(), kRate / 2);
    {
      const at::NoGradGuard no_grad;
      model.module()->layer->bias.add_(1);
    }
    auto twin = model.copy(std::make_shared<Model>(GradientForm::kFused, at::kMeta));
    const Tensors before = state_dict_of(model.parts());
    for (const auto& [name, tensor] : state_dict_of(twin.parts())) {
      EXPECT_TRUE(at::equal(tensor, before.at(name))) << name;
    }
    step(twin, 1);  // by the moments and the rate of the first
    for (const auto& [name, tensor] : state_dict_of(model.parts())) {
      EXPECT_TRUE(at::equal(tensor, before.at(name))) << name;
    }
    step(model, 1);
    const Tensors after = state_dict_of(model.parts());
    EXPECT_FALSE(at::equal(after.at("bags.embedding_bags.a.weight"),
                           before.at("bags.embedding_bags.a.weight")));
    for (const auto& [name, tensor] : state_dict_of(twin.parts())) {
      EXPECT_TRUE(at::equal(tensor, after.at(name))) << name;
    }
  });
}

TEST(ModelParallelErrors, SayWhatThePlanGotWrong) {
  run_ranks(1, [](const comm::Group& group) {
    ShardingPlan plan = plan_for(1);
    plan.modules["nowhere"] = {};
    EXPECT_NE(error_text([&] {
                DistributedModelParallel(std::make_shared<Model>(), plan, group);
              }).find("the plan names 'nowhere', which is no part of the model"),
              std::string::npos);
    plan = plan_for(1);
    plan.modules["layer"] = {};
    EXPECT_NE(error_text([&] {
                DistributedModelParallel(std::make_shared<Model>(), plan, group);
              }).find("'layer', which is a torch::nn::LinearImpl and no collection of tables"),
              std::string::npos);
    plan = plan_for(1);
    plan.modules.erase("rows");
    EXPECT_NE(error_text([&] {
                DistributedModelParallel(std::make_shared<Model>(GradientForm::kFused, at::kMeta),
                                         plan, group);
              }).find("parameter 'rows.embeddings.c.weight' is on the meta device"),
              std::string::npos);
    DistributedModelParallel model(std::make_shared<Model>(), plan_for(1), group);
    EXPECT_NE(error_text([&] {
                const auto scope = model.no_sync();
              }).find("no_sync needs the gradients of the tables"),
              std::string::npos);
    EXPECT_NE(error_text([&] {
                clip_grad_norm(model.parts(), 1.0);
              }).find("clip_grad_norm needs the gradients of the tables"),
              std::string::npos);
    EXPECT_NE(error_text([&] {
                model.join([] {}, {.divide_by_initial_world_size = false});
              }).find("join with divide_by_initial_world_size"),
              std::string::npos);
    EXPECT_NE(
        error_text([&] { model.module()->bags->weight("a"); }).find("the tables lie elsewhere"),
        std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::sharding
