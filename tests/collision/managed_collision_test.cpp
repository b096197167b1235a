// The reference's modules of managed collision in C++: traces that torchrec gives, state, and where
// it is wrong the right answer; on one rank and over several.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/collision/managed_collision.h"
#include "tessera/collision/managed_collision_tables.h"
#include "tessera/collision/sharded_managed_collision.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::testing {
namespace {

using collision::DistanceLfuEvictionPolicy;
using collision::LfuEvictionPolicy;
using collision::LruEvictionPolicy;
using collision::ManagedCollisionModules;
using collision::MCHEvictionPolicy;
using collision::MCHManagedCollisionModule;
using collision::MchOptions;
using jagged::KeyedJaggedTensor;
using Numbers = std::vector<std::int64_t>;

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

at::Tensor tensor(const Numbers& numbers) { return at::tensor(numbers, at::kLong); }

Numbers numbers(const at::Tensor& tensor) {
  const at::Tensor own = tensor.to(at::kLong).contiguous();
  return {own.const_data_ptr<std::int64_t>(), own.const_data_ptr<std::int64_t>() + own.numel()};
}

MchOptions options(std::int64_t zch_size, std::shared_ptr<const MCHEvictionPolicy> policy,
                   std::int64_t interval = 1) {
  MchOptions made;
  made.zch_size = zch_size;
  made.eviction_policy = std::move(policy);
  made.eviction_interval = interval;
  return made;
}

std::shared_ptr<MCHManagedCollisionModule> lfu_ids(std::int64_t zch_size,
                                                   std::int64_t interval = 1) {
  return std::make_shared<MCHManagedCollisionModule>(
      options(zch_size, std::make_shared<LfuEvictionPolicy>(), interval));
}

/// Features of one sample per list.
KeyedJaggedTensor features(const std::vector<std::string>& keys,
                           const std::vector<std::vector<Numbers>>& bags) {
  Numbers ids;
  std::vector<std::int32_t> lengths;
  for (const auto& feature : bags) {
    for (const Numbers& bag : feature) {
      ids.insert(ids.end(), bag.begin(), bag.end());
      lengths.push_back(static_cast<std::int32_t>(bag.size()));
    }
  }
  jagged::KeyedJaggedFields fields;
  fields.lengths = at::tensor(lengths, at::kInt);
  fields.stride = static_cast<std::int64_t>(bags.front().size());
  return {keys, tensor(ids), fields};
}

embedding::EmbeddingTableConfig table(const std::string& name, std::int64_t rows,
                                      std::vector<std::string> feature_names) {
  embedding::EmbeddingTableConfig config;
  config.name = name;
  config.num_embeddings = rows;
  config.embedding_dim = 2;
  config.feature_names = std::move(feature_names);
  config.init_fn = [](at::Tensor weight) { weight.fill_(1.0); };
  return config;
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

// ---- one module

struct Trace {
  std::shared_ptr<const MCHEvictionPolicy> policy;
  std::vector<Numbers> rows, gone;  // of the second, third and fourth call
  Numbers seen;
};

TEST(ManagedCollision, ThePoliciesTraces) {
  // By hand from the formulas: the best scores stay, of equal ones the present id.
  const Trace traces[] = {{std::make_shared<LfuEvictionPolicy>(),
                           {{0, 0, 0, 3, 3}, {2, 2, 2, 2}, {3}},
                           {{0}, {2}, {}},
                           {1, 2, 3}},
                          {std::make_shared<LruEvictionPolicy>(),
                           {{1, 1, 1, 2, 0}, {0, 0, 0, 0}, {2}},
                           {{1, 2, 0}, {}, {2}},
                           {3, 0, 3}},
                          {std::make_shared<DistanceLfuEvictionPolicy>(),
                           {{2, 2, 2, 0, 3}, {0, 0, 0, 0}, {1}},
                           {{2, 0}, {0}, {1}},
                           {3, 0, 3}}};
  const std::vector<Numbers> batches{{12, 12, 12, 13, 14}, {14, 14, 14, 14}, {15}};
  for (const Trace& trace : traces) {
    MCHManagedCollisionModule ids(options(4, trace.policy));
    const auto call = [&](const Numbers& given) { return numbers(ids.forward(tensor(given))); };
    EXPECT_FALSE(ids.evict());
    EXPECT_EQ(call({10, 10, 11}), (Numbers{1, 1, 2}));
    EXPECT_EQ(numbers(*ids.evict()), (Numbers{1, 2}));
    EXPECT_EQ(ids.open_slots(), 1);
    for (std::size_t step = 0; step < batches.size(); ++step) {
      EXPECT_EQ(call(batches[step]), trace.rows[step]);
      EXPECT_EQ(numbers(*ids.evict()), trace.gone[step]);
      EXPECT_FALSE(ids.evict());
      EXPECT_EQ(ids.open_slots(), 0);
    }
    ids.eval();
    const auto before = ids.state_dict();
    EXPECT_EQ(call({10, 14, 99}), trace.seen);
    for (const auto& [name, value] : ids.state_dict()) {
      EXPECT_TRUE(value.equal(before.at(name))) << name;
    }
  }
}

TEST(ManagedCollision, AnIntervalOfThreeAdmitsInTheThirdCall) {
  const auto ids = lfu_ids(8, 3);
  EXPECT_EQ(numbers(ids->forward(tensor({5, 6}))), (Numbers{7, 7}));
  EXPECT_EQ(numbers(ids->forward(tensor({5, 6, 7}))), (Numbers{7, 7, 7}));
  const Numbers third = numbers(ids->forward(tensor({5, 6, 7})));
  EXPECT_EQ(std::set<std::int64_t>(third.begin(), third.end()).size(), 3U);
  for (const std::int64_t row : third) EXPECT_LT(row, 7);
}

TEST(ManagedCollision, AnEmptyFirstBatchAndALargerSecondOneLoseNothing) {
  const auto ids = lfu_ids(32, 2);
  ids->forward(tensor({}));
  Numbers many(20);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = 100 + static_cast<std::int64_t>(i);
  for (const std::int64_t row : numbers(ids->forward(tensor(many)))) EXPECT_LT(row, 31);
  EXPECT_EQ(ids->open_slots(), 31 - 20);
}

TEST(ManagedCollision, TheLargestIdIsAnId) {
  const auto ids = lfu_ids(4);
  const Numbers first = numbers(ids->forward(tensor({kLargest, 3})));
  EXPECT_EQ(numbers(ids->forward(tensor({kLargest, 3}))), first);
  EXPECT_EQ(ids->open_slots(), 1);
  const auto again = lfu_ids(4);
  again->load_state_dict(ids->state_dict());
  EXPECT_EQ(again->open_slots(), 1);
  again->eval();
  EXPECT_EQ(numbers(again->forward(tensor({kLargest, 3, 4}))), (Numbers{first[0], first[1], 3}));
}

TEST(ManagedCollision, FiltersSeeTheCounts) {
  const at::Tensor counts = tensor({1, 2, 27});
  EXPECT_EQ(numbers(collision::dynamic_threshold_filter(counts, 2.0).first), (Numbers{0, 0, 1}));
  EXPECT_EQ(collision::dynamic_threshold_filter(counts, 2.0).second.item<float>(), 20);
  EXPECT_EQ(numbers(collision::average_threshold_filter(counts).first), (Numbers{0, 0, 1}));
  EXPECT_EQ(collision::average_threshold_filter(counts).second.item<float>(), 10);
  EXPECT_EQ(numbers(collision::probabilistic_threshold_filter(counts, 1.0).first),
            (Numbers{1, 1, 1}));
  EXPECT_EQ(numbers(collision::probabilistic_threshold_filter(counts, 0.0).first),
            (Numbers{0, 0, 0}));
  MCHManagedCollisionModule ids(
      options(4, std::make_shared<LfuEvictionPolicy>(collision::average_threshold_filter)));
  EXPECT_EQ(numbers(ids.forward(tensor({1, 2, 2, 2}))), (Numbers{3, 2, 2, 2}));
}

TEST(ManagedCollision, AResumedRunGoesOnToTheSameBits) {
  const std::shared_ptr<const MCHEvictionPolicy> policies[] = {
      std::make_shared<LfuEvictionPolicy>(), std::make_shared<LruEvictionPolicy>(2.0),
      std::make_shared<DistanceLfuEvictionPolicy>(0.5)};
  for (const auto& policy : policies) {
    MCHManagedCollisionModule straight(options(6, policy, 3));
    MCHManagedCollisionModule saved(options(6, policy, 3));
    MCHManagedCollisionModule resumed(options(6, policy, 3));
    for (std::int64_t step = 0; step < 12; ++step) {
      const at::Tensor ids = at::arange(step, step + 4) * 7 % 13;
      const Numbers wanted = numbers(straight.forward(ids));
      if (step < 5) {
        EXPECT_EQ(numbers(saved.forward(ids)), wanted);
        if (step == 4) resumed.load_state_dict(saved.state_dict());  // two calls wait
      } else {
        EXPECT_EQ(numbers(resumed.forward(ids)), wanted) << step;
      }
    }
    for (const auto& [name, value] : straight.state_dict()) {
      EXPECT_TRUE(value.equal(resumed.state_dict().at(name))) << name;
    }
  }
}

TEST(ManagedCollision, BuffersLoadedFromOutsideAreNoticed) {
  const auto trained = lfu_ids(5);
  const Numbers wanted = numbers(trained->forward(tensor({40, 41})));
  const auto other = lfu_ids(5);
  other->eval();
  EXPECT_EQ(numbers(other->forward(tensor({40, 41}))), (Numbers{4, 4}));
  for (const auto& buffer : trained->named_buffers()) {  // as a checkpoint is loaded
    other->named_buffers()[buffer.key()].copy_(buffer.value());
  }
  EXPECT_EQ(numbers(other->forward(tensor({40, 41}))), wanted);
  EXPECT_EQ(other->open_slots(), 2);
}

TEST(ManagedCollision, SavedShardsAreMergedAtTheirBoundsOnly) {
  MchOptions half = options(4, std::make_shared<LfuEvictionPolicy>());
  half.output_segments = {0, 4, 8};
  MCHManagedCollisionModule first(half);
  first.forward(tensor({7, 8}));
  MchOptions wrong = half;
  wrong.output_global_offset = 2;
  wrong.output_segments = {2, 6};
  MCHManagedCollisionModule other(wrong);
  const auto before = other.state_dict();
  expect_parts(refusal([&] { other.load_state_dict(first.state_dict()); }),
               {"rows 2 to 5", "0, 4, 8"});
  for (const auto& [name, value] : other.state_dict()) EXPECT_TRUE(value.equal(before.at(name)));
  auto short_of = first.state_dict();
  short_of.erase("_mch_counts");
  expect_parts(refusal([&] { first.load_state_dict(short_of); }), {"has no _mch_counts"});
}

TEST(ManagedCollision, WhatCannotBeIsSaid) {
  const auto policy = std::make_shared<LfuEvictionPolicy>();
  expect_parts(refusal([&] { MCHManagedCollisionModule(options(0, policy)); }),
               {"zch_size 0", "at least 1"});
  expect_parts(refusal([&] { MCHManagedCollisionModule(options(4, policy, 0)); }),
               {"eviction_interval 0"});
  expect_parts(refusal([&] { MCHManagedCollisionModule(options(4, nullptr)); }), {"no policy"});
  MchOptions many = options(4, policy);
  many.output_segments.resize(1026);
  expect_parts(refusal([&] { MCHManagedCollisionModule{many}; }), {"1024 shards; 1025 given"});
  MchOptions bounded = options(4, policy);
  bounded.input_hash_size = 10;
  bounded.name = "user";
  expect_parts(refusal([&] { MCHManagedCollisionModule(bounded).forward(tensor({3, 5000})); }),
               {"id 5000 at position 1 of 'user'", "0 to 9"});
  bounded.folds_out_of_range = true;
  const Numbers folded = numbers(MCHManagedCollisionModule(bounded).preprocess(tensor({3, -3})));
  EXPECT_EQ(folded[0], 3);
  EXPECT_TRUE(0 <= folded[1] && folded[1] < 10);
  bounded.input_hash_func = [](const at::Tensor& ids, std::int64_t size) { return ids % size; };
  EXPECT_EQ(numbers(MCHManagedCollisionModule(bounded).preprocess(tensor({3, 5003}))),
            (Numbers{3, 3}));
}

// ---- collections

TEST(ManagedCollision, ModulesBelongToTablesByName) {
  const auto a = lfu_ids(4);
  const auto b = lfu_ids(8);
  collision::ManagedCollisionCollection ids({{"b", b}, {"a", a}},
                                            {table("a", 4, {"f"}), table("b", 8, {"g"})});
  const auto mapped = ids.forward(features({"g", "f"}, {{{70, 71}, {}}, {{5}, {5, 6}}}));
  EXPECT_EQ(mapped.keys(), (std::vector<std::string>{"f", "g"}));
  EXPECT_EQ(a->open_slots(), 1);
  EXPECT_EQ(b->open_slots(), 5);
  EXPECT_EQ(numbers(mapped["f"].lengths()), (Numbers{1, 2}));
  EXPECT_EQ(numbers(mapped["f"].values()), (Numbers{1, 1, 2}));
  EXPECT_EQ(numbers(mapped["g"].lengths()), (Numbers{2, 0}));
  EXPECT_EQ(ids.open_slots(), (std::map<std::string, std::int64_t>{{"a", 1}, {"b", 5}}));
  expect_parts(refusal([&] { ids.forward(features({"f"}, {{{1}}})); }), {"'g'", "table 'b'"});
  expect_parts(
      refusal([&] { collision::ManagedCollisionCollection({{"a", a}}, {table("c", 4, {"f"})}); }),
      {"table 'c' has no managed collision module"});
  expect_parts(
      refusal([&] { collision::ManagedCollisionCollection({{"a", a}}, {table("a", 5, {"f"})}); }),
      {"'a' has 4 rows; the table has 5"});
}

embedding::TableBatchOptions fused() {
  embedding::TableBatchOptions options;
  options.gradients = embedding::GradientForm::kFused;
  options.optimizer.kind = embedding::OptimizerKind::kRowWiseAdagrad;
  options.optimizer.learning_rate = 0.5;
  options.optimizer.initial_accumulator = 0.25;
  return options;
}

TEST(ManagedCollision, ANewIdBeginsWithANewRowAndState) {
  const auto ids = std::make_shared<MCHManagedCollisionModule>(
      options(3, std::make_shared<LruEvictionPolicy>()));
  collision::ManagedCollisionEmbeddingBagCollection module(
      {table("t", 3, {"f"})}, {{"t", ids}}, /*return_remapped_features=*/true, false, fused());
  const auto call = [&](const Numbers& given) {
    return module.forward(features({"f"}, {{given}}));
  };
  for (int step = 0; step < 3; ++step) call({7, 8}).first.values().sum().backward();
  const auto [learned, rows] = call({7, 8});
  EXPECT_LT(learned.values()[0][0].item<float>(), 2.0F);
  EXPECT_EQ(rows->keys(), std::vector<std::string>{"f"});
  call({9, 10});  // both of them go
  const auto [fresh, new_rows] = call({9, 10});
  EXPECT_EQ(fresh.values()[0][0].item<float>(), 2.0F);  // the sum of two rows of ones
  const auto state = module.tables()->batch().optimizer()->state_dict().at("t.momentum1");
  for (const std::int64_t row : numbers(new_rows->values())) {
    EXPECT_EQ(state[row].item<float>(), 0.25F);
  }
  std::set<std::string> names;
  for (const auto& one : module.named_buffers()) names.insert(one.key());
  for (const auto& one : module.named_parameters()) names.insert(one.key());
  const std::string prefix = "_managed_collision_collection._managed_collision_modules.t.";
  EXPECT_EQ(names,
            (std::set<std::string>{
                prefix + "_mch_sorted_raw_ids", prefix + "_mch_remapped_ids_mapping",
                prefix + "_mch_last_access_iter", prefix + "_output_segments_tensor",
                prefix + "_current_iter_tensor", "_embedding_module.embedding_bags.t.weight"}));
}

TEST(ManagedCollision, AFeatureOfTwoTablesHasARowInEach) {
  const auto a = lfu_ids(4);
  const auto b = lfu_ids(6);
  collision::ManagedCollisionEmbeddingCollection module(
      {table("a", 4, {"f"}), table("b", 6, {"f"})}, {{"a", a}, {"b", b}}, true);
  const auto [rows, mapped] = module.forward(features({"f"}, {{{50, 51}, {50}}}));
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].first, "f@a");
  EXPECT_EQ(rows[1].first, "f@b");
  EXPECT_EQ(rows[1].second.values().size(0), 3);
  EXPECT_EQ(mapped->keys(), (std::vector<std::string>{"f@a", "f@b"}));
  EXPECT_EQ(a->open_slots(), 1);
  EXPECT_EQ(b->open_slots(), 3);
}

// ---- over ranks

sharding::ModulePlan plan_of(const std::vector<embedding::EmbeddingTableConfig>& tables,
                             const std::map<std::string, sharding::Placement>& wishes, int world) {
  return sharding::make_module_plan(tables, wishes, {.world_size = world, .local_size = world});
}

TEST(ShardedManagedCollision, EveryIdHasOneRowOnAnyNumberOfRanks) {
  for (const int world : {1, 2, 3}) {
    std::mutex mutex;
    std::map<std::int64_t, std::set<std::int64_t>> rows_of;  // of row-wise "a"
    run_ranks(world, [&](const comm::Group& group) {
      const std::vector<embedding::EmbeddingTableConfig> tables{table("a", 61, {"f"}),
                                                                table("b", 9, {"g"})};
      const auto plan = plan_of(
          tables, {{"a", sharding::row_wise()}, {"b", sharding::table_wise(world - 1)}}, world);
      collision::ShardedManagedCollisionCollection ids({{"a", lfu_ids(61)}, {"b", lfu_ids(9)}},
                                                       tables, plan, group);
      EXPECT_EQ(ids.part("b") != nullptr, group.rank() == world - 1);
      for (std::int64_t step = 0; step < 4; ++step) {
        const std::int64_t first = 3 * group.rank() + step;
        const auto mapped = ids.forward(
            features({"f", "g"}, {{{first, first + 1, first}, {}}, {{-group.rank() - 1}, {8}}}));
        EXPECT_EQ(mapped.keys(), (std::vector<std::string>{"f", "g"}));
        const Numbers rows = numbers(mapped["f"].values());
        ASSERT_EQ(rows.size(), 3U);
        EXPECT_EQ(rows[0], rows[2]);
        const std::lock_guard lock(mutex);
        rows_of[first].insert(rows[0]);
        rows_of[first + 1].insert(rows[1]);
        EXPECT_NE(numbers(mapped["g"].values())[0], numbers(mapped["g"].values())[1]);
      }
      // Counts are those of all ranks together.
      if (ids.part("b") == nullptr) return;
      const auto state = ids.part("b")->state_dict();
      const Numbers known = numbers(state.at("_mch_sorted_raw_ids"));
      const auto place = std::find(known.begin(), known.end(), 8) - known.begin();
      EXPECT_EQ(numbers(state.at("_mch_counts"))[static_cast<std::size_t>(place)], 4 * world);
    });
    std::set<std::int64_t> used;
    for (const auto& [id, rows] : rows_of) {
      EXPECT_EQ(rows.size(), 1U) << id;
      EXPECT_LT(*rows.begin(), 60);
      EXPECT_TRUE(used.insert(*rows.begin()).second) << id;
    }
  }
}

// Each part has a last row of its own; unknown ids of all parts have that of the whole table.
TEST(ShardedManagedCollision, UnknownIdsOfEveryRankHaveTheTablesLastRow) {
  for (const int world : {2, 3}) {
    run_ranks(world, [&](const comm::Group& group) {
      const std::vector<embedding::EmbeddingTableConfig> tables{table("a", 61, {"f"})};
      collision::ShardedManagedCollisionCollection ids(
          {{"a", lfu_ids(61, 2)}}, tables, plan_of(tables, {{"a", sharding::row_wise()}}, world),
          group);
      Numbers many(64);
      std::set<std::int64_t> owners;
      for (std::size_t i = 0; i < many.size(); ++i) many[i] = 1000 + static_cast<std::int64_t>(i);
      for (const std::int64_t owner : numbers(ids.owners("a", tensor(many)))) owners.insert(owner);
      ASSERT_EQ(owners.size(), static_cast<std::size_t>(world));
      const auto rows = [&](const Numbers& given) {
        return numbers(ids.forward(features({"f"}, {{given}}))["f"].values());
      };
      const Numbers unknown(many.size(), 60);
      EXPECT_EQ(rows(many), unknown);  // the interval is not over
      const Numbers few{1, 2, 3, 4, 5, 6};
      const Numbers known = rows(few);
      ids.eval();
      EXPECT_EQ(rows(many) == unknown, false);  // some were admitted with them
      Numbers others(many);
      for (std::int64_t& id : others) id = -id;
      EXPECT_EQ(rows(others), unknown);
      EXPECT_EQ(rows(few), known);
    });
  }
}

TEST(ShardedManagedCollision, RowsThatChangeHandsBeginAnewWhereTheyLie) {
  for (const auto& wish : {sharding::table_wise(1), sharding::row_wise({2, 2}),
                           sharding::column_wise({1, 0}), sharding::column_wise({0, 1})}) {
    run_ranks(2, [&](const comm::Group& group) {
      sharding::set_gradient_division(false);
      const std::vector<embedding::EmbeddingTableConfig> tables{table("t", 4, {"f"})};
      const auto ids = std::make_shared<MCHManagedCollisionModule>(
          options(4, std::make_shared<LruEvictionPolicy>()));
      sharding::ShardedOptions stepped;
      stepped.optimizer = fused().optimizer;
      collision::ShardedManagedCollisionEmbeddingBagCollection module(
          tables, {{"t", ids}}, plan_of(tables, {{"t", wish}}, 2), group, true, false, stepped);
      const auto call = [&](std::int64_t id) { return module.forward(features({"f"}, {{{id}}})); };
      float before = 1.0F;
      for (int step = 0; step < 3; ++step) {
        const auto [pooled, mapped] = call(7);
        before = pooled.values()[0][0].item<float>();
        pooled.values().sum().backward();
      }
      EXPECT_LT(before, 1.0F);
      // New ids in every call: each part of the table gives up what it had.
      for (std::int64_t id = 100; id < 140; id += 2) call(id + group.rank());
      const auto [pooled, mapped] = call(7);
      EXPECT_TRUE(pooled.values().eq(1.0F).all().item<bool>()) << pooled.values();
      EXPECT_EQ(mapped->keys(), std::vector<std::string>{"f"});
    });
  }
}

// The rank with the first columns of a row owns its id, and tells the others what it gave away.
TEST(ShardedManagedCollision, ColumnsAreCutAsWholeRowsAre) {
  std::map<std::string, std::vector<at::Tensor>> found;  // by cut, of rank 0, step by step
  const std::vector<std::pair<std::string, sharding::Placement>> cuts{
      {"whole", sharding::table_wise(0)},
      {"columns", sharding::column_wise({3, 1})},
      {"columns of a host", sharding::table_column_wise({1, 0})}};
  for (const auto& [name, wish] : cuts) {
    run_ranks(4, [&, cut = name, placed = wish](const comm::Group& group) {
      sharding::set_gradient_division(false);
      const std::vector<embedding::EmbeddingTableConfig> tables{table("t", 8, {"f"})};
      const auto ids = std::make_shared<MCHManagedCollisionModule>(
          options(8, std::make_shared<LruEvictionPolicy>()));
      sharding::ShardedOptions stepped;
      stepped.optimizer = fused().optimizer;
      collision::ShardedManagedCollisionEmbeddingBagCollection module(
          tables, {{"t", ids}}, plan_of(tables, {{"t", placed}}, 4), group, true, false, stepped);
      for (std::int64_t step = 0; step < 12; ++step) {
        const std::int64_t first = 2 * group.rank() + 5 * step;
        const auto [pooled, mapped] =
            module.forward(features({"f"}, {{{first, first % 7}, {first + 1}}}));
        pooled.values().sum().backward();
        if (group.rank() != 0) continue;
        found[cut].push_back(pooled.values().detach().clone());
        found[cut].push_back(mapped->values().to(at::kFloat));
      }
    });
  }
  for (const auto& [name, steps] : found) {
    ASSERT_EQ(steps.size(), found["whole"].size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_TRUE(at::equal(steps[i], found["whole"][i])) << name << ", " << i;
    }
  }
  EXPECT_FALSE(found["whole"][2].eq(2.0F).all().item<bool>());
}

// Rows over the ranks of a host, columns over hosts: each run of rows has its own owner.
TEST(ShardedManagedCollision, AGridDealsIdsByItsRows) {
  run_ranks(4, [&](const comm::Group& group) {
    const std::vector<embedding::EmbeddingTableConfig> tables{table("t", 64, {"f"})};
    sharding::ShardedOptions stepped;
    stepped.optimizer = fused().optimizer;
    stepped.local_size = 2;
    const auto plan = sharding::make_module_plan(tables, {{"t", sharding::grid_shard({1, 0})}},
                                                 {.world_size = 4, .local_size = 2});
    collision::ShardedManagedCollisionEmbeddingBagCollection module(
        tables, {{"t", lfu_ids(64)}}, plan, group, true, false, stepped);
    EXPECT_EQ(module.ids()->part("t") != nullptr, group.rank() >= 2);
    std::map<std::int64_t, std::int64_t> row_of;
    for (int step = 0; step < 3; ++step) {
      const auto [pooled, mapped] = module.forward(features({"f"}, {{{1, 2, 3}, {4, 5, 6}}}));
      const Numbers rows = numbers(mapped->values());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto id = static_cast<std::int64_t>(i);
        EXPECT_EQ(row_of.try_emplace(id, rows[i]).first->second, rows[i]);
      }
      EXPECT_EQ(std::set<std::int64_t>(rows.begin(), rows.end()).size(), 6U);
      pooled.values().sum().backward();
    }
  });
}

TEST(ShardedManagedCollision, RowsOfSingleIds) {
  run_ranks(2, [&](const comm::Group& group) {
    const std::vector<embedding::EmbeddingTableConfig> tables{table("t", 16, {"f"})};
    collision::ShardedManagedCollisionEmbeddingCollection module(
        tables, {{"t", lfu_ids(16)}}, plan_of(tables, {{"t", sharding::row_wise()}}, 2), group);
    const auto [rows, mapped] = module.forward(features({"f"}, {{{1, 2}, {3}}}));
    ASSERT_EQ(rows.size(), 1U);
    EXPECT_EQ(rows[0].second.values().sizes(), (std::vector<std::int64_t>{3, 2}));
    EXPECT_FALSE(mapped);
  });
}

TEST(ShardedManagedCollision, ABadBatchOfOneRankIsAnErrorOnAll) {
  const auto errors = run_ranks_collecting(3, [&](const comm::Group& group) {
    MchOptions bounded = options(12, std::make_shared<LfuEvictionPolicy>());
    bounded.input_hash_size = 100;
    const std::vector<embedding::EmbeddingTableConfig> tables{table("t", 12, {"f"})};
    collision::ShardedManagedCollisionCollection ids(
        {{"t", std::make_shared<MCHManagedCollisionModule>(bounded)}}, tables,
        plan_of(tables, {{"t", sharding::row_wise()}}, 3), group);
    ids.forward(features({"f"}, {{{group.rank() == 1 ? 500 : 5}}}));
  });
  for (const auto& error : errors) expect_parts(text_of(error), {"id 500 at position 0 of 't'"});
}

TEST(ShardedManagedCollision, WhatCannotBeShardedIsSaid) {
  run_ranks(2, [&](const comm::Group& group) {
    const std::vector<embedding::EmbeddingTableConfig> tables{table("t", 12, {"f"})};
    const auto make = [&](const std::shared_ptr<MCHManagedCollisionModule>& own,
                          const sharding::ModulePlan& plan) {
      return refusal(
          [&] { collision::ShardedManagedCollisionCollection({{"t", own}}, tables, plan, group); });
    };
    expect_parts(make(lfu_ids(12), plan_of(tables, {{"t", sharding::data_parallel()}}, 2)),
                 {"'t' is to lie data_parallel", "by table, rows or columns"});
    expect_parts(make(lfu_ids(12), {}), {"no table 't'"});
    const auto trained = lfu_ids(12);
    trained->forward(tensor({4, 5}));
    expect_parts(make(trained, plan_of(tables, {{"t", sharding::row_wise()}}, 2)),
                 {"has 2 ids already"});
    EXPECT_EQ(make(trained, plan_of(tables, {{"t", sharding::table_wise(0)}}, 2)), "");
  });
}

}  // namespace
}  // namespace tessera::testing
