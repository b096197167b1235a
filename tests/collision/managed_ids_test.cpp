// Ids of tables of a fixed size, saved with their tables by some ranks and loaded by others.

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <mutex>

#include <torch/nn/modules/linear.h>

#include "checkpoint/quiet.h"
#include "support/ranks.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/save.h"
#include "tessera/collision/sharded_managed_collision.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::testing {
namespace {

using checkpoint::State;
using checkpoint::testing::quiet;
using checkpoint::testing::quiet_load;
using collision::LfuEvictionPolicy;
using collision::LruEvictionPolicy;
using collision::ManagedCollisionEmbeddingBagCollection;
using collision::MCHManagedCollisionModule;
using collision::ShardedManagedCollisionEmbeddingBagCollection;
using Numbers = std::vector<std::int64_t>;

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kSamples = 12;  // of all ranks, a step
constexpr const char* kBuffers[] = {"_mch_sorted_raw_ids", "_mch_remapped_ids_mapping",
                                    "_mch_counts", "_mch_last_access_iter"};

class SavedIds : public ::testing::Test {
 protected:
  SavedIds() {
    std::string path = (std::filesystem::temp_directory_path() / "ids-XXXXXX").string();
    root = mkdtemp(path.data());
  }
  ~SavedIds() override { std::filesystem::remove_all(root); }
  std::string root;
};

std::vector<embedding::EmbeddingTableConfig> two_tables() {
  std::vector<embedding::EmbeddingTableConfig> tables(2);
  for (std::size_t t = 0; t < 2; ++t) {
    tables[t].name = t == 0 ? "a" : "b";
    tables[t].num_embeddings = t == 0 ? 64 : 16;
    tables[t].embedding_dim = 2;
    tables[t].feature_names = {t == 0 ? "f" : "g"};
    tables[t].init_fn = [](at::Tensor weight) { weight.fill_(1.0); };
  }
  return tables;
}

collision::MchOptions lfu(std::int64_t rows) {
  collision::MchOptions options;
  options.zch_size = rows;
  options.eviction_policy = std::make_shared<LfuEvictionPolicy>();
  options.eviction_interval = 3;
  return options;
}

collision::ManagedCollisionModules two_modules() {
  auto second = lfu(16);
  second.eviction_policy = std::make_shared<LruEvictionPolicy>();
  return {{"a", std::make_shared<MCHManagedCollisionModule>(lfu(64))},
          {"b", std::make_shared<MCHManagedCollisionModule>(second)}};
}

embedding::OptimizerOptions adagrad() {
  embedding::OptimizerOptions options;
  options.kind = embedding::OptimizerKind::kRowWiseAdagrad;
  options.learning_rate = 0.1;
  return options;
}

/// Tables behind managed collision, and something that every rank holds.
template <class Tables>
struct Model : torch::nn::Module {
  explicit Model(std::shared_ptr<Tables> given)
      : tables(register_module("tables", std::move(given))),
        dense(register_module("dense", torch::nn::Linear(3, 5))) {
    const at::NoGradGuard no_grad;
    dense->weight.zero_();
    dense->bias.zero_();
  }
  std::shared_ptr<Tables> tables;
  torch::nn::Linear dense;
};
using Sharded = Model<ShardedManagedCollisionEmbeddingBagCollection>;
using Whole = Model<ManagedCollisionEmbeddingBagCollection>;

std::shared_ptr<Sharded> sharded(const comm::Group& group) {
  const int world = group.size();
  sharding::set_gradient_division(false);
  sharding::ShardedOptions options;
  options.optimizer = adagrad();
  const auto tables = two_tables();
  const auto plan = sharding::make_module_plan(
      tables, {{"a", sharding::row_wise()}, {"b", sharding::table_wise(world - 1)}},
      {.world_size = world, .local_size = world});
  return std::make_shared<Sharded>(std::make_shared<ShardedManagedCollisionEmbeddingBagCollection>(
      tables, two_modules(), plan, group, /*return_remapped_features=*/true, false, options));
}

std::shared_ptr<Whole> whole() {
  embedding::TableBatchOptions options;
  options.gradients = embedding::GradientForm::kFused;
  options.optimizer = adagrad();
  return std::make_shared<Whole>(std::make_shared<ManagedCollisionEmbeddingBagCollection>(
      two_tables(), two_modules(), /*return_remapped_features=*/true, false, options));
}

/// The samples of one rank: a few ids often, others seldom, and the largest of all.
jagged::KeyedJaggedTensor samples(std::int64_t step, std::int64_t rank, std::int64_t world) {
  const std::int64_t begin = kSamples * rank / world;
  const std::int64_t end = kSamples * (rank + 1) / world;
  Numbers ids;
  for (std::int64_t s = begin; s < end; ++s) {
    ids.insert(ids.end(), {(5 * step + 3 * s) % 40 * 1'000'003, s % 4 == 0 ? kLargest : s - 7});
  }
  for (std::int64_t s = begin; s < end; ++s) ids.push_back((step + s) % 19 - 30);
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(end - begin), 2);
  lengths.resize(2 * lengths.size(), 1);
  jagged::KeyedJaggedFields fields;
  fields.lengths = at::tensor(lengths, at::kInt);
  fields.stride = end - begin;
  return {{"f", "g"}, at::tensor(ids, at::kLong), fields};
}

/// What the model makes of the samples, and which rows they have.
template <class OfModel>
std::vector<at::Tensor> call(OfModel& model, const jagged::KeyedJaggedTensor& features) {
  const auto [pooled, mapped] = model.tables->forward(features);
  if (model.is_training()) pooled.values().sum().backward();
  return {pooled.values().detach().clone(), (*mapped)["f"].values(), (*mapped)["g"].values()};
}

TEST_F(SavedIds, ARunThatGoesOnHasTheSameBits) {
  for (const int world : {1, 2, 3}) {
    const std::string folder = root + "/" + std::to_string(world);
    run_ranks(world, [&](const comm::Group& group) {
      const auto straight = sharded(group);
      const auto saved = sharded(group);
      const auto resumed = sharded(group);
      {
        const at::NoGradGuard no_grad;
        saved->dense->weight.fill_(7.0);
        saved->dense->bias.fill_(8.0);
      }
      for (std::int64_t step = 0; step < 12; ++step) {
        const auto features = samples(step, group.rank(), world);
        const auto wanted = call(*straight, features);
        if (step < 5) call(*saved, features);
        if (step == 4) {  // two calls wait
          State from;
          State to;
          checkpoint::add_module(from, saved);
          checkpoint::add_module(to, resumed);
          checkpoint::save(folder, 1, from, group, quiet());
          checkpoint::load(folder, to, group, quiet_load());
        }
        if (step < 5) continue;
        const auto found = call(*resumed, features);
        for (std::size_t i = 0; i < wanted.size(); ++i) {
          EXPECT_TRUE(at::equal(found[i], wanted[i])) << world << ", " << step << ", " << i;
        }
      }
      EXPECT_TRUE(resumed->dense->weight.eq(7.0).all().item<bool>());
      EXPECT_TRUE(resumed->dense->bias.eq(8.0).all().item<bool>());
      for (const char* table : {"a", "b"}) {
        const auto part = straight->tables->ids()->part(table);
        if (part == nullptr) continue;
        const auto state = resumed->tables->ids()->part(table)->state_dict();
        for (const auto& [name, value] : part->state_dict()) {
          EXPECT_TRUE(at::equal(state.at(name), value)) << world << table << name;
        }
      }
    });
  }
}

/// Outputs and rows of all samples, in their order.
using Seen = std::map<int, std::vector<at::Tensor>>;
void expect_same(const Seen& found, const Seen& wanted) {
  for (std::size_t i = 0; i < 3; ++i) {
    std::vector<at::Tensor> one;
    std::vector<at::Tensor> other;
    for (const auto& [rank, tensors] : found) one.push_back(tensors[i]);
    for (const auto& [rank, tensors] : wanted) other.push_back(tensors[i]);
    EXPECT_TRUE(at::equal(at::cat(one), at::cat(other))) << i;
  }
}

TEST_F(SavedIds, PartsArePutTogetherOnFewerRanks) {
  Seen wanted;
  std::mutex mutex;
  std::int64_t num_ids = 0;
  std::int64_t num_waiting = 0;
  const auto probe = [&](auto& model, int rank, int world) {
    model.eval();
    auto found = call(model, samples(3, rank, world));
    const std::lock_guard lock(mutex);
    return found;
  };
  run_ranks(4, [&](const comm::Group& group) {
    const auto model = sharded(group);
    for (std::int64_t step = 0; step < 7; ++step) call(*model, samples(step, group.rank(), 4));
    State state;
    checkpoint::add_module(state, model);
    checkpoint::save(root, 4, state, group, quiet());
    auto found = probe(*model, group.rank(), 4);
    const std::lock_guard lock(mutex);
    wanted[group.rank()] = std::move(found);
    const auto part = model->tables->ids()->part("a");
    num_ids += part->num_ids();
    num_waiting += part->state_dict().at("_tessera_history_ids").numel();
  });
  EXPECT_GT(num_ids, 20);
  EXPECT_EQ(num_waiting, 2 * kSamples);
  Seen together;
  run_ranks(2, [&](const comm::Group& group) {
    const auto model = sharded(group);
    for (std::int64_t step = 20; step < 24; ++step) call(*model, samples(step, group.rank(), 2));
    State state;
    checkpoint::add_module(state, model);
    checkpoint::load(root, state, group, quiet_load());
    checkpoint::save(root, 5, state, group, quiet());
    auto found = probe(*model, group.rank(), 2);
    const std::lock_guard lock(mutex);
    together[group.rank()] = std::move(found);
  });
  expect_same(together, wanted);

  const auto model = whole();
  State state;
  checkpoint::add_module(state, model);
  checkpoint::load(root, state, std::nullopt, quiet_load());
  Seen alone;
  alone[0] = probe(*model, 0, 1);
  expect_same(alone, wanted);
  const auto ids =
      std::dynamic_pointer_cast<MCHManagedCollisionModule>(model->tables->ids()->modules().at("a"));
  EXPECT_EQ(ids->num_ids(), num_ids);
  EXPECT_EQ(ids->state_dict().at("_tessera_history_ids").numel(), num_waiting);
  EXPECT_EQ(ids->state_dict().at("_tessera_num_ids").item<std::int64_t>(), num_ids);
  // All rows but the last can be had, those of the parts' last slots too.
  ids->train();
  for (std::int64_t step = 0; step < 3; ++step) ids->forward(at::arange(5000, 5100));
  EXPECT_EQ(ids->open_slots(), 0);

  checkpoint::save(root, 6, state, std::nullopt, quiet());
  const auto errors = run_ranks_collecting(2, [&](const comm::Group& group) {
    const auto other = sharded(group);
    State cut;
    checkpoint::add_module(cut, other);
    checkpoint::load(root, cut, group, quiet_load());
  });
  for (const auto& error : errors) {
    const std::string text = text_of(error);
    EXPECT_NE(text.find("the ids of table 'a' were saved in parts whose rows begin at 0; here a "
                        "part has rows 0 to 31. Parts are put together, never cut: load on as "
                        "many ranks, or table_wise."),
              std::string::npos)
        << text;
  }
}

TEST_F(SavedIds, WaitingIdsAndTheLargestAreKeptOnOneRank) {
  const auto straight = std::make_shared<MCHManagedCollisionModule>(lfu(8));
  const auto resumed = std::make_shared<MCHManagedCollisionModule>(lfu(8));
  resumed->forward(at::arange(40, 47));  // what a load must undo
  for (std::int64_t step = 0; step < 9; ++step) {
    const at::Tensor ids =
        at::cat({at::arange(step, step + 4), at::full({2}, kLargest, at::kLong)});
    const at::Tensor wanted = straight->forward(ids);
    if (step >= 5) {
      EXPECT_TRUE(at::equal(resumed->forward(ids), wanted)) << step;
    }
    if (step != 4) continue;
    State from;
    State to;
    checkpoint::add_module(from, straight);
    checkpoint::add_module(to, resumed);
    checkpoint::save(root, 1, from, std::nullopt, quiet());
    checkpoint::load(root, to, std::nullopt, quiet_load());
    EXPECT_EQ(resumed->num_ids(), straight->num_ids());
  }
}

/// The tensors of a trained module, as they were saved before waiting ids were.
std::map<std::string, at::Tensor> old_tensors() {
  MCHManagedCollisionModule ids(lfu(8));
  for (int step = 0; step < 3; ++step) ids.forward(at::arange(30, 34));
  return ids.state_dict();
}

std::string load_text(const std::string& root, const std::map<std::string, at::Tensor>& tensors,
                      const std::shared_ptr<MCHManagedCollisionModule>& ids) {
  State from;
  checkpoint::add_tensors(from, [&] { return tensors; }, "model.");
  auto replacing = quiet();
  replacing.replaces = true;
  checkpoint::save(root, 1, from, std::nullopt, replacing);
  State to;
  checkpoint::add_module(to, ids);
  try {
    checkpoint::load(root, to, std::nullopt, quiet_load());
  } catch (const checkpoint::Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(SavedIds, WhatWasSavedWithoutThemLoads) {
  const auto ids = std::make_shared<MCHManagedCollisionModule>(lfu(8));
  ids->forward(at::arange(3));  // waits, and is forgotten
  EXPECT_EQ(load_text(root, old_tensors(), ids), "");
  EXPECT_EQ(ids->num_ids(), 4);
  EXPECT_FALSE(ids->state_dict().contains("_tessera_history_ids"));
}

TEST_F(SavedIds, WhatNoModuleWroteIsRefused) {
  const auto ids = std::make_shared<MCHManagedCollisionModule>(lfu(8));
  for (int step = 0; step < 4; ++step) ids->forward(at::arange(50, 55));
  const auto before = ids->state_dict();
  const auto refused = [&](const std::string& name, const at::Tensor& value,
                           const std::string& part) {
    auto tensors = old_tensors();
    tensors[name] = value;
    const std::string text = load_text(root, tensors, ids);
    EXPECT_NE(text.find(part), std::string::npos) << text;
    for (const auto& [own, kept] : ids->state_dict()) EXPECT_TRUE(at::equal(kept, before.at(own)));
  };
  at::Tensor twice = old_tensors().at(kBuffers[0]);
  twice[1] = twice[0];
  refused(kBuffers[0], twice, "table '' has id 30 twice.");
  refused("_tessera_num_ids", at::full({1}, 6, at::kLong),
          "table '' does not have as many ids as its parts say.");
  refused(kBuffers[2], at::zeros({7}, at::kLong), "the state wants [8]");
  refused("_output_segments_tensor",
          at::cat({at::tensor({2, 10}, at::kLong), at::full({1023}, -1, at::kLong)}),
          "were saved in parts whose rows begin at 2; here a part has rows 0 to 7.");
}

// Ranges of hashed ids are cut by the number of ranks, not where rows are.
TEST_F(SavedIds, IdsThatWouldBelongToOthersAreRefused) {
  const auto collection = [](const comm::Group& group) {
    auto options = lfu(64);
    options.eviction_interval = 1;
    options.input_hash_size = 10;
    options.input_hash_func = [](const at::Tensor& ids, std::int64_t size) { return ids % size; };
    auto tables = two_tables();
    tables.pop_back();
    const int world = group.size();
    return std::make_shared<collision::ShardedManagedCollisionCollection>(
        collision::ManagedCollisionModules{
            {"a", std::make_shared<MCHManagedCollisionModule>(options)}},
        tables,
        sharding::make_module_plan(tables, {{"a", sharding::row_wise()}},
                                   {.world_size = world, .local_size = world}),
        group);
  };
  run_ranks(4, [&](const comm::Group& group) {
    const auto ids = collection(group);
    jagged::KeyedJaggedFields fields;
    fields.lengths = at::full({1}, 10, at::kInt);
    ids->forward({{"f"}, at::arange(10), fields});
    State state;
    checkpoint::add_module(state, ids);
    checkpoint::save(root, 1, state, group, quiet());
  });
  const auto errors = run_ranks_collecting(2, [&](const comm::Group& group) {
    State state;
    const auto ids = collection(group);
    checkpoint::add_module(state, ids);
    checkpoint::load(root, state, group, quiet_load());
  });
  for (const auto& error : errors) {
    const std::string text = text_of(error);
    EXPECT_NE(text.find("id 5 of table 'a' has a row of rank 0, but belongs to rank 1 here. Load "
                        "on as many ranks as have saved it, with the same plan."),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace tessera::testing
