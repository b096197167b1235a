// What is wrong with a batch, a plan or a call is the same error on all ranks, before ids travel.

#include <gtest/gtest.h>

#include <memory>
#include <string_view>

#include <ATen/record_function.h>

#include "sharding/sharded_tables.h"
#include "support/ranks.h"
#include "tessera/comm/error.h"

namespace tessera::sharding {
namespace {

using embedding::BoundsCheckMode;
using embedding::EmbeddingBagConfig;
using tessera::testing::Bags;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::table;
using tessera::testing::text_of;
using Wishes = std::map<std::string, Placement>;

const std::vector<EmbeddingBagConfig> kTables{table("a", 10, 4, {"f", "g"}), table("b", 6, 2)};
const Wishes kWishes{{"a", row_wise()}, {"b", table_wise(0)}};

std::unique_ptr<ShardedEmbeddingBagCollection> make(const comm::Group& group,
                                                    ShardedOptions options = {},
                                                    bool is_weighted = false,
                                                    const Wishes& wishes = kWishes) {
  options.local_size = group.size();
  return std::make_unique<ShardedEmbeddingBagCollection>(
      kTables, make_module_plan(kTables, wishes, {group.size(), group.size()}), group, is_weighted,
      options);
}

Bags good_bags() {
  return {{"f", "g", "b"}, {{{1, 2}}, {{9}}, {{5}}}, {{{1, 1}}, {{1}}, {{1}}}, {}};
}

// Runs `body` on three ranks; every rank must throw an Error that says `text`.
template <typename Kind>
void expect_on_all(const std::string& text, const std::function<void(const comm::Group&)>& body) {
  const auto errors = run_ranks_collecting(3, body);
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error), text_of(errors[0]));
    EXPECT_NE(text_of(error).find(text), std::string::npos) << text_of(error);
    ASSERT_TRUE(error);
    EXPECT_THROW(std::rethrow_exception(error), Kind);
  }
}

TEST(BagErrors, MissingKey) {
  expect_on_all<c10::ValueError>(
      "sharding.embedding_bag_collection: on rank 1, there is no feature 'g' among the 3 keys",
      [](const comm::Group& group) {
        Bags bags = good_bags();
        if (group.rank() == 1) bags.keys[1] = "other";
        make(group)->forward(bags.kjt(false));
      });
}

TEST(BagErrors, KeyTwice) {
  expect_on_all<c10::ValueError>("on rank 1, the keys must be unique, and 'f' is there twice",
                                 [](const comm::Group& group) {
                                   Bags bags = good_bags();
                                   bags.keys.push_back(group.rank() == 1 ? "f" : "other");
                                   bags.ids.push_back({{3}});
                                   bags.weights.push_back({{1}});
                                   make(group)->forward(bags.kjt(false));
                                 });
}

TEST(BagErrors, IdOutsideItsTable) {
  for (const std::int64_t id : {-1, 6, 1 << 20}) {
    expect_on_all<c10::IndexError>("on rank 2, feature 'b', sample 0 has id " + std::to_string(id) +
                                       ", but table 'b' has 6 rows",
                                   [&](const comm::Group& group) {
                                     Bags bags = good_bags();
                                     if (group.rank() == 2) bags.ids[2][0][0] = id;
                                     make(group)->forward(bags.kjt(false));
                                   });
  }
}

// The job goes on after an error that it survives.
TEST(BagErrors, LeaveTheModuleUsable) {
  run_ranks(3, [](const comm::Group& group) {
    const auto tables = make(group);
    Bags bags = good_bags();
    bags.ids[0][0][0] = group.rank() == 0 ? 10 : 0;
    EXPECT_THROW(tables->forward(bags.kjt(false)), c10::IndexError);
    const auto output = tables->forward(good_bags().kjt(false));
    output.values().sum().backward();
    EXPECT_EQ(output.values().sizes(), (at::IntArrayRef{1, 10}));
  });
}

TEST(BagErrors, OutsideIdsReadRowZeroIfAsked) {
  for (const BoundsCheckMode mode : {BoundsCheckMode::kWarning, BoundsCheckMode::kIgnore}) {
    run_ranks(3, [&](const comm::Group& group) {
      ShardedOptions options;
      options.bounds_check = mode;
      options.optimizer.learning_rate = 1;
      const auto tables =
          make(group, options, false, {{"a", row_wise()}, {"b", column_wise({2, 1})}});
      const std::map<std::string, at::Tensor> initial{
          {"a", at::arange(40, at::kFloat).view({10, 4})},
          {"b", at::arange(12, at::kFloat).view({6, 2})}};
      tables->load_tables(initial);
      Bags bags = good_bags();
      bags.ids = {{{-5, 2}}, {{99}}, {{6}}};
      const auto output = tables->forward(bags.kjt(false));
      EXPECT_TRUE(at::equal(output["f"][0], initial.at("a")[0] + initial.at("a")[2]));
      EXPECT_TRUE(at::equal(output["g"][0], initial.at("a")[0]));
      EXPECT_TRUE(at::equal(output["b"][0], initial.at("b")[0]));
      output.values().sum().backward();
      const auto now = tables->gather_tables();
      EXPECT_TRUE(at::equal(now.at("a")[0], initial.at("a")[0] - 2));
      EXPECT_TRUE(at::equal(now.at("b")[0], initial.at("b")[0] - 1));
    });
  }
}

TEST(BagErrors, MissingWeights) {
  expect_on_all<c10::ValueError>(
      "on rank 0, the collection is weighted, but the features have no weights",
      [](const comm::Group& group) {
        make(group, {}, true)->forward(good_bags().kjt(group.rank() != 0));
      });
}

TEST(BagErrors, IdsThatAreNoIntegers) {
  expect_on_all<c10::TypeError>("on rank 1, the ids are Float", [](const comm::Group& group) {
    make(group)->forward(good_bags().kjt(false, group.rank() == 1 ? at::kFloat : at::kLong));
  });
}

TEST(BagErrors, LengthsThatDoNotFit) {
  expect_on_all<c10::ValueError>(
      "on rank 1, jagged: the lengths add up to 4, but there are 5 values",
      [](const comm::Group& group) {
        const auto features = good_bags().kjt(false);
        jagged::KeyedJaggedFields fields;
        fields.lengths = features.lengths();
        make(group)->forward(
            group.rank() == 1
                ? jagged::KeyedJaggedTensor(features.keys(), at::zeros({5}, at::kLong), fields)
                : features);
      });
  expect_on_all<c10::ValueError>(
      "on rank 0, feature 'g' has a negative length", [](const comm::Group& group) {
        const auto features = good_bags().kjt(false);
        jagged::KeyedJaggedFields fields;
        fields.lengths = group.rank() == 0 ? at::tensor({4, -1, 1}, at::kInt) : features.lengths();
        make(group)->forward(jagged::KeyedJaggedTensor(features.keys(), features.values(), fields));
      });
}

thread_local int num_minima = 0;

// On a GPU the answer of an operator waits for all that was queued before.
TEST(BagErrors, NoOperatorIsAskedForNegativeLengthsInHostMemory) {
  run_ranks(1, [](const comm::Group& group) {
    const auto collection = make(group);
    num_minima = 0;
    const auto counter =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) {
          num_minima += std::string_view(call.name()) == "aten::min" ? 1 : 0;
          return std::unique_ptr<at::ObserverContext>();
        }));
    at::ones({2}).min();
    EXPECT_EQ(num_minima, 1);
    collection->forward(good_bags().kjt(false));
    at::removeCallback(counter);
    EXPECT_EQ(num_minima, 1);
  });
}

TEST(BagErrors, VariableBatchWithoutInverse) {
  expect_on_all<c10::ValueError>(
      "on rank 2, feature 'g' has a batch of 2, feature 'f' of 1. Give inverse indices",
      [](const comm::Group& group) {
        Bags bags = good_bags();
        bags.inverse = {{0}, {0}, {0}};
        auto features = bags.kjt(false);
        if (group.rank() == 2) {
          jagged::KeyedJaggedFields fields;
          fields.lengths = at::tensor({2, 1, 0, 1}, at::kInt);
          fields.stride_per_key_per_rank = at::tensor({1, 2, 1}, at::kLong).unsqueeze(1);
          features = jagged::KeyedJaggedTensor(features.keys(), features.values(), fields);
        }
        make(group)->forward(features);
      });
  expect_on_all<c10::IndexError>(
      "on rank 0, the inverse indices of feature 'b' go from 1 to 1, but it has 1 samples",
      [](const comm::Group& group) {
        Bags bags = good_bags();
        bags.inverse = {{0}, {0}, {group.rank() == 0 ? 1 : 0}};
        make(group)->forward(bags.kjt(false));
      });
}

TEST(BagErrors, RanksThatDoDifferentThings) {
  expect_on_all<comm::Error>(
      "the ranks do different things. Rank 0: sharding.embedding_bag_collection of table 'a'",
      [](const comm::Group& group) {
        const at::AutoGradMode recorded(group.rank() != 1);
        make(group)->forward(good_bags().kjt(false));
      });
  expect_on_all<comm::Error>("ids of Int", [](const comm::Group& group) {
    make(group)->forward(good_bags().kjt(false, group.rank() == 2 ? at::kInt : at::kLong));
  });
}

TEST(BagErrors, RanksWithOtherPlans) {
  expect_on_all<c10::ValueError>("rank 0 has 'b': 6 x 2", [](const comm::Group& group) {
    make(group, {}, false, {{"a", row_wise()}, {"b", table_wise(group.rank() == 2 ? 1 : 0)}});
  });
}

TEST(BagErrors, RanksWithOtherOptions) {
  expect_on_all<c10::ValueError>("rank 0 has options: SGD, fused gradients",
                                 [](const comm::Group& group) {
                                   ShardedOptions options;
                                   if (group.rank() == 1) {
                                     options.gradients = embedding::GradientForm::kSparse;
                                   }
                                   make(group, options);
                                 });
  run_ranks(1, [](const comm::Group& group) {
    ShardedOptions options;
    options.optimizer.kind = embedding::OptimizerKind::kRowWiseAdagrad;
    options.optimizer.stochastic_rounding = true;
    options.exact_row_norms = true;
    EXPECT_THROW(make(group, options, false, {{"a", column_wise({0, 0})}, {"b", table_wise(0)}}),
                 c10::ValueError);
  });
}

TEST(BagErrors, ConfigsAndPlansThatCannotBe) {
  run_ranks(1, [](const comm::Group& group) {
    const auto text = [&](std::vector<EmbeddingBagConfig> tables, const ModulePlan& plan) {
      try {
        ShardedEmbeddingBagCollection made(std::move(tables), plan, group);
      } catch (const c10::Error& error) {
        return std::string(error.what_without_backtrace());
      }
      return std::string();
    };
    const auto plan = make_module_plan(kTables, kWishes, {1, 1});
    EXPECT_NE(text({}, {}).find("there are no tables"), std::string::npos);
    auto none = kTables;
    none[1].pooling = embedding::PoolingType::kNone;
    EXPECT_NE(text(none, plan).find("table 'b' has pooling NONE"), std::string::npos);
    auto bytes = kTables;
    bytes[0].data_type = embedding::DataType::kINT8;
    EXPECT_NE(text(bytes, plan).find("which do not train"), std::string::npos);
    ModulePlan part = plan;
    part.erase("b");
    EXPECT_NE(text(kTables, part).find("'b'"), std::string::npos);
  });
}

TEST(BagErrors, TablesToLoad) {
  run_ranks(1, [](const comm::Group& group) {
    const auto tables = make(group);
    const auto text = [&](const std::map<std::string, at::Tensor>& from) {
      return tessera::testing::text_of([&] {
        try {
          tables->load_tables(from);
        } catch (...) {
          return std::current_exception();
        }
        return std::exception_ptr();
      }());
    };
    EXPECT_NE(text({{"a", at::zeros({10, 4})}}).find("table 'b' is missing"), std::string::npos);
    EXPECT_NE(text({{"a", at::zeros({10, 4})}, {"b", at::zeros({2, 6})}})
                  .find("table 'b' to load has shape [2, 6], it should have [6, 2]"),
              std::string::npos);
  });
}

TEST(BagErrors, StepsThatBackwardTakes) {
  run_ranks(1, [](const comm::Group& group) {
    const auto tables = make(group);
    EXPECT_THROW(tables->step(), c10::ValueError);
    EXPECT_THROW(tables->clip_grad_norm(1), c10::ValueError);
    EXPECT_THROW(static_cast<void>(tables->no_sync()), c10::ValueError);
    ShardedOptions sparse;
    sparse.gradients = embedding::GradientForm::kSparse;
    EXPECT_THROW(make(group, sparse)->clip_grad_norm(-1), c10::ValueError);
  });
}

}  // namespace
}  // namespace tessera::sharding
