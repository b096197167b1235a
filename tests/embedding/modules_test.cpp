#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/error_text.h"
#include "tessera/embedding/embedding_bag.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"
#include "tessera/embedding/feature_processed_collection.h"
#include "tessera/embedding/position_weighted.h"

namespace tessera::embedding {
namespace {

using jagged::InverseIndices;
using jagged::KeyedJaggedFields;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;
using tessera::testing::error_text;
using Keys = std::vector<std::string>;
using Numbers = std::vector<std::int64_t>;

at::Tensor longs(const Numbers& numbers) {
  return at::tensor(numbers, at::TensorOptions(at::kLong));
}

at::Tensor floats(const std::vector<double>& numbers) {
  return at::tensor(numbers, at::TensorOptions(at::kDouble)).to(at::kFloat);
}

// Row r of the table is (r, r + 0.5, ...): sums can be done by hand.
void count_rows(const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  weight.copy_(at::arange(weight.size(0)).unsqueeze(1) + at::arange(weight.size(1)) * 0.5);
}

EmbeddingBagConfig table(const std::string& name, std::int64_t rows, std::int64_t dim,
                         Keys features = {}, PoolingType pooling = PoolingType::kSum) {
  return {.num_embeddings = rows,
          .embedding_dim = dim,
          .name = name,
          .feature_names = std::move(features),
          .pooling = pooling};
}

// f: [1, 2], [], [3]; g: [0], [4, 4], []
KeyedJaggedTensor batch(const at::Tensor& weights = {}, at::ScalarType id_type = at::kLong) {
  KeyedJaggedFields fields;
  fields.weights = weights;
  return KeyedJaggedTensor::from_lengths_sync({"f", "g"}, longs({1, 2, 3, 0, 4, 4}).to(id_type),
                                              longs({2, 0, 1, 1, 2, 0}), fields);
}

TEST(EmbeddingConfig, HasTheReferenceDefaults) {
  const EmbeddingBagConfig config{.num_embeddings = 4, .embedding_dim = 2, .name = "t"};
  EXPECT_EQ(config.features(), Keys{"t"});
  EXPECT_DOUBLE_EQ(config.get_weight_init_max(), 0.5);
  EXPECT_DOUBLE_EQ(config.get_weight_init_min(), -0.5);
  EXPECT_EQ(bits_of(DataType::kINT2), 2);
  EXPECT_FALSE(is_trainable(DataType::kINT8));
  EXPECT_EQ(scalar_type(DataType::kBF16), at::kBFloat16);
  EXPECT_EQ(name_of(DataType::kFP16), "FP16");
  EXPECT_EQ(name_of(PoolingType::kMean), "MEAN");
  EXPECT_EQ(name_of(BoundsCheckMode::kIgnore), "IGNORE");
  EXPECT_EQ(error_text([] { scalar_type(DataType::kINT4); }),
            "embed.config: numbers of INT4 share bytes; no tensor type holds them one by one.");
}

TEST(EmbeddingConfig, NamesAFeatureOfSeveralTablesAfterThem) {
  const auto names = embedding_names_by_table(
      {table("a", 1, 1, {"x", "y"}), table("b", 1, 1, {"x"}), table("c", 1, 1)});
  EXPECT_EQ(names, (std::vector<Keys>{{"x@a", "y"}, {"x@b"}, {"c"}}));
}

TEST(EmbeddingBagCollection, PoolsByHand) {
  EmbeddingBagCollection tables(
      {table("t", 5, 3, {"g"}), table("u", 5, 1, {"f", "g"}, PoolingType::kMean)});
  count_rows(tables.weight("t"));
  count_rows(tables.weight("u"));
  for (const auto id_type : {at::kInt, at::kLong}) {
    const KeyedTensor pooled = tables.forward(batch({}, id_type));
    EXPECT_EQ(pooled.keys(), (Keys{"g@t", "f", "g@u"}));
    EXPECT_EQ(pooled.length_per_key(), (Numbers{3, 1, 1}));
    EXPECT_TRUE(at::equal(pooled.values().detach(), floats({0, 0.5, 1, 1.5, 0,  //
                                                            8, 9, 10, 0, 4,     //
                                                            0, 0, 0, 3, 0})
                                                        .view({3, 5})));
  }
}

// The weighted mean is the weighted sum over the number of ids.
TEST(EmbeddingBagCollection, WeighsByHand) {
  EmbeddingBagCollection tables(
      {table("t", 5, 1, {"f"}), table("u", 5, 1, {"g"}, PoolingType::kMean)},
      /*is_weighted=*/true);
  count_rows(tables.weight("t"));
  count_rows(tables.weight("u"));
  const at::Tensor weights = floats({2, 0.5, 1, 3, 1, 2}).requires_grad_(true);
  const KeyedTensor pooled = tables.forward(batch(weights));
  EXPECT_TRUE(at::equal(pooled.values().detach(), floats({3, 0, 0, 6, 3, 0}).view({3, 2})));
  pooled.values().sum().backward();
  EXPECT_TRUE(at::equal(weights.grad(), floats({1, 2, 3, 0, 2, 2})));
  EXPECT_TRUE(at::equal(tables.weight("t").grad(), floats({0, 2, 0.5, 1, 0}).view({5, 1})));
  EXPECT_TRUE(at::equal(tables.weight("u").grad(), floats({3, 0, 0, 0, 1.5}).view({5, 1})));
  EXPECT_EQ(error_text([&] { tables.forward(batch()); }),
            "embed.bag_collection: the collection is weighted, but the features have no weights.");
}

TEST(EmbeddingBagCollection, EqualsLibTorchForManyShapes) {
  for (const std::int64_t dim : {1, 3, 8, 17, 64, 130}) {
    for (const auto pooling : {PoolingType::kSum, PoolingType::kMean}) {
      EmbeddingBagCollection tables({table("t", 40, dim, {"f"}, pooling), table("u", 1, 5, {"g"})});
      const at::Tensor lengths = at::randint(0, 7, {2 * 30}, at::kLong);
      const auto num_f = lengths.slice(0, 0, 30).sum().item<std::int64_t>();
      const auto num_g = lengths.slice(0, 30).sum().item<std::int64_t>();
      const at::Tensor ids =
          at::cat({at::randint(0, 40, {num_f}, at::kLong), at::zeros({num_g}, at::kLong)});
      const auto features = KeyedJaggedTensor::from_lengths_sync({"f", "g"}, ids, lengths);
      const at::Tensor weight = tables.weight("t").detach().clone().requires_grad_(true);
      const at::Tensor expected = std::get<0>(
          at::embedding_bag(weight, ids.slice(0, 0, num_f), features["f"].offsets(), false,
                            pooling == PoolingType::kMean ? 1 : 0, false, {}, true));
      const at::Tensor actual = tables.forward(features)["f"];
      EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-6)) << dim;
      const at::Tensor upstream = at::randn_like(expected);
      (actual * upstream).sum().backward();
      (expected * upstream).sum().backward();
      EXPECT_TRUE(at::allclose(tables.weight("t").grad(), weight.grad(), 1e-5, 1e-6)) << dim;
    }
  }
}

TEST(EmbeddingBagCollection, TakesKeysInAnyOrderAndLeavesOthersOut) {
  EmbeddingBagCollection tables({table("t", 9, 2, {"f"})});
  const auto features =
      KeyedJaggedTensor::from_lengths_sync({"z", "f", "y"}, longs({100, 3, 200}), longs({1, 1, 1}));
  EXPECT_TRUE(at::equal(tables.forward(features).values(), tables.weight("t").slice(0, 3, 4)));
  EXPECT_EQ(error_text([&] {
              tables.forward(KeyedJaggedTensor::from_lengths_sync({"z"}, longs({1}), longs({1})));
            }),
            "embed.bag_collection: there is no feature 'f' among the 1 keys of the batch.");
}

TEST(EmbeddingBagCollection, OfAnEmptyBatchIsEmpty) {
  EmbeddingBagCollection tables({table("t", 3, 2, {"f"})});
  const auto none = KeyedJaggedTensor::from_lengths_sync({"f"}, longs({}), longs({}));
  const KeyedTensor pooled = tables.forward(none);
  EXPECT_EQ(pooled.values().sizes(), (at::IntArrayRef{0, 2}));
  pooled.values().sum().backward();
  EXPECT_EQ(tables.weight("t").grad().abs().sum().item<float>(), 0);
}

TEST(EmbeddingBagCollection, SpreadsAVariableBatch) {
  EmbeddingBagCollection tables({table("t", 5, 1, {"f"}), table("u", 5, 2, {"g"})});
  count_rows(tables.weight("t"));
  count_rows(tables.weight("u"));
  KeyedJaggedFields fields;
  fields.stride_per_key_per_rank = longs({2, 1}).view({2, 1});
  fields.inverse_indices = InverseIndices{{"g", "f"}, longs({0, 0, 0, 1, 0, 1}).view({2, 3})};
  const auto features = KeyedJaggedTensor::from_lengths_sync({"f", "g"}, longs({1, 2, 3, 4}),
                                                             longs({1, 2, 1}), fields);
  const KeyedTensor pooled = tables.forward(features);
  EXPECT_TRUE(
      at::equal(pooled.values().detach(), floats({5, 4, 4.5, 1, 4, 4.5, 5, 4, 4.5}).view({3, 3})));
  pooled["f"].sum().backward();
  EXPECT_TRUE(at::equal(tables.weight("t").grad(), floats({0, 1, 2, 2, 0}).view({5, 1})));
  fields.inverse_indices.reset();
  const auto without = KeyedJaggedTensor::from_lengths_sync({"f", "g"}, longs({1, 2, 3, 4}),
                                                            longs({1, 2, 1}), fields);
  EXPECT_EQ(error_text([&] { tables.forward(without); }),
            "embed.bag_collection: feature 'g' has a batch of 1, feature 'f' of 2. Give inverse "
            "indices with a variable batch.");
}

TEST(EmbeddingBagCollection, NamesIdsOutsideTheirTable) {
  const auto features =
      KeyedJaggedTensor::from_lengths_sync({"f", "g"}, longs({1, 5, 0}), longs({0, 2, 1, 0}));
  for (const auto mode :
       {BoundsCheckMode::kFatal, BoundsCheckMode::kWarning, BoundsCheckMode::kIgnore}) {
    EmbeddingBagCollection tables({table("t", 5, 2, {"f"}), table("u", 5, 2, {"g"})}, false,
                                  at::kCPU, {.bounds_check = mode});
    if (mode == BoundsCheckMode::kFatal) {
      const std::string text = error_text([&] { tables.forward(features); });
      for (const char* part : {"'f'", "sample 1", "5", "'t'"}) {
        EXPECT_NE(text.find(part), std::string::npos) << text;
      }
    } else {
      const at::Tensor rows = tables.weight("t").detach();
      EXPECT_TRUE(at::equal(tables.forward(features)["f"][1], rows[1] + rows[0]));
    }
  }
}

TEST(EmbeddingBagCollection, RefusesTablesThatCannotBe) {
  const auto text = [](std::vector<EmbeddingBagConfig> tables) {
    return error_text([&] { EmbeddingBagCollection collection(std::move(tables)); });
  };
  EXPECT_EQ(text({}), "embed.bag_collection: there are no tables.");
  EXPECT_EQ(text({table("", 1, 1)}),
            "embed.bag_collection: a table has no name. Give every table one of its own.");
  EXPECT_EQ(text({table("t", 1, 1), table("t", 1, 1)}),
            "embed.bag_collection: two tables are named 't'. Give every table a name of its own.");
  EXPECT_EQ(text({table("t.u", 1, 1)}),
            "embed.bag_collection: table 't.u' has a dot in its name, which parameter names cannot "
            "have.");
  EXPECT_EQ(text({table("t", 0, 4)}),
            "embed.bag_collection: table 't' has 0 rows of 4 numbers. Both must be at least 1.");
  EXPECT_EQ(text({table("t", 1, 1, {"f", "f"})}),
            "embed.bag_collection: table 't' names feature 'f' twice.");
  EXPECT_EQ(text({table("t", 1, 1, {}, PoolingType::kNone)}),
            "embed.bag_collection: table 't' has pooling NONE. Use an EmbeddingCollection.");
  EXPECT_EQ(
      text({{.num_embeddings = 1, .embedding_dim = 1, .name = "t", .data_type = DataType::kINT8}}),
      "embed.bag_collection: table 't' has rows of INT8, which do not train. Use FP32, FP16 "
      "or BF16.");
}

TEST(EmbeddingBagCollection, IsAModuleWithTheReferenceNames) {
  EmbeddingBagCollection tables({table("t", 5, 2), table("u", 3, 4)});
  const auto parameters = tables.named_parameters();
  ASSERT_EQ(parameters.size(), 2U);
  EXPECT_EQ(parameters[0].key(), "embedding_bags.t.weight");
  EXPECT_EQ(parameters[1].key(), "embedding_bags.u.weight");
  EXPECT_TRUE(parameters[0].value().requires_grad());
  EXPECT_LE(tables.weight("t").abs().max().item<float>(), std::sqrt(1.0F / 5));
  EXPECT_GT(tables.weight("t").abs().max().item<float>(), 0);
  EXPECT_EQ(error_text([&] { tables.weight("x"); }),
            "embed.bag_collection: there is no table 'x'.");
  // Moving the module changes what its parameters hold; the lookup follows.
  tables.to(at::kHalf);
  EXPECT_EQ(tables.weight("t").scalar_type(), at::kHalf);
  const auto features =
      KeyedJaggedTensor::from_lengths_sync({"t", "u"}, longs({1, 2}), longs({1, 1}));
  const at::Tensor rows = tables.forward(features)["t"];
  EXPECT_EQ(rows.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(rows.detach()[0], tables.weight("t").detach()[1].to(at::kFloat)));
}

TEST(EmbeddingBagCollection, FollowsInitFunctionAndMetaDevice) {
  EmbeddingBagConfig config = table("t", 5, 2);
  config.init_fn = [](at::Tensor weight) { weight.fill_(7); };
  EmbeddingBagCollection filled({config});
  EXPECT_TRUE(at::equal(filled.weight("t").detach(), at::full({5, 2}, 7.F)));
  EmbeddingBagCollection meta({config}, false, at::kMeta);
  EXPECT_TRUE(meta.weight("t").is_meta());
  meta.reset_parameters();
  EXPECT_EQ(error_text([&] {
              meta.forward(KeyedJaggedTensor::from_lengths_sync({"t"}, longs({1}), longs({1})));
            }),
            "embed.bag_collection: table 't' is on the meta device. Give it memory before looking "
            "up.");
}

TEST(EmbeddingCollection, KeepsRowsApart) {
  EmbeddingCollection tables({table("t", 5, 2, {"f", "g"}), table("u", 5, 3, {"g"})}, at::kCPU,
                             /*need_indices=*/true);
  count_rows(tables.weight("t"));
  count_rows(tables.weight("u"));
  const NamedRows rows = tables.forward(batch());
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0].first, "f");
  EXPECT_EQ(rows[1].first, "g@t");
  EXPECT_EQ(rows[2].first, "g@u");
  EXPECT_TRUE(
      at::equal(rows[0].second.values().detach(), floats({1, 1.5, 2, 2.5, 3, 3.5}).view({3, 2})));
  EXPECT_TRUE(at::equal(rows[2].second.values().detach(),
                        floats({0, 0.5, 1, 4, 4.5, 5, 4, 4.5, 5}).view({3, 3})));
  EXPECT_TRUE(at::equal(rows[2].second.lengths(), longs({1, 2, 0})));
  EXPECT_TRUE(at::equal(rows[2].second.weights(), longs({0, 4, 4})));
  rows[2].second.values().sum().backward();
  EXPECT_TRUE(at::equal(tables.weight("u").grad().sum(1), floats({3, 0, 0, 0, 6})));
  EXPECT_EQ(tables.named_parameters()[0].key(), "embeddings.t.weight");
  EXPECT_EQ(error_text([&] { tables.embedding_dim(); }),
            "embed.collection: table 'u' has 3 columns, table 't' has 2; there is no one number.");
  EmbeddingCollection plain({table("t", 5, 2, {"f"})});
  EXPECT_FALSE(plain.forward(batch())[0].second.weights_or_none().defined());
  EXPECT_EQ(plain.embedding_dim(), 2);
}

TEST(EmbeddingBag, EqualsLibTorch) {
  const at::Tensor input = longs({1, 2, 4, 4, 0});
  const at::Tensor offsets = longs({0, 2, 2});
  for (const auto mode : {PoolingType::kSum, PoolingType::kMean}) {
    EmbeddingBag bag({.num_embeddings = 5, .embedding_dim = 3, .mode = mode});
    const at::Tensor expected = std::get<0>(
        at::embedding_bag(bag.weight, input, offsets, false, mode == PoolingType::kMean ? 1 : 0));
    EXPECT_TRUE(at::allclose(bag.forward(input, offsets), expected));
    EXPECT_TRUE(
        at::allclose(bag.forward(input.slice(0, 0, 4).view({2, 2})),
                     std::get<0>(at::embedding_bag(bag.weight, input.slice(0, 0, 4), longs({0, 2}),
                                                   false, mode == PoolingType::kMean ? 1 : 0))));
  }
  EmbeddingBag last({.num_embeddings = 5,
                     .embedding_dim = 1,
                     .mode = PoolingType::kMean,
                     .include_last_offset = true});
  count_rows(last.weight);
  EXPECT_TRUE(at::equal(last.forward(input, longs({0, 2, 5}), floats({1, 2, 1, 1, 1})).detach(),
                        floats({2.5, 8.0 / 3}).view({2, 1})));
  EXPECT_EQ(error_text([&] { last.forward(input); }),
            "embed.bag: the input has 1 dimensions and no offsets. Give 1 dimension with offsets, "
            "or 2 without.");
  EXPECT_EQ(error_text([&] { last.forward(input, offsets, floats({1})); }),
            "embed.bag: the weights have shape [1], the input [5].");
  EXPECT_EQ(error_text([] { EmbeddingBag bag({.num_embeddings = 0, .embedding_dim = 1}); }),
            "embed.bag: the table has 0 rows of 1 numbers. Both must be at least 1.");
  EXPECT_EQ(
      error_text([] {
        EmbeddingBag bag({.num_embeddings = 1, .embedding_dim = 1, .mode = PoolingType::kNone});
      }),
      "embed.bag: the mode must be SUM or MEAN.");
}

TEST(PositionWeighted, WeighsByPlace) {
  GroupedPositionWeightedModule module({{"f", 2}, {"g", 3}});
  const auto parameters = module.named_parameters();
  EXPECT_EQ(parameters[0].key(), "position_weights.f");
  {
    const at::NoGradGuard no_grad;
    parameters[0].value().copy_(floats({10, 20}));
    parameters[1].value().copy_(floats({1, 2, 3}));
  }
  const KeyedJaggedTensor weighted = module.forward(batch());
  EXPECT_TRUE(at::equal(weighted.weights().detach(), floats({10, 20, 10, 1, 1, 2})));
  EXPECT_EQ(weighted.stride(), 3);
  (weighted.weights() * floats({1, 2, 4, 8, 16, 32})).sum().backward();
  EXPECT_TRUE(at::equal(parameters[0].value().grad(), floats({5, 2})));
  EXPECT_TRUE(at::equal(parameters[1].value().grad(), floats({24, 32, 0})));
  // Weights that are there already are positions.
  EXPECT_TRUE(at::equal(module.forward(batch(floats({1, 0, 1, 2, 0, 1}))).weights().detach(),
                        floats({20, 10, 20, 3, 1, 2})));
  module.reset_parameters();
  EXPECT_TRUE(at::equal(module.forward(batch()).weights().detach(), at::ones({6})));
}

TEST(PositionWeighted, OtherFeaturesWeighOne) {
  GroupedPositionWeightedModule module({{"g", 2}});
  const at::NoGradGuard no_grad;
  module.parameters()[0].fill_(5);
  EXPECT_TRUE(at::equal(module.forward(batch()).weights(), floats({1, 1, 1, 5, 5, 5})));
}

TEST(PositionWeighted, NamesABagThatIsTooLong) {
  GroupedPositionWeightedModule module({{"f", 1}, {"g", 3}});
  EXPECT_EQ(error_text([&] { module.forward(batch()); }),
            "embed.position_weighted: feature 'f', sample 0 has 2 ids, but there are weights for 1 "
            "positions.");
  EXPECT_EQ(error_text([&] { module.forward(batch(floats({0, 0, 0, 7, 0, 0}))); }),
            "embed.position_weighted: feature 'g' has position 7, but weights for 3 positions.");
  EXPECT_EQ(error_text([] { GroupedPositionWeightedModule({{"f", 0}}); }),
            "embed.position_weighted: feature 'f' has a longest bag of 0. It must be at least 1.");
}

TEST(PositionWeighted, OfOneFeature) {
  PositionWeightedModule module(2);
  const auto weighted = module.forward(batch()["f"]);
  EXPECT_TRUE(at::equal(weighted.weights().detach(), at::ones({3})));
  weighted.weights().sum().backward();
  EXPECT_TRUE(at::equal(module.position_weight.grad(), floats({2, 1})));
}

TEST(FeatureProcessed, PoolsRowsWithTheProcessorsWeights) {
  const auto bags = std::make_shared<EmbeddingBagCollection>(
      std::vector{table("t", 5, 1, {"f"}), table("u", 5, 1, {"g"}, PoolingType::kMean)}, true);
  count_rows(bags->weight("t"));
  count_rows(bags->weight("u"));
  const auto weights =
      std::make_shared<GroupedPositionWeightedModule>(LongestBags{{"f", 2}, {"g", 2}});
  FeatureProcessedEmbeddingBagCollection module(bags, weights);
  weights->parameters()[0].detach().copy_(floats({10, 100}));
  // f: 1 * 10 + 2 * 100, nothing, 3 * 10; g: 0, (4 + 4) / 2, nothing.
  const KeyedTensor pooled = module.forward(batch());
  EXPECT_TRUE(at::equal(pooled["f"].detach().squeeze(1), floats({210, 0, 30})));
  EXPECT_TRUE(at::equal(pooled["g"].detach().squeeze(1), floats({0, 4, 0})));
  pooled.values().sum().backward();
  EXPECT_TRUE(at::equal(weights->parameters()[0].grad(), floats({4, 2})));
  EXPECT_TRUE(at::equal(weights->parameters()[1].grad(), floats({2, 2})));
  EXPECT_TRUE(at::equal(bags->weight("t").grad().squeeze(1), floats({0, 10, 100, 10, 0})));
  const auto parameters = module.named_parameters();
  EXPECT_TRUE(parameters.contains("_embedding_bag_collection.embedding_bags.t.weight"));
  EXPECT_TRUE(parameters.contains("_feature_processors.position_weights.f"));
  EXPECT_EQ(error_text([&] {
              FeatureProcessedEmbeddingBagCollection(
                  std::make_shared<EmbeddingBagCollection>(std::vector{table("t", 5, 1)}), weights);
            }),
            "embed.feature_processed: the collection is not weighted. Make it with is_weighted.");
}

}  // namespace
}  // namespace tessera::embedding
