#include "tessera/jagged/keyed_jagged_tensor.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include "jagged/keyed_jagged_state.h"
#include "support/error_text.h"
#include "tessera/jagged/keyed_tensor.h"
#include "tessera/jagged/validate.h"

namespace tessera::jagged {
namespace {

using tessera::testing::error_text;
using Numbers = std::vector<std::int64_t>;
using Keys = std::vector<std::string>;

at::Tensor longs(const Numbers& numbers) {
  return at::tensor(numbers, at::TensorOptions(at::kLong));
}

Numbers numbers(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kLong).contiguous();
  return {wide.const_data_ptr<std::int64_t>(), wide.const_data_ptr<std::int64_t>() + wide.numel()};
}

// a: [1, 2], [], [3]; b: [4], [5], [6, 7, 8]
KeyedJaggedTensor two_features(at::ScalarType length_type = at::kLong) {
  return KeyedJaggedTensor::from_lengths_sync({"a", "b"}, longs({1, 2, 3, 4, 5, 6, 7, 8}),
                                              longs({2, 0, 1, 1, 1, 3}).to(length_type));
}

// Batches of 1, 3 and 2 samples, from two ranks.
KeyedJaggedTensor variable_batch(bool is_weighted = false) {
  const at::Tensor values = longs({1, 2, 3, 4, 5, 6, 7});
  KeyedJaggedFields fields;
  fields.stride_per_key_per_rank = longs({1, 0, 1, 2, 0, 2}).view({3, 2});
  if (is_weighted) fields.weights = values.to(at::kFloat) / 10;
  return KeyedJaggedTensor::from_lengths_sync({"a", "b", "c"}, values, longs({2, 1, 0, 1, 0, 3}),
                                              fields);
}

TEST(KeyedJaggedTensor, LaysKeysBehindEachOther) {
  for (const auto type : {at::kInt, at::kLong}) {
    const KeyedJaggedTensor kjt = two_features(type);
    EXPECT_EQ(kjt.stride(), 3);
    EXPECT_EQ(kjt.stride_per_key(), (Numbers{3, 3}));
    EXPECT_EQ(kjt.length_per_key(), (Numbers{3, 5}));
    EXPECT_EQ(kjt.offset_per_key(), (Numbers{0, 3, 8}));
    EXPECT_EQ(kjt.lengths_offset_per_key(), (Numbers{0, 3, 6}));
    EXPECT_EQ(numbers(kjt.offsets()), (Numbers{0, 2, 2, 3, 4, 5, 8}));
    EXPECT_EQ(kjt.offsets().scalar_type(), type);
    EXPECT_FALSE(kjt.variable_stride_per_key());
    EXPECT_EQ(numbers(kjt["b"].values()), (Numbers{4, 5, 6, 7, 8}));
    EXPECT_EQ(numbers(kjt["b"].offsets()), (Numbers{0, 1, 2, 5}));
  }
  const auto by_offsets = KeyedJaggedTensor::from_offsets_sync(
      {"a", "b"}, longs({1, 2, 3, 4, 5, 6, 7, 8}), longs({0, 2, 2, 3, 4, 5, 8}));
  EXPECT_TRUE(kjt_is_equal(by_offsets, two_features()));
  EXPECT_EQ(by_offsets.length_per_key(), (Numbers{3, 5}));
}

thread_local int num_operators = 0;

// What has_good_lengths says; it may call no operator, for the answer of one waits for the device.
bool knows_good_lengths(const KeyedJaggedTensor& kjt) {
  num_operators = 0;
  const auto counter =
      at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
        ++num_operators;
        return std::unique_ptr<at::ObserverContext>();
      }));
  const bool is_known = has_good_lengths(kjt);
  at::removeCallback(counter);
  EXPECT_EQ(num_operators, 0);
  return is_known;
}

// No memory stands behind the meta device: what is known of a batch there was seen before.
TEST(KeyedJaggedTensor, LengthsAreLookedAtBeforeTheyGoToADevice) {
  const at::Tensor values = longs({1, 2, 3, 4, 5, 6, 7, 8});
  const at::Tensor lengths = longs({2, 0, 1, 1, 1, 3});
  const at::Tensor offsets = longs({0, 2, 2, 3, 4, 5, 8});
  for (const auto type : {at::kInt, at::kLong}) {
    const KeyedJaggedTensor by_lengths({"a", "b"}, values, {.lengths = lengths.to(type)});
    EXPECT_TRUE(knows_good_lengths(by_lengths));
    const KeyedJaggedTensor there = by_lengths.to(at::kMeta);
    EXPECT_TRUE(knows_good_lengths(there));
    EXPECT_TRUE(knows_good_lengths(there.to(at::kMeta))) << "the same tensors";

    const KeyedJaggedTensor by_offsets({"a", "b"}, values, {.offsets = offsets.to(type)});
    EXPECT_TRUE(knows_good_lengths(by_offsets));
    const KeyedJaggedTensor moved = by_offsets.to(at::kMeta);
    EXPECT_TRUE(knows_good_lengths(moved));
    EXPECT_TRUE(moved.lengths().is_meta());
    EXPECT_TRUE(knows_good_lengths(moved)) << "of lengths made from good offsets";
  }
  EXPECT_TRUE(knows_good_lengths(KeyedJaggedTensor::empty().to(at::kMeta)));
}

TEST(KeyedJaggedTensor, LengthsThatNobodySawAreNotTakenForGood) {
  const at::Tensor values = longs({1, 2, 3});
  const KeyedJaggedTensor made_there({"a"}, values.to(at::kMeta),
                                     {.lengths = longs({2, 1}).to(at::kMeta)});
  EXPECT_FALSE(knows_good_lengths(made_there));
  EXPECT_FALSE(knows_good_lengths(made_there.to(at::kMeta)));

  for (const auto type : {at::kInt, at::kLong}) {
    const KeyedJaggedTensor negative({"a"}, values, {.lengths = longs({4, -1}).to(type)});
    EXPECT_FALSE(knows_good_lengths(negative));
    EXPECT_FALSE(knows_good_lengths(negative.to(at::kMeta)));
    const KeyedJaggedTensor falling({"a"}, values, {.offsets = longs({0, 4, 3}).to(type)});
    EXPECT_FALSE(knows_good_lengths(falling));
    EXPECT_FALSE(knows_good_lengths(falling.to(at::kMeta)));
  }
  const std::int64_t lowest = std::numeric_limits<std::int32_t>::min();
  const KeyedJaggedTensor overflows({"a"}, values, {.offsets = longs({lowest, 3}).to(at::kInt)});
  EXPECT_FALSE(knows_good_lengths(overflows)) << "3 - lowest is below zero as an int32";

  // Host memory is looked at anew, whoever wrote to it; on a device a version tells.
  const KeyedJaggedTensor here({"a"}, values, {.lengths = longs({2, 1})});
  EXPECT_TRUE(knows_good_lengths(here));
  here.lengths().mutable_data_ptr<std::int64_t>()[0] = -2;
  EXPECT_FALSE(knows_good_lengths(here));
  const KeyedJaggedTensor there = two_features().to(at::kMeta);
  EXPECT_TRUE(knows_good_lengths(there));
  at::Tensor(there.lengths()).fill_(-1);
  EXPECT_FALSE(knows_good_lengths(there));
  EXPECT_FALSE(knows_good_lengths(there.to(at::kMeta)));

  // Nobody sees that a tensor of inference is written to.
  const c10::InferenceMode inference;
  EXPECT_FALSE(knows_good_lengths(two_features().to(at::kMeta)));
}

TEST(KeyedJaggedTensor, ARepeatedKeyMeansItsLastPlace) {
  const auto kjt =
      KeyedJaggedTensor::from_lengths_sync({"a", "b", "a"}, longs({1, 2, 3}), longs({1, 1, 1}));
  EXPECT_EQ(numbers(kjt["a"].values()), (Numbers{3}));
  const auto features = kjt.to_dict();
  ASSERT_EQ(features.size(), 2U);
  EXPECT_EQ(features[0].first, "a");
  EXPECT_EQ(numbers(features[0].second.values()), (Numbers{3}));
  EXPECT_EQ(error_text([&] { kjt["z"]; }), "jagged: there is no key 'z' among 3 keys.");
}

TEST(KeyedJaggedTensor, VariableBatchHasAStridePerKey) {
  const KeyedJaggedTensor kjt = variable_batch();
  EXPECT_TRUE(kjt.variable_stride_per_key());
  EXPECT_EQ(kjt.stride_per_key(), (Numbers{1, 3, 2}));
  EXPECT_EQ(kjt.stride(), 3);
  EXPECT_EQ(kjt.length_per_key(), (Numbers{2, 2, 3}));
  EXPECT_EQ(numbers(kjt["b"].lengths()), (Numbers{1, 0, 1}));
  // Inverse indices give the batch size; equal strides are still variable.
  KeyedJaggedFields fields;
  fields.stride_per_key_per_rank = longs({2, 2}).view({2, 1});
  fields.inverse_indices = InverseIndices{{"a", "b"}, longs({0, 1, 1, 0, 1, 0, 0, 1}).view({2, 4})};
  const auto with = KeyedJaggedTensor::from_lengths_sync({"a", "b"}, longs({1, 2, 3}),
                                                         longs({1, 1, 0, 1}), fields);
  EXPECT_TRUE(with.variable_stride_per_key());
  EXPECT_EQ(with.stride(), 4);
  EXPECT_EQ(with.stride_per_key(), (Numbers{2, 2}));
  EXPECT_EQ(with.inverse_indices().first, (Keys{"a", "b"}));
  EXPECT_EQ(error_text([&] { kjt.inverse_indices(); }), "jagged: there are no inverse indices.");
}

TEST(KeyedJaggedTensor, SplitsIntoViews) {
  const KeyedJaggedTensor kjt = two_features();
  const auto parts = kjt.split({1, 0, 1});
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_EQ(parts[0].keys(), Keys{"a"});
  EXPECT_EQ(numbers(parts[0].values()), (Numbers{1, 2, 3}));
  EXPECT_EQ(parts[0].values().data_ptr(), kjt.values().data_ptr());
  EXPECT_EQ(numbers(parts[2].lengths()), (Numbers{1, 1, 3}));
  EXPECT_TRUE(parts[1].keys().empty());
  EXPECT_EQ(parts[1].stride(), 3);
  EXPECT_EQ(parts[1].values().numel(), 0);
  EXPECT_EQ(numbers(parts[1].offsets()), (Numbers{0}));
  EXPECT_TRUE(kjt.split({2})[0].is_same(kjt));
  EXPECT_TRUE(kjt.split({0, 2})[1].is_same(kjt));
  EXPECT_EQ(kjt.split({1}).size(), 1U);
  EXPECT_EQ(error_text([&] { kjt.split({2, 1}); }),
            "jagged.split: the segments have 3 keys; there are 2.");
  EXPECT_EQ(error_text([&] { kjt.split({3, -1}); }),
            "jagged.split: the segments have 2 keys; there are 2.");
}

TEST(KeyedJaggedTensor, SplitsAVariableBatch) {
  const KeyedJaggedTensor kjt = variable_batch(true);
  const auto parts = kjt.split({1, 2, 0});
  EXPECT_EQ(parts[0].stride_per_key(), (Numbers{1}));
  EXPECT_EQ(parts[1].stride_per_key(), (Numbers{3, 2}));
  EXPECT_EQ(numbers(parts[1].values()), (Numbers{3, 4, 5, 6, 7}));
  EXPECT_TRUE(at::equal(parts[1].weights(), parts[1].values().to(at::kFloat) / 10));
  EXPECT_TRUE(parts[2].variable_stride_per_key());
  EXPECT_EQ(parts[2].stride(), 3);
  EXPECT_TRUE(kjt_is_equal(KeyedJaggedTensor::concat(parts), kjt));
}

TEST(KeyedJaggedTensor, PermutesWithRepeatsAndSubsets) {
  const KeyedJaggedTensor kjt = two_features();
  const KeyedJaggedTensor moved = kjt.permute({1, 0, 1});
  EXPECT_EQ(moved.keys(), (Keys{"b", "a", "b"}));
  EXPECT_EQ(numbers(moved.values()), (Numbers{4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(numbers(moved.lengths()), (Numbers{1, 1, 3, 2, 0, 1, 1, 1, 3}));
  EXPECT_EQ(moved.length_per_key(), (Numbers{5, 3, 5}));
  EXPECT_EQ(numbers(kjt.permute({1}).values()), (Numbers{4, 5, 6, 7, 8}));
  const KeyedJaggedTensor none = kjt.permute({});
  EXPECT_EQ(none.stride(), 3);
  EXPECT_EQ(none.values().numel(), 0);
  const KeyedJaggedTensor variable = variable_batch(true).permute({2, 2, 0});
  EXPECT_EQ(variable.stride_per_key(), (Numbers{2, 2, 1}));
  EXPECT_EQ(numbers(variable.lengths()), (Numbers{0, 3, 0, 3, 2}));
  EXPECT_EQ(numbers(variable.values()), (Numbers{5, 6, 7, 5, 6, 7, 1, 2}));
  EXPECT_TRUE(at::equal(variable.weights(), variable.values().to(at::kFloat) / 10));
  EXPECT_EQ(numbers(variable.stride_per_key_per_rank()), (Numbers{0, 2, 0, 2, 1, 0}));
  EXPECT_EQ(error_text([&] { kjt.permute({2}); }), "jagged.permute: there is no key 2 among 2.");
}

TEST(KeyedJaggedTensor, GradientsReachValuesAndWeights) {
  const at::Tensor values = at::ones({3, 2}).requires_grad_(true);
  const at::Tensor weights = at::ones({3}).requires_grad_(true);
  KeyedJaggedFields fields;
  fields.weights = weights;
  const auto kjt = KeyedJaggedTensor::from_lengths_sync({"a", "b"}, values, longs({1, 2}), fields);
  const auto moved = kjt.permute({1, 1});
  (moved.values().sum() + 3 * moved.split({1, 1})[0].weights().sum()).backward();
  EXPECT_TRUE(at::equal(values.grad(), at::tensor({0.F, 0.F, 2.F, 2.F, 2.F, 2.F}).view({3, 2})));
  EXPECT_TRUE(at::equal(weights.grad(), at::tensor({0.F, 3.F, 3.F})));
}

TEST(KeyedJaggedTensor, ConcatWantsPartsOfOneKind) {
  const KeyedJaggedTensor plain = two_features();
  const KeyedJaggedTensor both = KeyedJaggedTensor::concat({plain, plain.permute({0})});
  EXPECT_EQ(both.keys(), (Keys{"a", "b", "a"}));
  EXPECT_EQ(both.stride(), 3);
  EXPECT_EQ(both.length_per_key(), (Numbers{3, 5, 3}));
  EXPECT_EQ(
      error_text([&] { KeyedJaggedTensor::concat({plain, plain.with_weights(at::ones({8}))}); }),
      "jagged.concat: part 1 has weights, unlike part 0.");
  EXPECT_EQ(error_text([&] { KeyedJaggedTensor::concat({plain, variable_batch()}); }),
            "jagged.concat: part 1 has a variable batch, unlike part 0.");
  EXPECT_EQ(error_text([&] {
              KeyedJaggedTensor::concat(
                  {plain, KeyedJaggedTensor::from_lengths_sync({"c"}, longs({1}), longs({1, 0}))});
            }),
            "jagged.concat: part 1 has a batch of 2, part 0 of 3.");
  EXPECT_EQ(error_text([] { KeyedJaggedTensor::concat({}); }),
            "jagged.concat: there is nothing to put together.");
  KeyedJaggedFields fields;
  fields.stride_per_key_per_rank = longs({1}).view({1, 1});
  fields.inverse_indices = InverseIndices{{"x"}, longs({0, 0}).view({1, 2})};
  const auto with = KeyedJaggedTensor::from_lengths_sync({"x"}, longs({1}), longs({1}), fields);
  const auto twice = KeyedJaggedTensor::concat({with, with});
  EXPECT_EQ(twice.inverse_indices().first, (Keys{"x", "x"}));
  EXPECT_EQ(twice.stride(), 2);
  fields.inverse_indices.reset();
  const auto without = KeyedJaggedTensor::from_lengths_sync({"x"}, longs({1}), longs({1}), fields);
  EXPECT_EQ(error_text([&] { KeyedJaggedTensor::concat({with, without}); }),
            "jagged.concat: part 1 has no inverse indices, unlike part 0.");
}

TEST(KeyedJaggedTensor, ComesFromAndGoesToFeatures) {
  const KeyedJaggedTensor kjt = two_features();
  EXPECT_TRUE(kjt_is_equal(KeyedJaggedTensor::from_jt_dict(kjt.to_dict()), kjt));
  const KeyedJaggedTensor variable = variable_batch(true);
  const auto again = KeyedJaggedTensor::from_jt_dict(variable.to_dict());
  EXPECT_TRUE(kjt_is_equal(again, variable));
  EXPECT_TRUE(again.variable_stride_per_key());
  EXPECT_EQ(
      error_text([&] { KeyedJaggedTensor::from_jt_dict({{"a", kjt["a"]}, {"b", variable["b"]}}); }),
      "jagged.from_jt_dict: some features have weights and others have none, 'b' among them. "
      "Give weights to all or to none.");
}

TEST(KeyedJaggedTensor, RefusesWhatDoesNotFit) {
  const auto made = [](const at::Tensor& lengths, const at::Tensor& weights = {},
                       const at::Tensor& offsets = {}, std::optional<std::int64_t> stride = {}) {
    return error_text([&] {
      KeyedJaggedTensor(
          {"a", "b"}, longs({1, 2, 3}),
          {.lengths = lengths, .offsets = offsets, .weights = weights, .stride = stride})
          .sync();
    });
  };
  EXPECT_EQ(made(at::ones({2})), "jagged: the lengths must be int32 or int64, not Float.");
  EXPECT_EQ(made({}, {}, at::ones({3})), "jagged: the offsets must be int32 or int64, not Float.");
  EXPECT_EQ(made({}), "jagged: neither lengths nor offsets are given.");
  EXPECT_EQ(made(longs({1, 2}), at::ones({4})), "jagged: there are 4 weights for 3 values.");
  EXPECT_EQ(made(longs({1, 1, 1})), "jagged: 3 lengths cannot be divided among 2 keys.");
  EXPECT_EQ(made(longs({1, 1})), "jagged: the lengths add up to 2, but there are 3 values.");
  EXPECT_EQ(made(longs({1, 2}), {}, longs({0, 1})),
            "jagged: there are 2 lengths and 2 offsets; there must be one offset more.");
  EXPECT_EQ(made(longs({1, 2}), {}, {}, 5),
            "jagged: the stride is 5, but 2 lengths of 2 keys make it 1.");
  EXPECT_EQ(error_text([] {
              KeyedJaggedTensor(
                  {"a"}, longs({}),
                  {.lengths = longs({}), .stride_per_key_per_rank = longs({1}).view({1, 1})});
            }),
            "jagged: the strides of the keys add up to 1, but there are 0 lengths.");
  EXPECT_EQ(error_text([] {
              KeyedJaggedTensor({"a"}, longs({}),
                                {.lengths = longs({}), .stride_per_key_per_rank = longs({1})});
            }),
            "jagged: stride_per_key_per_rank must be integers, [keys, ranks]; it is Long [1] for 1 "
            "keys.");
  EXPECT_EQ(error_text([] { KeyedJaggedTensor({}, longs({}), {.lengths = longs({1})}); }),
            "jagged: there are 1 lengths but no keys.");
  EXPECT_EQ(error_text([] { two_features().weights(); }), "jagged: there are no weights.");
  // More values than an int32 counts, without the memory for them.
  const at::Tensor many = at::zeros({1}, at::kByte).expand({2147483648});
  const KeyedJaggedTensor big({"a"}, many, {.lengths = longs({2147483647, 1}).to(at::kInt)});
  EXPECT_EQ(error_text([&] { big.offsets(); }),
            "jagged: 2147483648 values are more than an int32 can count. Use int64 lengths.");
}

TEST(KeyedJaggedTensor, OfNothing) {
  const auto none = KeyedJaggedTensor::empty(true);
  EXPECT_EQ(none.stride(), 0);
  EXPECT_TRUE(none.keys().empty());
  EXPECT_TRUE(none.length_per_key().empty());
  EXPECT_EQ(none.weights().numel(), 0);
  const auto no_batch = KeyedJaggedTensor::from_lengths_sync({"a", "b"}, longs({}), longs({}));
  EXPECT_EQ(no_batch.stride(), 0);
  EXPECT_EQ(no_batch.length_per_key(), (Numbers{0, 0}));
  EXPECT_EQ(no_batch["b"].values().numel(), 0);
  EXPECT_EQ(no_batch.permute({1, 0}).stride(), 0);
}

TEST(KeyedJaggedTensor, PrintsItsBags) {
  EXPECT_EQ(two_features().str(),
            "KeyedJaggedTensor({\n    \"a\": [[1, 2], [], [3]],\n    \"b\": [[4], [5], [6, 7, "
            "8]]\n})\n");
  const JaggedTensor jt(longs({1, 2}), at::tensor({0.5, 1.0}).to(at::kFloat), longs({0, 2}));
  EXPECT_EQ(jt.str(),
            "JaggedTensor({\n    \"values\": [[], [1, 2]],\n    \"weights\": [[], [0.5, "
            "1.0]]\n})\n");
  EXPECT_EQ(KeyedJaggedTensor::empty().str(), "KeyedJaggedTensor()\n");
}

TEST(KeyedJaggedTensor, KnowsWhatTravels) {
  const KeyedJaggedTensor plain = two_features();
  EXPECT_EQ(plain.dist_labels(), (Keys{"lengths", "values"}));
  EXPECT_EQ(plain.dist_splits({1, 0, 1}), (std::vector<Numbers>{{3, 0, 3}, {3, 0, 5}}));
  EXPECT_EQ(plain.dist_tensors().size(), 2U);
  const KeyedJaggedTensor variable = variable_batch(true);
  EXPECT_EQ(variable.dist_labels(), (Keys{"lengths", "values", "strides", "weights"}));
  EXPECT_EQ(variable.dist_splits({1, 2}), (std::vector<Numbers>{{1, 5}, {2, 5}, {1, 2}, {2, 5}}));
  EXPECT_EQ(numbers(variable.dist_tensors()[2]), (Numbers{1, 3, 2}));
  EXPECT_EQ(error_text([&] { plain.dist_splits({1}); }),
            "jagged.dist_splits: the destinations get 1 keys; there are 2.");
}

// What arrives is rank by rank, key by key; afterwards it is key by key, rank by rank.
TEST(KeyedJaggedTensor, IsRebuiltFromEqualBatches) {
  const auto made = KeyedJaggedTensor::dist_init(
      {"a", "b"}, {longs({1, 2, 0, 1, 1, 0, 2, 1}), longs({1, 2, 3, 4, 5, 6, 7, 8})},
      {.num_workers = 2, .recat = longs({0, 2, 1, 3}), .stride_per_rank = {2, 2}});
  EXPECT_EQ(made.stride(), 4);
  EXPECT_EQ(numbers(made.lengths()), (Numbers{1, 2, 1, 0, 0, 1, 2, 1}));
  EXPECT_EQ(numbers(made.values()), (Numbers{1, 2, 3, 5, 4, 6, 7, 8}));
  EXPECT_TRUE(made.is_synced());
}

TEST(KeyedJaggedTensor, IsRebuiltFromUnequalBatches) {
  // Rank 0 sends one sample, rank 1 two; the order is per sample.
  const auto made = KeyedJaggedTensor::dist_init(
      {"a", "b"},
      {longs({1, 2, 1, 0, 2, 1}), longs({1, 2, 3, 4, 5, 6, 7}),
       longs({1, 2, 3, 4, 5, 6, 7}).to(at::kFloat)},
      {.num_workers = 2, .recat = longs({0, 2, 3, 1, 4, 5}), .stride_per_rank = {1, 2}});
  EXPECT_EQ(made.stride(), 3);
  EXPECT_EQ(numbers(made.lengths()), (Numbers{1, 1, 0, 2, 2, 1}));
  EXPECT_EQ(numbers(made.values()), (Numbers{1, 4, 2, 3, 5, 6, 7}));
  EXPECT_EQ(numbers(made.weights()), (Numbers{1, 4, 2, 3, 5, 6, 7}));
}

TEST(KeyedJaggedTensor, IsRebuiltFromAVariableBatch) {
  // Strides: rank 0 a 1, b 2; rank 1 a 2, b 0.
  const auto made = KeyedJaggedTensor::dist_init(
      {"a", "b"}, {longs({2, 1, 0, 1, 2}), longs({1, 2, 3, 4, 5, 6}), longs({1, 2, 2, 0})},
      {.variable_stride_per_key = true, .num_workers = 2, .recat = longs({0, 2, 1, 3})});
  EXPECT_EQ(numbers(made.lengths()), (Numbers{2, 1, 2, 1, 0}));
  EXPECT_EQ(numbers(made.values()), (Numbers{1, 2, 4, 5, 6, 3}));
  EXPECT_EQ(numbers(made.stride_per_key_per_rank()), (Numbers{1, 2, 2, 0}));
  EXPECT_EQ(made.stride_per_key(), (Numbers{3, 2}));
  const auto none = KeyedJaggedTensor::dist_init(
      {}, {longs({}), longs({}), longs({})}, {.variable_stride_per_key = true, .num_workers = 2});
  EXPECT_TRUE(none.variable_stride_per_key());
  // Without keys there is nothing to reorder, whatever the order of the ranks.
  EXPECT_TRUE(KeyedJaggedTensor::dist_init(
                  {}, {longs({}), longs({}), longs({})},
                  {.variable_stride_per_key = true, .num_workers = 4, .stagger = 2})
                  .keys()
                  .empty());
  EXPECT_EQ(error_text([] {
              KeyedJaggedTensor::dist_init({"a"}, {longs({1}), longs({1})},
                                           {.num_workers = 2, .stride_per_rank = {1}});
            }),
            "jagged.dist_init: there are strides of 1 ranks, not 2.");
  EXPECT_EQ(error_text([] { KeyedJaggedTensor::dist_init({"a"}, {longs({1})}, {}); }),
            "jagged.dist_init: there are 1 tensors, not 2 or 3.");
}

TEST(KeyedJaggedTensor, MovesWithEverythingItHas) {
  const KeyedJaggedTensor kjt = variable_batch(true);
  const KeyedJaggedTensor moved = kjt.to(at::kMeta);
  EXPECT_TRUE(moved.values().is_meta());
  EXPECT_TRUE(moved.weights().is_meta());
  EXPECT_EQ(moved.length_per_key(), kjt.length_per_key());
  EXPECT_EQ(kjt.to(at::kCPU, false, at::kDouble).weights().scalar_type(), at::kDouble);
  EXPECT_EQ(two_features().size_in_bytes(), (8 + 6) * 8);
}

TEST(JaggedTensor, DerivesLengthsAndOffsets) {
  const JaggedTensor by_offsets(longs({1, 2, 3}), {}, {}, longs({0, 1, 3}));
  EXPECT_EQ(numbers(by_offsets.lengths()), (Numbers{1, 2}));
  const JaggedTensor by_lengths(longs({1, 2, 3}), {}, longs({1, 2}));
  EXPECT_EQ(numbers(by_lengths.offsets()), (Numbers{0, 1, 3}));
  EXPECT_TRUE(jt_is_equal(by_offsets, by_lengths));
  EXPECT_EQ(error_text([] { JaggedTensor(longs({1}), at::ones({2}), longs({1})); }),
            "jagged: there are 2 weights for 1 values.");
  EXPECT_EQ(error_text([] { JaggedTensor(longs({1}), {}, at::ones({1})); }),
            "jagged: the lengths must be int32 or int64, not Float.");
  EXPECT_EQ(error_text([] { JaggedTensor(longs({1})); }),
            "jagged: neither lengths nor offsets are given.");
}

TEST(JaggedTensor, GoesToDenseAndBack) {
  const auto jt = JaggedTensor::from_dense({longs({1}), longs({}), longs({7, 8})});
  EXPECT_EQ(numbers(jt.lengths()), (Numbers{1, 0, 2}));
  EXPECT_EQ(jt.to_dense()[2].numel(), 2);
  EXPECT_EQ(numbers(jt.to_padded_dense()), (Numbers{1, 0, 0, 0, 7, 8}));
  EXPECT_EQ(numbers(jt.to_padded_dense(1, 5)), (Numbers{1, 5, 7}));
  const auto dense =
      JaggedTensor::from_dense_lengths(longs({1, 2, 3, 4}).view({2, 2}), longs({1, 2}));
  EXPECT_EQ(numbers(dense.values()), (Numbers{1, 3, 4}));
  EXPECT_EQ(JaggedTensor::empty().to_padded_dense().sizes(), (at::IntArrayRef{0, 0}));
}

TEST(KeyedTensor, RegroupsColumns) {
  const at::Tensor left = at::arange(6, at::kFloat).view({2, 3}).requires_grad_(true);
  const at::Tensor right = at::arange(2, at::kFloat).view({2, 1}).requires_grad_(true);
  const KeyedTensor a({"x", "y"}, {1, 2}, left);
  const KeyedTensor b({"z"}, {1}, right);
  EXPECT_TRUE(at::equal(a["y"], left.slice(1, 1, 3)));
  const auto groups = KeyedTensor::regroup({a, b}, {{"z", "x"}, {"x", "x"}});
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_TRUE(at::equal(groups[0], at::tensor({0.F, 0.F, 1.F, 3.F}).view({2, 2})));
  (groups[0].sum() + groups[1].sum()).backward();
  EXPECT_TRUE(at::equal(left.grad(), at::tensor({3.F, 0.F, 0.F, 3.F, 0.F, 0.F}).view({2, 3})));
  EXPECT_TRUE(at::equal(right.grad(), at::ones({2, 1})));
  EXPECT_EQ(error_text([&] { KeyedTensor::regroup({a}, {{"q"}}); }),
            "jagged.regroup: none of the 1 keyed tensors has a key 'q'.");
  EXPECT_EQ(error_text([&] { a["q"]; }), "jagged.keyed_tensor: there is no key 'q'.");
  EXPECT_EQ(error_text([&] { KeyedTensor({"x"}, {2}, right); }),
            "jagged.keyed_tensor: the keys have 2 columns, the values 1.");
  EXPECT_EQ(KeyedTensor({"z"}, {1}, right).str(), "KeyedTensor({\n    \"z\": [[0.0], [1.0]]\n})\n");
}

TEST(Validate, NamesFeatureSampleAndId) {
  const KeyedJaggedTensor kjt = two_features();
  EXPECT_EQ(error_text([&] { validate(kjt, {{"a", 4}, {"b", 9}}); }), "");
  EXPECT_EQ(error_text([&] { validate(kjt, {{"a", 4}, {"b", 8}}); }),
            "jagged.validate: feature 'b', sample 2 has id 8; there are 8 rows.");
  EXPECT_EQ(error_text([&] {
              validate(KeyedJaggedTensor::from_lengths_sync({"a"}, longs({0, -1}).to(at::kInt),
                                                            longs({1, 0, 1})),
                       {{"a", 5}});
            }),
            "jagged.validate: feature 'a', sample 2 has id -1; there are 5 rows.");
  EXPECT_EQ(error_text([&] { validate(kjt, {{"q", 4}}); }),
            "jagged.validate: there is no feature 'q' among the keys.");
  const auto with = [](const at::Tensor& lengths, const at::Tensor& offsets) {
    return error_text([&] {
      validate(KeyedJaggedTensor({"a", "b"}, longs({1, 2, 3}),
                                 {.lengths = lengths, .offsets = offsets}));
    });
  };
  EXPECT_EQ(with(longs({4, -1}), {}), "jagged.validate: feature 'b', sample 0 has a length of -1.");
  EXPECT_EQ(with(longs({1, 1}), {}),
            "jagged.validate: the lengths add up to 2, but there are 3 values.");
  EXPECT_EQ(with({}, longs({1, 2, 3})), "jagged.validate: the first offset is 1, not 0.");
  EXPECT_EQ(with({}, longs({0, 4, 3})),
            "jagged.validate: feature 'b', sample 0 begins at 4 and ends at 3.");
  EXPECT_EQ(with({}, longs({0, 1, 2})),
            "jagged.validate: the last offset is 2, but there are 3 values.");
  EXPECT_EQ(with(longs({1, 2}), longs({0, 2, 3})),
            "jagged.validate: feature 'a', sample 0 has a length of 1, but the offsets say 2.");
  EXPECT_EQ(error_text(
                [] { validate(KeyedJaggedTensor({"a", "a"}, longs({}), {.lengths = longs({})})); }),
            "jagged.validate: key 'a' appears twice.");
  KeyedJaggedFields fields;
  fields.stride_per_key_per_rank = longs({1}).view({1, 1});
  fields.inverse_indices = InverseIndices{{"x"}, longs({0, 1}).view({1, 2})};
  EXPECT_EQ(error_text([&] {
              validate(KeyedJaggedTensor::from_lengths_sync({"x"}, longs({1}), longs({1}), fields));
            }),
            "jagged.validate: feature 'x', sample 1 has inverse index 1; the feature has 1 "
            "samples.");
}

}  // namespace
}  // namespace tessera::jagged
