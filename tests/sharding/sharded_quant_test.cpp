#include "tessera/sharding/sharded_quant_embedding_bag_collection.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace tessera::sharding {
namespace {

using embedding::DataType;
using embedding::EmbeddingBagCollection;
using embedding::EmbeddingBagConfig;
using embedding::EmbeddingCollection;
using embedding::PoolingType;
using embedding::QuantEmbeddingBagCollection;
using embedding::QuantEmbeddingCollection;
using jagged::KeyedJaggedFields;
using jagged::KeyedJaggedTensor;

// The text of the error of this kind that some work throws; empty if there is none.
template <typename Error, typename Work>
std::string error_text(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

constexpr DataType kTypes[] = {DataType::kFP32, DataType::kFP16, DataType::kBF16,
                               DataType::kINT8, DataType::kINT4, DataType::kINT2};

EmbeddingBagConfig table(const std::string& name, std::int64_t rows, std::int64_t dim,
                         std::vector<std::string> features,
                         PoolingType pooling = PoolingType::kSum) {
  EmbeddingBagConfig config;
  config.name = name;
  config.num_embeddings = rows;
  config.embedding_dim = dim;
  config.feature_names = std::move(features);
  config.pooling = pooling;
  return config;
}

std::vector<EmbeddingBagConfig> tables() {
  return {table("a", 20, 16, {"f", "g"}), table("b", 9, 8, {"h"}, PoolingType::kMean),
          table("c", 33, 8, {"i"})};
}

// Features in another order than the tables', empty bags among them.
KeyedJaggedTensor batch(bool is_weighted = false) {
  at::manual_seed(4);
  const std::vector<std::int64_t> rows = {33, 20, 9, 20};
  const at::Tensor lengths = at::randint(0, 5, {4, 6}, at::kLong);
  std::vector<at::Tensor> ids;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    const auto count = lengths[static_cast<std::int64_t>(k)].sum().item<std::int64_t>();
    ids.push_back(at::randint(0, rows[k], {count}, at::kLong));
  }
  const at::Tensor values = at::cat(ids);
  KeyedJaggedFields fields;
  if (is_weighted) fields.weights = at::rand({values.numel()});
  return KeyedJaggedTensor::from_lengths_sync({"i", "f", "h", "g"}, values, lengths.flatten(),
                                              fields);
}

std::shared_ptr<QuantEmbeddingBagCollection> quantised(DataType type, bool is_weighted = false) {
  at::manual_seed(3);
  return QuantEmbeddingBagCollection::from_float(EmbeddingBagCollection(tables(), is_weighted),
                                                 type);
}

std::map<std::string, ModulePlan> plans() {
  const Topology topology{3, 3};
  const auto all = [&](const Placement& wish) {
    return make_module_plan(tables(), {{"a", wish}, {"b", wish}, {"c", wish}}, topology);
  };
  return {
      {"table_wise", all(table_wise(1))},
      {"row_wise", all(row_wise())},
      {"column_wise", all(column_wise({2, 0}))},
      {"two_parts_on_one_device", all(column_wise({1, 1}))},
      {"mixed", make_module_plan(
                    tables(), {{"a", column_wise({0, 2})}, {"b", row_wise()}, {"c", table_wise(2)}},
                    topology)}};
}

const std::vector<at::Device> kThree(3, at::Device(at::kCPU));

TEST(QuantCollection, PoolsTheRoundedRows) {
  for (const DataType type : kTypes) {
    for (const bool is_weighted : {false, true}) {
      const auto module = quantised(type, is_weighted);
      EmbeddingBagCollection plain(tables(), is_weighted);
      at::NoGradGuard no_grad;
      for (const auto& config : tables()) {
        plain.weight(config.name).copy_(module->dequantised(config.name));
      }
      const auto found = module->forward(batch(is_weighted));
      const auto wanted = plain.forward(batch(is_weighted));
      EXPECT_EQ(found.keys(), wanted.keys());
      EXPECT_TRUE(at::allclose(found.values(), wanted.values(), 1e-5, 1e-5))
          << embedding::name_of(type);
    }
  }
}

TEST(QuantCollection, ShowsRowsAsBuffersThatAreTheTables) {
  const auto module = quantised(DataType::kINT8);
  const auto buffers = module->named_buffers();
  ASSERT_NE(buffers.find("embedding_bags.a.weight"), nullptr);
  EXPECT_EQ(buffers["embedding_bags.a.weight"].sizes(), at::IntArrayRef({20, 32}));
  EXPECT_EQ(buffers["embedding_bags.b.weight"].sizes(), at::IntArrayRef({9, 16}));
  for (const auto& buffer : buffers) buffer.value().zero_();
  EXPECT_EQ(module->forward(batch()).values().abs().sum().item<float>(), 0.0F);
  module->to(at::kFloat);
  EXPECT_THROW(module->forward(batch()), c10::ValueError);
}

TEST(QuantCollection, RowsStayApart) {
  at::manual_seed(1);
  const std::vector<EmbeddingBagConfig> configs = {table("a", 20, 8, {"f", "g"}),
                                                   table("b", 9, 4, {"h"})};
  EmbeddingCollection plain(configs, at::kCPU, true);
  const auto module = QuantEmbeddingCollection::from_float(plain, DataType::kINT8);
  at::NoGradGuard no_grad;
  for (const auto& config : configs) {
    plain.weight(config.name).copy_(module->dequantised(config.name));
  }
  const auto found = module->forward(batch());
  const auto wanted = plain.forward(batch());
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].first, wanted[i].first);
    EXPECT_TRUE(at::equal(found[i].second.values(), wanted[i].second.values()));
    EXPECT_TRUE(at::equal(found[i].second.lengths(), wanted[i].second.lengths()));
    EXPECT_TRUE(at::equal(found[i].second.weights().to(at::kLong),
                          wanted[i].second.weights().to(at::kLong)));
  }
  EXPECT_NE(module->named_buffers().find("embeddings.b.weight"), nullptr);
}

TEST(QuantCollection, NamesWhatCannotBe) {
  at::manual_seed(3);
  EmbeddingBagCollection plain(tables());
  {
    at::NoGradGuard no_grad;
    plain.weight("c")[7][3] = std::numeric_limits<float>::quiet_NaN();
  }
  EXPECT_NE(error_text<c10::ValueError>([&] {
              QuantEmbeddingBagCollection::from_float(plain, DataType::kINT8);
            }).find("row 7 of table 'c'"),
            std::string::npos);
  EXPECT_NE(error_text<c10::ValueError>([&] {
              QuantEmbeddingBagCollection(tables(), false, {16, at::kLong});
            }).find("outputs are floating point"),
            std::string::npos);
  EXPECT_NE(error_text<c10::ValueError>([&] {
              quantised(DataType::kINT8)->forward(batch().permute({0, 1, 3}));
            }).find("no feature 'h'"),
            std::string::npos);
}

TEST(ShardedQuant, IsTheModuleWithoutAGroupOrALoadedState) {
  for (const auto& [name, plan] : plans()) {
    for (const DataType type : kTypes) {
      for (const bool is_weighted : {false, true}) {
        const auto module = quantised(type, is_weighted);
        const auto sharded = QuantEmbeddingBagCollectionSharder().shard(*module, plan, kThree);
        const auto found = sharded->forward(batch(is_weighted));
        const auto wanted = module->forward(batch(is_weighted));
        EXPECT_EQ(found.keys(), wanted.keys());
        EXPECT_TRUE(at::allclose(found.values(), wanted.values(), 1e-5, 1e-5))
            << name << " " << embedding::name_of(type) << " " << is_weighted;
        if (name != "row_wise" && name != "mixed") {
          EXPECT_TRUE(at::equal(found.values(), wanted.values())) << name;
        }
      }
    }
  }
}

TEST(ShardedQuant, GivesBackAndTakesWholeTables) {
  for (const auto& [name, plan] : plans()) {
    const auto module = quantised(DataType::kINT4);
    ShardedQuantEmbeddingBagCollection sharded(*module, plan, kThree);
    const auto whole = sharded.whole();
    for (const auto& config : tables()) {
      EXPECT_TRUE(at::equal(whole->rows(config.name), module->rows(config.name))) << name;
    }
    const auto copied = sharded.copy();
    for (const auto& config : tables()) {
      sharded.load(config.name, at::zeros_like(module->rows(config.name)));
    }
    EXPECT_EQ(sharded.forward(batch()).values().abs().sum().item<float>(), 0.0F);
    EXPECT_TRUE(at::allclose(copied->forward(batch()).values(), module->forward(batch()).values(),
                             1e-5, 1e-5));
    const std::string text =
        error_text<c10::ValueError>([&] { sharded.load("a", at::zeros({20, 99}, at::kByte)); });
    EXPECT_NE(text.find("[20, 99]"), std::string::npos) << text;
    EXPECT_NE(text.find("20 rows of 16 bytes"), std::string::npos) << text;
  }
}

TEST(ShardedQuant, AnIdOutsideIsNamedAndNeverRow0) {
  for (const auto& [name, plan] : plans()) {
    for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{33}, std::int64_t{1} << 40}) {
      const KeyedJaggedTensor features = batch();
      at::Tensor values = features.values().clone();
      values[2] = bad;  // the first feature is "i"
      const auto module = quantised(DataType::kINT8);
      ShardedQuantEmbeddingBagCollection sharded(*module, plan, kThree);
      const std::string text =
          error_text<c10::IndexError>([&] { sharded.forward(features.with_values(values)); });
      EXPECT_NE(text.find("table 'c' has 33 rows; id " + std::to_string(bad) +
                          " at position 2 of feature 'i'"),
                std::string::npos)
          << name << ": " << text;
    }
  }
}

TEST(ShardedQuant, GoesInSteps) {
  const auto module = quantised(DataType::kINT8);
  ShardedQuantEmbeddingBagCollection sharded(*module, plans().at("mixed"), kThree);
  const auto features = sharded.input_dist(batch());
  ASSERT_EQ(features.size(), 3U);
  for (const KJTList& list : features) EXPECT_EQ(list.size(), 3U);
  const auto parts = sharded.compute(features);
  EXPECT_TRUE(at::allclose(sharded.output_dist(parts).values(), module->forward(batch()).values(),
                           1e-5, 1e-5));
  std::size_t count = 0;
  for (const auto& [tbe, config] : sharded.tbes_configs()) {
    EXPECT_EQ(tbe->tables().size(), config.tables.size());
    count += config.tables.size();
  }
  EXPECT_EQ(count, 6U);  // two columns' parts, three of rows, one whole
}

TEST(ShardedQuant, PlansThatCannotBe) {
  const auto module = quantised(DataType::kINT4);
  EXPECT_NE(error_text<c10::ValueError>([] {
              create_infer_embedding_bag_sharding(ShardingType::kGrid, {}, kThree);
            }).find("Sharding type not supported grid_shard"),
            std::string::npos);
  ModulePlan plan = plans().at("table_wise");
  plan.erase("b");
  EXPECT_NE(error_text<c10::ValueError>([&] {
              ShardedQuantEmbeddingBagCollection(*module, plan, kThree);
            }).find("b"),
            std::string::npos);
  const auto thirds = make_module_plan(
      tables(), {{"a", table_wise(0)}, {"b", column_wise({0, 1}, {3, 5})}, {"c", table_wise(0)}},
      {3, 3});
  EXPECT_NE(error_text<c10::ValueError>([&] {
              ShardedQuantEmbeddingBagCollection(*module, thirds, kThree);
            }).find("share a byte"),
            std::string::npos);
  EXPECT_THROW(ShardedQuantEmbeddingBagCollection(*module, plans().at("mixed"), {}),
               c10::ValueError);
}

// Weights that grow along the features of a batch.
class Counting : public embedding::FeatureProcessor {
 public:
  KeyedJaggedTensor forward(const KeyedJaggedTensor& features) override {
    return features.with_weights(features.values().to(at::kFloat) + 1);
  }
};

TEST(ShardedQuant, FeaturesGetTheirWeightsOnEachDevice) {
  const auto module = quantised(DataType::kINT8, true);
  const auto wanted = module->forward(Counting().forward(batch()));
  const QuantFeatureProcessedEmbeddingBagCollectionSharder sharder;
  const auto one = [] { return std::make_shared<Counting>(); };
  for (const char* name : {"table_wise", "column_wise", "two_parts_on_one_device"}) {
    const auto sharded = sharder.shard(*module, plans().at(name), kThree, {one(), one(), one()});
    EXPECT_TRUE(at::equal(sharded->forward(batch()).values(), wanted.values())) << name;
  }
  EXPECT_NE(error_text<c10::ValueError>([&] {
              sharder.shard(*module, plans().at("row_wise"), kThree, {one(), one(), one()});
            }).find("is cut by rows"),
            std::string::npos);
  EXPECT_THROW(sharder.shard(*module, plans().at("table_wise"), kThree, {one()}), c10::ValueError);
}

TEST(ShardedQuant, SharderKnowsWhatTablesTake) {
  const auto module = quantised(DataType::kINT8);
  const QuantEmbeddingBagCollectionSharder sharder;
  EXPECT_EQ(sharder.sharding_types().size(), 3U);
  EXPECT_EQ(sharder.compute_kernels(at::kCPU), std::vector<std::string>{"quant"});
  EXPECT_EQ(sharder.compute_kernels(at::kCUDA).size(), 3U);
  const auto rows = sharder.shardable_parameters(*module);
  EXPECT_EQ(rows.size(), 3U);
  EXPECT_EQ(sharder.storage_usage(rows.at("a"), at::kCPU).at("ddr"), 20 * 32);
  EXPECT_EQ(sharder.storage_usage(rows.at("a"), at::kCUDA).at("hbm"), 20 * 32);
  EXPECT_NE(error_text<c10::ValueError>([&] {
              QuantEmbeddingBagCollectionSharder({"a"}).shardable_parameters(*module);
            }).find("'b', 'c'"),
            std::string::npos);
  EXPECT_TRUE(QuantEmbeddingBagCollectionSharder({"z"}).shardable_parameters(*module).empty());
  EXPECT_EQ(QuantFeatureProcessedEmbeddingBagCollectionSharder().sharding_types().size(), 2U);
}

TEST(InferLookups, OfSeveralDevices) {
  const std::vector<GroupedQuantConfig> first = {
      {{{"a", 4, 2, embedding::RowType::kFp32, {"f"}}}, PoolingType::kSum, false, false}};
  const std::vector<GroupedQuantConfig> third = {
      {{{"b", 3, 2, embedding::RowType::kFp32, {"g"}}}, PoolingType::kMean, false, false}};
  const at::Tensor a = at::arange(8, at::kFloat).view({4, 2});
  const at::Tensor b = at::arange(6, at::kFloat).view({3, 2}) * 10;
  const auto features = KeyedJaggedTensor::from_lengths_sync(
      {"f", "g"}, at::tensor({1, 3, 2, 0}, at::kLong), at::tensor({2, 0, 0, 2}, at::kLong));
  const KJTList lists = KJTOneToAll({1, 0, 1}, kThree).forward(features);
  InferGroupedPooledEmbeddingsLookup pooled({first, {}, third}, kThree);
  ASSERT_EQ(pooled.named_rows().size(), 2U);
  EXPECT_EQ(pooled.named_rows()[1].first, "b.weight");
  const auto bytes = [](const at::Tensor& rows, std::int64_t width) {
    at::Tensor wide = at::zeros({rows.size(0), width}, at::kByte);
    wide.narrow(1, 0, 8).copy_(rows.contiguous().view(at::kByte));
    return wide;
  };
  pooled.load_rows({{"a.weight", bytes(a, 16)}, {"b.weight", bytes(b, 16)}});
  const auto found = pooled.forward(lists);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_TRUE(at::equal(found[0], at::tensor({8.0F, 10.0F, 0.0F, 0.0F}).view({2, 2})));
  EXPECT_TRUE(at::equal(found[1], at::tensor({0.0F, 0.0F, 20.0F, 30.0F}).view({2, 2})));
  EXPECT_TRUE(at::equal(EmbeddingsAllToOne(at::kCPU, 2, 1).forward(found), at::cat(found, 1)));
  EXPECT_TRUE(at::equal(EmbeddingsAllToOneReduce(at::kCPU, 2).forward(found), found[0] + found[1]));
  EXPECT_EQ(SeqEmbeddingsAllToOne(at::kCPU, 2).forward(found).size(), 2U);
  EXPECT_THROW(EmbeddingsAllToOne(at::kCPU, 3, 1).forward(found), c10::ValueError);
  EXPECT_THROW(KJTOneToAll({1, 1}, kThree), c10::ValueError);

  InferGroupedEmbeddingsLookup sequence({first, {}, third}, kThree);
  sequence.load_rows({{"a.weight", bytes(a, 16)}, {"b.weight", bytes(b, 16)}});
  const auto rows = sequence.forward(lists);
  EXPECT_TRUE(at::equal(rows[0], a.index_select(0, at::tensor({1, 3}, at::kLong))));
  EXPECT_TRUE(at::equal(rows[1], b.index_select(0, at::tensor({2, 0}, at::kLong))));

  EXPECT_NE(error_text<c10::ValueError>([&] { pooled.load_rows({{"a.weight", a}}); }).find("here"),
            std::string::npos);
  pooled.load_rows({{"a.weight", bytes(a, 16) * 0}}, false);
  EXPECT_EQ(pooled.forward(lists)[0].abs().sum().item<float>(), 0.0F);
  EXPECT_NE(error_text<c10::ValueError>([&] {
              pooled.forward({lists[0]});
            }).find("features for 1 devices, not for 3"),
            std::string::npos);
  EXPECT_THROW(InferGroupedPooledEmbeddingsLookup({first}, kThree), c10::ValueError);
}

TEST(InferLookups, FlattenLengths) {
  KeyedJaggedFields fields;
  fields.lengths = at::tensor({1, 2, 0, 1}, at::kInt).view({2, 2});
  const KeyedJaggedTensor features({"f", "g"}, at::arange(4), fields);
  const KeyedJaggedTensor flat = flatten_feature_lengths(features);
  EXPECT_EQ(flat.lengths().dim(), 1);
  EXPECT_TRUE(flatten_feature_lengths(flat).is_same(flat));
}

}  // namespace
}  // namespace tessera::sharding
