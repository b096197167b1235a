// Sharded tables: saved by some ranks under one plan, loaded by others under another.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <map>

#include "checkpoint/quiet.h"
#include "checkpoint/samples.h"
#include "sharding/sharded_tables.h"
#include "support/ranks.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/save.h"

namespace tessera::checkpoint::testing {
namespace {

using embedding::OptimizerKind;
using sharding::ShardedEmbeddingBagCollection;
using tessera::testing::Job;
using tessera::testing::run_ranks;

LoadOptions of_step(std::int64_t step) {
  LoadOptions options = quiet_load();
  options.step = step;
  return options;
}

using Wishes = std::map<std::string, sharding::Placement>;

// Each plan cuts each of the three tables in another way.
Wishes wishes_of(int plan, int world) {
  using namespace sharding;
  const int last = world - 1;
  const std::vector<int> two{0, last};
  const auto everywhere = data_parallel().with_kernel(ComputeKernel::kFused);
  switch (plan) {
    case 0:
      return {{"a", table_wise(last)}, {"b", row_wise()}, {"c", column_wise(two)}};
    case 1:
      return {{"a", column_wise({last, 0, last}, {1, 4, 3})}, {"b", everywhere}, {"c", row_wise()}};
    case 2:
      return {{"a", row_wise()}, {"b", table_wise(0)}, {"c", everywhere}};
    default:
      return {{"a", table_row_wise(0)}, {"b", column_wise(two)}, {"c", grid_shard({0, 0})}};
  }
}
constexpr int kNumPlans = 4;

Job make_job(int plan, int world, OptimizerKind kind) {
  Job job;
  job.tables = {tessera::testing::table("a", 13, 8, {"f"}),
                tessera::testing::table("b", 5, 3, {"g", "h"}),
                tessera::testing::table("c", 9, 4, {"f"})};
  job.wishes = wishes_of(plan, world);
  job.batches.assign(static_cast<std::size_t>(world), 3);
  job.options.optimizer.kind = kind;
  job.options.optimizer.learning_rate = 0.05;
  return job;
}

struct Model : torch::nn::Module {
  Model(const Job& job, const comm::Group& group) : job(job) {
    sharding::ShardedOptions options = job.options;
    options.local_size = group.size();
    tables = register_module("tables", std::make_shared<ShardedEmbeddingBagCollection>(
                                           job.tables,
                                           sharding::make_module_plan(job.tables, job.wishes,
                                                                      {group.size(), group.size()}),
                                           group, false, options));
    tables->load_tables(job.initial());
    scale = register_parameter("scale", at::full({2}, 0.5));
  }

  void train(int first_step, int num_steps) {
    const int rank = tables->group().rank();
    for (int step = first_step; step < first_step + num_steps; ++step) {
      const auto output = tables->forward(job.bags(step, rank).kjt(false));
      at::Tensor loss = at::zeros({});
      for (const auto& name : output.keys()) {
        loss = loss + (output[name] * job.coefficients(step, rank, name, output[name])).sum();
      }
      loss.backward();
    }
  }

  Job job;
  std::shared_ptr<ShardedEmbeddingBagCollection> tables;
  at::Tensor scale;
};

std::map<std::string, at::Tensor> everything(const std::string& root, std::int64_t step) {
  const Reader reader(root, step);
  std::map<std::string, at::Tensor> all;
  for (const TensorInfo& info : reader.tensors()) all[info.name] = read_tensor(reader, info);
  return all;
}

void expect_same(const std::map<std::string, at::Tensor>& expected,
                 const std::map<std::string, at::Tensor>& found, const std::string& where) {
  ASSERT_EQ(expected.size(), found.size()) << where;
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name << where;
    EXPECT_TRUE(at::equal(tensor, found.at(name))) << name << where;
  }
}

// The tables that a plan puts on every rank.
std::string everywhere_in(int plan) { return plan == 1 ? "b" : (plan == 2 ? "c" : ""); }

// The same bits, however a table is cut. Where it is on every rank, each first sums the gradients
// of its own samples, so tables that came from there or went there round differently.
void expect_trained(const std::map<std::string, at::Tensor>& expected,
                    const std::map<std::string, at::Tensor>& found, const std::string& rounded,
                    const std::string& where) {
  for (const auto& [name, tensor] : expected) {
    const auto place = name.find("embedding_bags.");
    const bool is_rounded =
        place != std::string::npos && rounded.find(name[place + 15]) != std::string::npos;
    EXPECT_TRUE(is_rounded ? at::allclose(tensor, found.at(name), 1e-4, 1e-6)
                           : at::equal(tensor, found.at(name)))
        << name << where;
  }
}

TEST(Sharded, AnyPlanLoadsAsAnyOtherAtAnyWorld) {
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kRowWiseAdagrad}) {
    const bool is_row_wise = kind == OptimizerKind::kRowWiseAdagrad;
    for (int saved = 1; saved <= 4; ++saved) {
      const int from = (saved + (is_row_wise ? 1 : 0)) % kNumPlans;
      const TemporaryFolder root;
      run_ranks(saved, [&](const comm::Group& group) {
        const auto model = std::make_shared<Model>(make_job(from, saved, kind), group);
        State state;
        add_module(state, model);
        model->train(0, 3);
        save(root.path(), 3, state, group, quiet());
        model->train(3, 2);
        save(root.path(), 5, state, group, quiet());
      });
      const auto at_3 = everything(root.path(), 3);
      const auto at_5 = everything(root.path(), 5);
      for (int loaded = 1; loaded <= 4; ++loaded) {
        run_ranks(loaded, [&](const comm::Group& group) {
          for (int to = 0; to < kNumPlans; ++to) {
            const auto model = std::make_shared<Model>(make_job(to, loaded, kind), group);
            model->train(40, 1);  // to be overwritten
            State state;
            add_module(state, model);
            load(root.path(), state, group, of_step(3));
            for (const auto& optimizer : model->tables->optimizers()) {
              EXPECT_EQ(optimizer->num_steps(), 3);
            }
            save(root.path(), 10 + to, state, group, quiet());
            model->train(3, 2);
            save(root.path(), 20 + to, state, group, quiet());
          }
        });
        for (int to = 0; to < kNumPlans; ++to) {
          const std::string where = ", plan " + std::to_string(from) + " of " +
                                    std::to_string(saved) + " as " + std::to_string(to) + " of " +
                                    std::to_string(loaded);
          const auto after = everything(root.path(), 10 + to);
          const auto later = everything(root.path(), 20 + to);
          if (!is_row_wise || (to == from && loaded == saved)) {
            expect_same(at_3, after, where);
          } else {
            for (const char* name : {"a", "b", "c"}) {
              const std::string key =
                  std::string("model.tables.embedding_bags.") + name + ".weight";
              EXPECT_TRUE(at::equal(at_3.at(key), after.at(key))) << key << where;
            }
          }
          if (loaded == saved && (to == from || !is_row_wise)) {
            expect_trained(at_5, later, to == from ? "" : everywhere_in(from) + everywhere_in(to),
                           " later" + where);
          }
        }
      }
    }
  }
}

TEST(Sharded, LoadsIntoTablesOfOneProcessAndBack) {
  const TemporaryFolder root;
  const Job job = make_job(3, 2, OptimizerKind::kAdam);
  run_ranks(2, [&](const comm::Group& group) {
    const auto model = std::make_shared<Model>(job, group);
    State state;
    add_module(state, model);
    model->train(0, 2);
    save(root.path(), 1, state, group, quiet());
  });
  struct Whole : torch::nn::Module {
    explicit Whole(const Job& job) {
      embedding::TableBatchOptions options;
      options.gradients = embedding::GradientForm::kFused;
      options.optimizer = job.options.optimizer;
      tables = register_module("tables", std::make_shared<embedding::EmbeddingBagCollection>(
                                             job.tables, false, at::kCPU, options));
      scale = register_parameter("scale", at::zeros({2}));
    }
    std::shared_ptr<embedding::EmbeddingBagCollection> tables;
    at::Tensor scale;
  };
  const auto whole = std::make_shared<Whole>(job);
  State state;
  add_module(state, whole);
  load(root.path(), state, std::nullopt, of_step(1));
  save(root.path(), 2, state, std::nullopt, quiet());
  expect_same(everything(root.path(), 1), everything(root.path(), 2), "");
  EXPECT_EQ(whole->tables->batch().optimizer()->num_steps(), 2);
  run_ranks(3, [&](const comm::Group& group) {
    const auto model = std::make_shared<Model>(make_job(1, 3, OptimizerKind::kAdam), group);
    State other;
    add_module(other, model);
    load(root.path(), other, group, of_step(2));
    save(root.path(), 3, other, group, quiet());
  });
  expect_same(everything(root.path(), 1), everything(root.path(), 3), "");
}

TEST(Sharded, DeltasHoldTheRowsThatWereStepped) {
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    const auto model = std::make_shared<Model>(make_job(1, 2, OptimizerKind::kAdam), group);
    State state;
    add_module(state, model);
    for (const auto& optimizer : model->tables->optimizers()) optimizer->track_rows();
    model->train(0, 1);
    save(root.path(), 1, state, group, quiet());
    for (const auto& optimizer : model->tables->optimizers()) optimizer->forget_rows();
    model->train(1, 1);
    SaveOptions options = quiet();
    options.base = 1;
    save(root.path(), 2, state, group, options);
    save(root.path(), 3, state, group, quiet());
  });
  expect_same(everything(root.path(), 3), everything(root.path(), 2), "");
  std::size_t num_deltas = 0;
  const Reader reader(root.path(), 2);
  for (const TensorRecord& tensor : reader.manifest().tensors) {
    if (tensor.name.find("embedding_bags") == std::string::npos) continue;
    EXPECT_NE(tensor.name.find('@'), std::string::npos) << tensor.name << " was written whole";
    ++num_deltas;
  }
  EXPECT_GT(num_deltas, 0U);
}

}  // namespace
}  // namespace tessera::checkpoint::testing
