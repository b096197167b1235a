// Growing tables over ranks: the same bits for every number of them.

#include "tessera/collision/growing_tables.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include <ATen/Parallel.h>

#include "collision/growing_state.h"
#include "collision/growing_world.h"
#include "support/ranks.h"
#include "tessera/collision/row_init.h"

namespace tessera::testing {
namespace {

using collision::AdmissionKind;
using collision::EvictionKind;
using collision::GrowingEmbeddingCollection;
using collision::GrowingOptions;
using collision::UnknownIds;
using Wishes = std::map<std::string, sharding::Placement>;

constexpr std::int64_t kSteps = 12;

struct Ran {
  Remains remains;
  std::vector<at::Tensor> outputs;  // of every step, all samples
};

Ran run(int world, const std::vector<GrowingTable>& tables, const Wishes& wishes = {},
        const GrowingOptions& options = adagrad(),
        const comm::GroupOptions& group_options = test_options()) {
  Ran ran;
  std::vector<std::vector<at::Tensor>> outputs(static_cast<std::size_t>(world));
  run_ranks(
      world,
      [&](const comm::Group& group) {
        GrowingEmbeddingBagCollection growing(tables, group, options, wishes);
        for (std::int64_t step = 0; step < kSteps; ++step) {
          outputs[static_cast<std::size_t>(group.rank())].push_back(train(growing, step));
        }
        add_remains(growing, ran.remains);
      },
      group_options);
  for (std::size_t step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> parts;
    for (const auto& own : outputs) parts.push_back(own[step]);
    ran.outputs.push_back(at::cat(parts));
  }
  return ran;
}

void expect_same(const Ran& one, const Ran& other, const std::string& which) {
  EXPECT_EQ(one.remains, other.remains) << which;
  for (std::size_t step = 0; step < one.outputs.size(); ++step) {
    EXPECT_TRUE(at::equal(one.outputs[step], other.outputs[step])) << which << ", step " << step;
  }
}

std::vector<GrowingTable> seldom_admitted() {
  auto tables = two_tables();
  for (GrowingTable& table : tables) {
    table.ids.admission = {.kind = AdmissionKind::kFrequency, .sightings = 2};
  }
  return tables;
}

std::vector<GrowingTable> small() {
  auto tables = two_tables();
  for (GrowingTable& table : tables) {
    table.ids.capacity = 1;  // one id a bucket
    table.ids.eviction.kind = EvictionKind::kLfu;
    table.ids.refuse_when_full = true;
  }
  tables[0].unknown = UnknownIds::kInit;
  return tables;
}

/// Full tables whose ids without a row read zeros, or what their row would begin with.
std::vector<GrowingTable> small_without_a_row() {
  auto tables = small();
  tables[1].unknown = UnknownIds::kZero;
  return tables;
}

/// A table of its own for each feature, so that whole bags lie on one rank.
std::vector<GrowingTable> a_table_each(embedding::PoolingType pooling) {
  auto tables = two_tables();
  tables[1].config.feature_names = {"g"};
  tables.push_back(tables[1]);
  tables[2].config.name = "c";
  tables[2].config.feature_names = {"h"};
  tables[0].config.pooling = pooling;
  return tables;
}

TEST(GrowingTables, EveryWorldGivesTheSameBits) {
  const std::vector<std::pair<std::string, std::vector<GrowingTable>>> cases = {
      {"always", two_tables()},
      {"from the second sighting", seldom_admitted()},
      {"small", small()},
      {"small, and no row for the others", small_without_a_row()}};
  for (const auto& [name, tables] : cases) {
    const Ran alone = run(1, tables);
    ASSERT_GT(alone.remains.at("a").size(), 10U);
    for (const int world : {2, 3, 4}) {
      expect_same(alone, run(world, tables), name + " on " + std::to_string(world) + " ranks");
    }
    const Wishes by_table = {{"a", sharding::table_wise(1)}, {"b", sharding::row_wise()}};
    expect_same(alone, run(3, tables, by_table), name + " with a whole table");
  }
}

TEST(GrowingTables, SumsOfOwnersHaveTheBitsOfSumsAtHome) {
  const auto pools_on = [](int world, const std::vector<GrowingTable>& tables,
                           const Wishes& wishes) {
    bool does = false;
    run_ranks(world, [&](const comm::Group& group) {
      const GrowingEmbeddingBagCollection growing(tables, group, adagrad(), wishes);
      if (group.rank() == 0) does = growing.growing_state()->pooled_home.has_value();
    });
    return does;
  };
  for (const auto pooling : {embedding::PoolingType::kSum, embedding::PoolingType::kMean}) {
    const auto tables = a_table_each(pooling);
    const Wishes whole = {{"a", sharding::table_wise(1)},
                          {"b", sharding::table_wise(0)},
                          {"c", sharding::table_wise(1)}};
    // At home on two ranks, by the owner on one and where tables lie whole.
    const Ran at_home = run(2, tables);
    ASSERT_FALSE(pools_on(2, tables, {}));
    ASSERT_TRUE(pools_on(1, tables, {}));
    ASSERT_TRUE(pools_on(2, tables, whole));
    EXPECT_TRUE(std::any_of(at_home.remains.at("a").begin(), at_home.remains.at("a").end(),
                            [](const auto& row) { return row.second.count > 3; }));
    expect_same(at_home, run(1, tables), "one rank");
    expect_same(at_home, run(2, tables, whole), "whole on two");
    expect_same(at_home, run(3, tables, whole), "whole on two of three");
    expect_same(at_home, run(2, tables, whole, adagrad(), test_options(comm::Engine::kGloo)),
                "gloo");
  }
  // Where ids may stay without a row, several ranks do not know whether one has.
  auto tables = a_table_each(embedding::PoolingType::kSum);
  tables[0].ids.admission = {.kind = AdmissionKind::kFrequency, .sightings = 2};
  EXPECT_FALSE(pools_on(2, tables,
                        {{"a", sharding::table_wise(1)},
                         {"b", sharding::table_wise(0)},
                         {"c", sharding::table_wise(1)}}));
}

// Rows of a rank's own samples may be read late: before they are another id's.
TEST(GrowingTables, WhatIsWaitedForLateIsOfItsOwnBatch) {
  const auto results_of = [](bool waits_at_once) {
    std::vector<at::Tensor> results(2);
    run_ranks(2, [&](const comm::Group& group) {
      auto tables = a_table_each(embedding::PoolingType::kSum);
      for (GrowingTable& table : tables) {
        table.ids.eviction = {.kind = EvictionKind::kTimeToLive, .time_to_live = 1};
      }
      GrowingEmbeddingBagCollection growing(tables, group, adagrad(),
                                            {{"a", sharding::table_wise(0)},
                                             {"b", sharding::table_wise(1)},
                                             {"c", sharding::table_wise(0)}});
      std::vector<comm::LazyAwaitable<jagged::KeyedTensor>> pending;
      for (std::int64_t step = 0; step < 4; ++step) {
        Samples samples = samples_of(step);
        for (std::int64_t& id : samples.g) id = id * 100 + step;  // new ones in every step
        for (std::int64_t& id : samples.h) id = id * 100 + step;
        const auto [begin, end] = part_of(samples, group);
        const auto input = growing.input_dist(features_of(samples, begin, end)).wait().wait();
        pending.push_back(growing.compute_and_output_dist(input));
        if (waits_at_once) static_cast<void>(pending.back().wait());
      }
      EXPECT_GT(growing.total_growth()[1].evicted, 0);
      std::vector<at::Tensor> values;
      for (const auto& each : pending) values.push_back(each.wait().values().detach());
      results[static_cast<std::size_t>(group.rank())] = at::cat(values);
    });
    return at::cat(results);
  };
  EXPECT_TRUE(at::equal(results_of(false), results_of(true)));
}

// Enough ids that tables are admitted, begun and read by several threads at once.
TEST(GrowingTables, EveryNumberOfThreadsGivesTheSameBits) {
  constexpr std::int64_t kSamples = 12000;
  const auto run_with = [&](int threads) {
    Remains remains;
    std::vector<std::string> errors;
    run_ranks(1, [&](const comm::Group& group) {
      at::set_num_threads(threads);
      auto tables = seldom_admitted();
      tables[1].ids.capacity = 12 * collision::kNumBuckets;
      GrowingEmbeddingBagCollection growing(tables, group, adagrad());
      for (std::int64_t step = 0; step < 4; ++step) {
        Samples samples = samples_of(step, kSamples);
        for (std::int64_t& id : samples.g) id *= 1 + std::int64_t{step} * 3;
        if (step == 3) {  // more ids than table b has room for: nothing of the step stays
          for (std::size_t i = 0; i < samples.h.size(); ++i) {
            samples.g[i] = samples.h[i] = static_cast<std::int64_t>(i);
          }
        }
        try {
          growing.forward(features_of(samples, 0, kSamples)).values().sum().backward();
        } catch (const std::exception& error) {
          errors.emplace_back(error.what());
        }
      }
      EXPECT_EQ(growing.num_calls(), 3);
      add_remains(growing, remains);
    });
    EXPECT_EQ(errors.size(), 1U);
    return std::pair(remains, errors);
  };
  const int before = at::get_num_threads();
  const auto alone = run_with(1);
  EXPECT_GT(alone.first.at("a").size(), 100U);
  EXPECT_EQ(alone, run_with(2));
  EXPECT_EQ(alone, run_with(4));
  at::set_num_threads(before);
}

TEST(GrowingTables, EveryEngineGivesTheSameBits) {
  const Ran alone = run(1, seldom_admitted());
  expect_same(alone, run(2, seldom_admitted(), {}, adagrad(), test_options(comm::Engine::kGloo)),
              "gloo");
}

TEST(GrowingTables, EveryOptimizerGivesTheSameBits) {
  using embedding::OptimizerKind;
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                                   OptimizerKind::kAdam, OptimizerKind::kPartialRowWiseAdam}) {
    GrowingOptions options = adagrad();
    options.optimizer.kind = kind;
    const Ran alone = run(1, seldom_admitted(), {}, options);
    expect_same(alone, run(3, seldom_admitted(), {}, options),
                std::string(embedding::name_of(kind)));
  }
}

// A plain map of rows, stepped by hand.
TEST(GrowingTables, StepsRowsAsAPlainMapDoes) {
  GrowingOptions options;
  options.optimizer.learning_rate = 0.5;  // SGD
  const auto tables = two_tables();
  const Ran ran = run(2, tables, {}, options);
  std::map<std::string, std::map<std::int64_t, std::vector<float>>> plain;
  const auto row_of = [&](const GrowingTable& table, std::int64_t id) -> std::vector<float>& {
    std::vector<float>& row = plain[table.config.name][id];
    if (row.empty()) {
      row.resize(static_cast<std::size_t>(table.config.embedding_dim));
      const float bound = std::sqrt(1.0F / static_cast<float>(row.size()));
      collision::init_rows(std::vector<std::int64_t>{id}, table.seed, table.config.embedding_dim,
                           -bound, bound, row);
    }
    return row;
  };
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const Samples samples = samples_of(step);
    const auto gradient = samples.gradient.accessor<float, 2>();
    const at::Tensor wanted = at::zeros({static_cast<std::int64_t>(samples.g.size()), 7});
    auto out = wanted.accessor<float, 2>();
    std::vector<std::tuple<std::vector<float>*, int, float>> changes;
    const auto look_up = [&](const GrowingTable& table, std::int64_t id, std::size_t sample,
                             int column) {
      std::vector<float>& row = row_of(table, id);
      for (int c = 0; c < static_cast<int>(row.size()); ++c) {
        const auto s = static_cast<std::int64_t>(sample);
        out[s][column + c] += row[static_cast<std::size_t>(c)];
        changes.emplace_back(&row, c, gradient[s][column + c]);
      }
    };
    for (std::size_t s = 0; s < samples.g.size(); ++s) {
      for (const std::int64_t id : samples.f[s]) look_up(tables[0], id, s, 0);
      look_up(tables[1], samples.g[s], s, 3);
      look_up(tables[1], samples.h[s], s, 5);
    }
    EXPECT_TRUE(at::allclose(ran.outputs[static_cast<std::size_t>(step)], wanted, 1e-5, 1e-5));
    for (const auto& [row, c, amount] : changes)
      (*row)[static_cast<std::size_t>(c)] -= 0.5F * amount;
  }
  for (const GrowingTable& table : tables) {
    const auto& left = ran.remains.at(table.config.name);
    ASSERT_EQ(left.size(), plain.at(table.config.name).size());
    for (const auto& [id, row] : plain.at(table.config.name)) {
      for (std::size_t c = 0; c < row.size(); ++c) EXPECT_NEAR(left.at(id).weight[c], row[c], 2e-5);
    }
  }
}

TEST(GrowingTables, EvaluationChangesNothing) {
  run_ranks(2, [](const comm::Group& group) {
    auto tables = two_tables();
    tables[0].unknown = UnknownIds::kInit;
    tables[1].unknown = UnknownIds::kZero;
    GrowingEmbeddingBagCollection growing(tables, group, adagrad());
    train(growing, 0);
    Remains before;
    add_remains(growing, before);
    const std::int64_t calls = growing.num_calls();
    const Samples unseen = samples_of(900);
    const auto [begin, end] = part_of(unseen, group);
    {
      const at::NoGradGuard no_grad;
      growing.forward(features_of(unseen, begin, end));
    }
    growing.eval();
    growing.forward(features_of(unseen, begin, end));
    Remains after;
    add_remains(growing, after);
    EXPECT_EQ(before, after);
    EXPECT_EQ(growing.num_calls(), calls);
  });
}

TEST(GrowingTables, UnknownIdsReadWhatWasChosen) {
  run_ranks(2, [](const comm::Group& group) {
    auto tables = two_tables();
    tables[0].unknown = UnknownIds::kInit;
    tables[1].unknown = UnknownIds::kZero;
    GrowingEmbeddingBagCollection growing(tables, group, adagrad());
    growing.eval();
    Samples one;
    one.f = {{77}};
    one.g = {77};
    one.h = {78};
    const auto pooled = growing.forward(features_of(one, 0, 1));
    std::vector<float> first(3);
    const float bound = std::sqrt(1.0F / 3);
    collision::init_rows(std::vector<std::int64_t>{77}, 11, 3, -bound, bound, first);
    EXPECT_EQ(floats_of(pooled["f"]), first);
    EXPECT_EQ(floats_of(pooled["g"]), std::vector<float>(2, 0.0F));
  });
}

// Ranks get empty batches, or all of them do.
TEST(GrowingTables, BatchesMayBeEmpty) {
  run_ranks(3, [](const comm::Group& group) {
    GrowingEmbeddingBagCollection growing(seldom_admitted(), group, adagrad());
    const Samples samples = samples_of(3, 5);
    for (const int owner : {0, 2, 7}) {
      const std::size_t end = group.rank() == owner ? 5 : 0;
      const auto pooled = growing.forward(features_of(samples, 0, end));
      EXPECT_EQ(pooled.values().size(0), static_cast<std::int64_t>(end));
      pooled.values().sum().backward();
    }
    EXPECT_EQ(growing.num_calls(), 3);
  });
}

TEST(GrowingTables, SequencesAreTheRowsOfTheirIds) {
  for (const int world : {1, 3}) {
    run_ranks(world, [](const comm::Group& group) {
      sharding::set_gradient_division(false);
      GrowingEmbeddingCollection growing(two_tables(), group, adagrad());
      const Samples samples = samples_of(1);
      const auto [begin, end] = part_of(samples, group);
      const auto rows = growing.forward(features_of(samples, begin, end));
      std::map<std::string, jagged::JaggedTensor> named(rows.begin(), rows.end());
      std::vector<std::int64_t> ids;
      for (std::size_t i = begin; i < end; ++i) {
        ids.insert(ids.end(), samples.f[i].begin(), samples.f[i].end());
      }
      std::vector<float> first(3 * ids.size());
      const float bound = std::sqrt(1.0F / 3);
      collision::init_rows(ids, 11, 3, -bound, bound, first);
      EXPECT_EQ(floats_of(named.at("f").values()), first);
      (named.at("f").values().sum() + named.at("h").values().sum()).backward();
    });
  }
}

TEST(GrowingTables, AFullTableIsTheSameErrorOnAllRanksAndChangesNothing) {
  Remains before;
  Remains after;
  const auto errors = run_ranks_collecting(3, [&](const comm::Group& group) {
    auto tables = two_tables();
    tables[1].ids.capacity = 1;
    GrowingEmbeddingBagCollection growing(tables, group, adagrad());
    Samples few = samples_of(0, 3);
    for (auto& bag : few.f) bag.clear();
    few.g = {1, 1, 1};
    few.h = {1, 1, 1};
    const auto own = static_cast<std::size_t>(group.rank());
    growing.forward(features_of(few, own, own + 1)).values().sum().backward();
    add_remains(growing, before);
    // Two new ids of one bucket, from two ranks; and new ones of table a, which have room.
    const std::uint64_t hash = std::uint64_t{77} << 10;
    few.g = {collision::id_of_hash(hash), collision::id_of_hash(hash | std::uint64_t{1} << 20), 1};
    few.f = {{5}, {6, 7}, {8}};
    try {
      growing.forward(features_of(few, own, own + 1));
    } catch (...) {
      add_remains(growing, after);
      EXPECT_EQ(growing.num_calls(), 1);
      few.g = {1, 1, 1};
      growing.forward(features_of(few, own, own + 1)).values().sum().backward();  // goes on
      throw;
    }
  });
  EXPECT_EQ(before, after);
  std::set<std::string> texts;
  for (const auto& error : errors) texts.insert(text_of(error));
  ASSERT_EQ(texts.size(), 1U);
  for (const char* part : {"table 'b'", "bucket 77", "capacity of 1", "on rank "}) {
    EXPECT_NE(texts.begin()->find(part), std::string::npos) << *texts.begin();
  }
}

TEST(GrowingTables, MemoryThatOneRankHasNotIsTheSameErrorOnAllAndChangesNothing) {
  constexpr std::size_t kSamples = 8000;  // of a rank
  Remains before;
  Remains after;
  const auto errors = run_ranks_collecting(3, [&](const comm::Group& group) {
    auto tables = two_tables();
    // One rank has room for some thousand ids of table b; the others for all.
    if (group.rank() == 1) tables[1].ids.most_bytes = 3 << 16;
    GrowingEmbeddingBagCollection growing(tables, group, adagrad());
    Samples samples = samples_of(0, 3 * kSamples);
    const std::size_t begin = kSamples * static_cast<std::size_t>(group.rank());
    const Samples few = samples_of(1, 3 * kSamples);
    const auto take_few = [&] {
      growing.forward(features_of(few, begin, begin + 20)).values().sum().backward();
    };
    take_few();
    add_remains(growing, before);
    const auto growth = growing.growth();
    for (std::size_t i = 0; i < samples.g.size(); ++i) {  // and new ids of table a, which have room
      samples.f[i] = {-static_cast<std::int64_t>(i)};
      samples.g[i] = samples.h[i] = static_cast<std::int64_t>(i) + 1000;
    }
    try {
      growing.forward(features_of(samples, begin, begin + kSamples));
    } catch (...) {
      add_remains(growing, after);
      EXPECT_EQ(growing.num_calls(), 1);
      for (std::size_t t = 0; t < growth.size(); ++t) {
        EXPECT_EQ(growing.growth()[t].ids, growth[t].ids);
        EXPECT_EQ(growing.growth()[t].admitted, growth[t].admitted);
        EXPECT_EQ(growing.growth()[t].sightings, growth[t].sightings);
      }
      take_few();  // goes on with what there is
      EXPECT_EQ(growing.num_calls(), 2);
      throw;
    }
  });
  EXPECT_EQ(before, after);
  std::set<std::string> texts;
  for (const auto& error : errors) texts.insert(text_of(error));
  ASSERT_EQ(texts.size(), 1U);
  for (const char* part :
       {"on rank 1", "table 'b'", "no memory for ", "ids are held", "eviction"}) {
    EXPECT_NE(texts.begin()->find(part), std::string::npos) << *texts.begin();
  }
}

TEST(GrowingTables, WithoutMemoryForOneTableNoRowsAreLoaded) {
  run_ranks(1, [](const comm::Group& group) {
    auto tables = two_tables();
    GrowingEmbeddingBagCollection saved(tables, group, adagrad());
    Samples samples = samples_of(0, 8000);
    for (std::size_t i = 0; i < samples.g.size(); ++i) {
      samples.f[i] = {-static_cast<std::int64_t>(i)};
      samples.g[i] = samples.h[i] = static_cast<std::int64_t>(i) + 1000;
    }
    saved.forward(features_of(samples, 0, samples.g.size())).values().sum().backward();
    tables[1].ids.most_bytes = 3 << 16;  // for some thousand ids
    GrowingEmbeddingBagCollection growing(tables, group, adagrad());
    for (std::int64_t step = 1; step < 4; ++step) train(growing, step);
    Remains before;
    Remains after;
    Remains last;
    add_remains(growing, before);
    const std::map<std::string, collision::GrowingRows> rows = {{"a", saved.export_rows("a")},
                                                                {"b", saved.export_rows("b")}};
    try {
      growing.prepare_rows(rows);
      FAIL() << "no error";
    } catch (const c10::Error& error) {
      const std::string told = error.what_without_backtrace();
      for (const char* part : {"table 'b'", "no memory for "}) {
        EXPECT_NE(told.find(part), std::string::npos) << told;
      }
    }
    growing.take_prepared_rows();  // nothing is
    add_remains(growing, after);
    EXPECT_EQ(before, after);
    train(growing, 4);  // it goes on
    growing.prepare_rows({{"a", rows.at("a")}});
    growing.forget_prepared_rows();
    growing.take_prepared_rows();
    EXPECT_LT(growing.growth()[0].ids, 8000);
    growing.load_rows("a", rows.at("a"));
    EXPECT_EQ(growing.growth()[0].ids, 8000);
    EXPECT_EQ(growing.export_rows("a").weight.sizes(), rows.at("a").weight.sizes());
    EXPECT_TRUE(at::equal(growing.export_rows("a").weight, rows.at("a").weight));
  });
}

TEST(GrowingTables, WhatCannotBeIsAnError) {
  const auto text = [](const std::function<void(const comm::Group&)>& body) {
    return text_of(run_ranks_collecting(1, body).front());
  };
  const auto has = [](const std::string& all, const char* part) {
    EXPECT_NE(all.find(part), std::string::npos) << all;
  };
  has(text([](const comm::Group& group) {
        GrowingEmbeddingBagCollection growing(two_tables(), group, {},
                                              {{"a", sharding::column_wise({0})}});
      }),
      "growing tables lie row_wise or table_wise");
  has(text([](const comm::Group& group) {
        auto tables = two_tables();
        tables[0].config.init_fn = [](at::Tensor) {};
        GrowingEmbeddingBagCollection growing(tables, group);
      }),
      "init_fn");
  has(text([](const comm::Group& group) {
        GrowingOptions options;
        options.optimizer.stochastic_rounding = true;
        GrowingEmbeddingBagCollection growing(two_tables(), group, options);
      }),
      "stochastic_rounding");
  has(text([](const comm::Group& group) {
        auto tables = two_tables();
        tables[0].ids.capacity = -1;
        GrowingEmbeddingBagCollection growing(tables, group);
      }),
      "capacity of -1");
  has(text([](const comm::Group& group) {
        GrowingEmbeddingBagCollection growing(two_tables(), group);
        growing.gather_tables();
      }),
      "fixed number of rows");
  const auto texts_of = [](const std::function<void(GrowingTable&, int)>& change) {
    std::vector<std::string> texts;
    for (const auto& error : run_ranks_collecting(2, [&](const comm::Group& group) {
           auto tables = two_tables();
           change(tables[0], group.rank());
           GrowingEmbeddingBagCollection growing(tables, group);
         })) {
      texts.push_back(text_of(error));
    }
    return texts;
  };
  const std::function<void(GrowingTable&, int)> differ[] = {
      [](GrowingTable& table, int rank) { table.ids.capacity = rank == 0 ? 0 : 5; },
      [](GrowingTable& table, int rank) { table.ids.protect = {7, 8 + rank}; },
      [](GrowingTable& table, int rank) { table.text_hash = rank == 0 ? "xxh3" : "md5"; }};
  for (const auto& change : differ) {
    for (const std::string& told : texts_of(change)) has(told, "same tables, plan and options");
  }
  // The order in which ids are protected says nothing.
  const auto protects_the_same = [](GrowingTable& table, int rank) {
    table.ids.protect =
        rank == 0 ? std::vector<std::int64_t>{7, 8, -1} : std::vector<std::int64_t>{-1, 8, 7};
  };
  for (const std::string& told : texts_of(protects_the_same)) EXPECT_EQ(told, "");
}

TEST(GrowingTables, TellHowTheyGrow) {
  run_ranks(2, [](const comm::Group& group) {
    GrowingEmbeddingBagCollection growing(small(), group, adagrad());
    const auto changes = growing.track_changes();
    for (std::int64_t step = 0; step < 6; ++step) train(growing, step);
    std::int64_t sightings = 0;
    for (std::int64_t step = 0; step < 6; ++step) {
      for (const auto& bag : samples_of(step).f) sightings += static_cast<std::int64_t>(bag.size());
    }
    const auto all = growing.total_growth();
    ASSERT_EQ(all.size(), 2U);
    EXPECT_EQ(all[0].table, "a");
    EXPECT_EQ(all[0].sightings, sightings);
    EXPECT_EQ(all[0].ids, all[0].admitted - all[0].evicted);
    EXPECT_LT(all[0].hits, sightings);
    EXPECT_GT(all[0].hits, 0);
    EXPECT_GT(all[1].bytes, 0);
    std::int64_t removed = 0;
    for (const auto& table : {"a", "b"}) {
      removed += static_cast<std::int64_t>(changes->take_removed_ids(table).size());
      EXPECT_TRUE(changes->take_removed_ids(table).empty());
    }
    std::int64_t evicted = 0;
    for (const auto& one : growing.growth()) evicted += one.evicted;
    EXPECT_EQ(removed, evicted);
  });
}

}  // namespace
}  // namespace tessera::testing
