// Predictions of a package against plain loops, and requests that make no sense.

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "samples.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

using embedding::RowType;

std::vector<float> predict(Model& model, const Samples& samples, bool is_weighted = false) {
  std::vector<float> logits(static_cast<std::size_t>(samples.num_samples));
  const auto bags = samples.bags(is_weighted);
  model.lease().predict({samples.num_samples, samples.dense, bags}, logits);
  return logits;
}

void expect_plain_loops(bool is_cross, bool is_weighted) {
  const Folder folder;
  const SmallModel small(is_cross);
  ExportOptions options;
  options.type = RowType::kFp32;
  export_model(small, folder, options);
  Model model(folder / "pkg");
  const Samples samples(small, 150);  // more than one block
  const auto logits = predict(model, samples, is_weighted);
  for (std::int64_t s = 0; s < samples.num_samples; ++s) {
    const Samples one = samples.alone(small, s);
    const double wanted = small.predict(
        one.dense, one.ids, is_weighted ? one.weights : std::vector<std::vector<float>>());
    EXPECT_NEAR(logits[static_cast<std::size_t>(s)], wanted, 2e-5 * (1 + std::abs(wanted))) << s;
  }
}

TEST(ServingModel, DotInteractionIsThatOfPlainLoops) { expect_plain_loops(false, false); }
TEST(ServingModel, CrossInteractionIsThatOfPlainLoops) { expect_plain_loops(true, false); }
TEST(ServingModel, WeightsAreThoseOfPlainLoops) { expect_plain_loops(false, true); }

TEST(ServingModel, ASampleDoesNotDependOnItsCompany) {
  for (const bool is_cross : {false, true}) {
    for (const RowType type : {RowType::kInt8, RowType::kInt4, RowType::kFp16}) {
      const Folder folder;
      const SmallModel small(is_cross);
      ExportOptions options;
      options.type = type;
      export_model(small, folder, options);
      Model model(folder / "pkg");
      const Samples samples(small, 131);
      const auto together = predict(model, samples);
      for (std::int64_t s = 0; s < samples.num_samples; ++s) {
        const auto alone = predict(model, samples.alone(small, s));
        ASSERT_EQ(std::memcmp(alone.data(), &together[static_cast<std::size_t>(s)], 4), 0) << s;
      }
    }
  }
}

TEST(ServingModel, SeveralThreadsGetTheSame) {
  const Folder folder;
  const SmallModel small;
  export_model(small, folder);
  Model model(folder / "pkg");
  const Samples samples(small, 70);
  const auto wanted = predict(model, samples);
  std::vector<std::thread> threads;
  std::vector<int> num_wrong(4);
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) num_wrong[t] += predict(model, samples) == wanted ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, std::vector<int>(4));
}

TEST(ServingModel, AReloadIsSeenByLaterLeasesAlone) {
  const Folder folder;
  SmallModel small;
  export_model(small, folder, {}, "a");
  for (float& x : small.table(0)) x += 1;
  export_model(small, folder, {}, "b");
  Model model(folder / "a");
  Model other(folder / "b");
  const Samples samples(small, 5);
  const auto before = predict(model, samples);
  const auto after = predict(other, samples);
  ASSERT_NE(before, after);
  {
    auto lease = model.lease();
    model.reload(folder / "b");
    std::vector<float> logits(5);
    const auto bags = samples.bags();
    lease.predict({5, samples.dense, bags}, logits);
    EXPECT_EQ(logits, before);
  }
  EXPECT_EQ(predict(model, samples), after);

  // One that is not whole is refused, and the old one goes on.
  export_model(SmallModel(), folder, {}, "c");
  std::filesystem::remove(folder / "c/model.json");
  EXPECT_THROW(model.reload(folder / "c"), std::exception);
  EXPECT_EQ(predict(model, samples), after);
}

TEST(ServingModel, AReloadOfOtherInputsIsRefusedAndTheOldOneGoesOn) {
  const Folder folder;
  const SmallModel small;
  export_model(small, folder);
  Model model(folder / "pkg");
  const Samples samples(small, 5);
  const auto before = predict(model, samples);
  SmallModel more;  // a dense number more
  ++more.bottom[0];
  more.add_layers("model.bottom", more.bottom);
  export_model(more, folder, {}, "dense");
  SmallModel renamed;  // another feature
  auto table = renamed.tensors.extract("tables.embedding_bags.t_2.weight");
  table.key() = "tables.embedding_bags.t_3.weight";
  renamed.tensors.insert(std::move(table));
  ExportOptions named;
  named.features = {"t_0", "t_1", "t_3"};
  export_model(renamed, folder, named, "feature");
  ExportOptions halves;  // the same inputs, and other outputs
  halves.has_half_outputs = true;
  export_model(small, folder, halves, "halves");
  for (const char* name : {"dense", "feature", "halves"}) {
    try {
      model.reload(folder / name);
      ADD_FAILURE() << name << " was opened";
    } catch (const checkpoint::Error& error) {
      EXPECT_EQ(error.kind(), checkpoint::ErrorKind::kInvalid);
      EXPECT_EQ(error.what(), folder / name +
                                  ": its inputs and outputs are not those of the model "
                                  "that is served.");
    }
    EXPECT_EQ(predict(model, samples), before);
  }
  export_model(small, folder, {}, "same");
  EXPECT_NO_THROW(model.reload(folder / "same"));
}

TEST(ServingModel, WhatMakesNoSenseIsNamed) {
  const Folder folder;
  const SmallModel small;
  export_model(small, folder);
  Model model(folder / "pkg");
  const auto expect = [&](Samples samples, bool is_weighted, const std::string& where,
                          bool is_malformed, const std::string& text) {
    try {
      predict(model, samples, is_weighted);
      ADD_FAILURE() << where << " was accepted";
    } catch (const BadRequest& error) {
      EXPECT_EQ(error.where(), where);
      EXPECT_EQ(error.is_malformed(), is_malformed) << where;
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  const Samples good(small, 20);
  predict(model, good, true);
  Samples bad = good;
  bad.dense.pop_back();
  expect(bad, false, "dense", false, "99 numbers; 20 samples of 5");
  bad = good;
  bad.dense[7] = std::numeric_limits<float>::infinity();
  expect(bad, false, "dense[7]", false, "not finite");
  bad = good;
  bad.ids[1][3] = 7;
  expect(bad, false, "t_1.values[3]", false, "id 7 is not one of the 7 rows of table 't_1'");
  bad.ids[1][3] = -1;
  expect(bad, false, "t_1.values[3]", false, "id -1");
  bad = good;
  bad.lengths[2][4] = -1;
  expect(bad, false, "t_2.lengths[4]", true, "negative");
  bad = good;
  bad.lengths[2][4] += 1;
  expect(bad, false, "t_2.lengths", true, "sum to");
  bad = good;
  bad.lengths[0].pop_back();
  expect(bad, false, "t_0.lengths", false, "19 lengths for 20 samples");
  bad = good;
  bad.weights[0][2] = std::numeric_limits<float>::quiet_NaN();
  expect(bad, true, "t_0.weights[2]", false, "not finite");
  bad = good;
  bad.weights[0].pop_back();
  expect(bad, true, "t_0.weights", false, "weights for");
}

}  // namespace
}  // namespace tessera::serving
