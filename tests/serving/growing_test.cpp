// Tables of any ids: exported, served, and updated with new and removed ids. What they predict is
// what a model of fixed tables with the same rows does, to the bit.

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "published.h"
#include "serving/infer_request.h"
#include "serving/text_id.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

using checkpoint::Reader;
using embedding::RowType;

constexpr std::int64_t kDim = SmallModel::kDim;

// A model whose third table grows.
struct GrowingModel {
  SmallModel small;  // the other tables, and the layers
  std::vector<std::int64_t> ids;
  Tensor rows;
  Tensor unknown = Tensor(kDim, 0.25F);
  bool trains_unknown = true;
  std::mt19937_64 random{5};

  explicit GrowingModel(std::int64_t num_ids) {
    for (std::int64_t i = 0; i < num_ids; ++i) add_id(static_cast<std::int64_t>(random()));
    if (num_ids > 3) {
      ids[0] = 0;
      ids[1] = -1;
      ids[2] = std::numeric_limits<std::int64_t>::min();
    }
  }
  void add_id(std::int64_t id) {
    ids.push_back(id);
    std::normal_distribution<float> normal(0, 0.5F);
    for (std::int64_t c = 0; c < kDim; ++c) rows.push_back(normal(random));
  }
  void remove(std::size_t place) {
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(place));
    const auto from = rows.begin() + static_cast<std::ptrdiff_t>(place * kDim);
    rows.erase(from, from + kDim);
  }

  void save(const std::string& root, std::int64_t step) const {
    std::vector<checkpoint::Part> parts;
    const auto add = [&](const std::string& name, checkpoint::Dtype dtype,
                         std::vector<std::int64_t> shape, const void* data) {
      checkpoint::Part part;
      part.name = name;
      part.dtype = dtype;
      part.region = {std::vector<std::int64_t>(shape.size(), 0), shape};
      part.shape = std::move(shape);
      part.data = static_cast<const std::byte*>(data);
      parts.push_back(std::move(part));
    };
    const std::string grown = "tables.embedding_bags.t_2";
    for (const auto& [name, tensor] : small.tensors) {
      if (name.starts_with(grown)) continue;
      add(name, checkpoint::Dtype::kF32, tensor.first, tensor.second.data());
    }
    const auto count = static_cast<std::int64_t>(ids.size());
    add(grown + ".ids", checkpoint::Dtype::kI64, {count}, ids.data());
    add(grown + ".weight", checkpoint::Dtype::kF32, {count, kDim}, rows.data());
    if (trains_unknown) {
      add(grown + ".unknown", checkpoint::Dtype::kF32, {1, kDim}, unknown.data());
    }
    checkpoint::save_parts(root, step, {parts}, {});
  }

  // The same model with fixed tables: behind the rows those of unknown ids, and zeros.
  SmallModel fixed() const {
    SmallModel model = small;
    Tensor all = rows;
    all.insert(all.end(), unknown.begin(), unknown.end());
    all.resize(all.size() + kDim);
    model.rows[2] = static_cast<std::int64_t>(ids.size()) + 2;
    model.tensors["tables.embedding_bags.t_2.weight"] = {{model.rows[2], kDim}, std::move(all)};
    return model;
  }
};

// Samples of ids, a fifth of which no table knows.
struct GrowingSamples : Samples {
  GrowingSamples(const GrowingModel& model, std::int64_t num_samples)
      : Samples(model.small, num_samples) {
    std::mt19937_64 random(9);
    for (std::int64_t& id : ids[2]) {
      id = random() % 5 == 0 || model.ids.empty() ? static_cast<std::int64_t>(random())
                                                  : model.ids[random() % model.ids.size()];
    }
  }
};

std::vector<float> predict_fixed(const GrowingModel& model, Samples samples, RowType type,
                                 bool zeroes_unknown = false) {
  const Folder folder;
  ExportOptions options;
  options.type = type;
  export_model(model.fixed(), folder, options);
  std::map<std::int64_t, std::int64_t> places;
  for (std::size_t i = 0; i < model.ids.size(); ++i) {
    places[model.ids[i]] = static_cast<std::int64_t>(i);
  }
  const auto num_ids = static_cast<std::int64_t>(model.ids.size());
  for (std::int64_t& id : samples.ids[2]) {
    const auto found = places.find(id);
    id = found != places.end() ? found->second : num_ids + (zeroes_unknown ? 1 : 0);
  }
  Model fixed(folder / "pkg");
  return Published::predict(fixed, samples);
}

void export_growing(const GrowingModel& model, const Folder& folder, RowType type) {
  model.save(folder / "root", 40);
  ExportOptions options;
  options.type = type;
  write_package(Reader(folder / "root", 40), folder / "pkg", options);
}

TEST(ServingGrowing, PredictsAsFixedTablesWithTheSameRows) {
  for (const std::int64_t num_ids : {0, 1, 57, 5000}) {
    for (const RowType type : {RowType::kFp32, RowType::kInt8, RowType::kInt4}) {
      const Folder folder;
      const GrowingModel grown(num_ids);
      export_growing(grown, folder, type);
      const GrowingSamples samples(grown, 100);
      Model model(folder / "pkg");
      auto lease = model.lease();
      EXPECT_EQ(Published::predict(lease, samples), predict_fixed(grown, samples, type));
      EXPECT_GT(lease.figures().num_unknown, 0);
      EXPECT_LT(lease.figures().num_unknown,
                static_cast<std::int64_t>(samples.ids[2].size()) + (num_ids < 4 ? 1 : 0));
      Model zero(folder / "pkg", ModelOptions{.unknown = UnknownIds::kZero});
      EXPECT_EQ(Published::predict(zero, samples), predict_fixed(grown, samples, type, true));
    }
  }
}

TEST(ServingGrowing, UnknownIdsThatWereNotTrainedReadZeros) {
  const Folder folder;
  GrowingModel grown(30);
  grown.trains_unknown = false;
  grown.unknown.assign(kDim, 0.0F);
  export_growing(grown, folder, RowType::kInt8);
  const GrowingSamples samples(grown, 50);
  Model model(folder / "pkg", ModelOptions{.keep_versions = 1});
  EXPECT_EQ(Published::predict(model, samples), predict_fixed(grown, samples, RowType::kInt8));
  grown.add_id(123456789);
  grown.save(folder / "root", 41);
  model.update(Reader(folder / "root", 41));
  EXPECT_EQ(Published::predict(model, samples), predict_fixed(grown, samples, RowType::kInt8));
}

TEST(ServingGrowing, UpdatesBringAndRemoveIds) {
  const Folder folder;
  GrowingModel grown(200);
  export_growing(grown, folder, RowType::kInt4);
  Model model(folder / "pkg", ModelOptions{.keep_versions = 2});
  const GrowingSamples samples(grown, 200);
  const auto before = Published::predict(model, samples);
  for (std::int64_t step = 41; step < 47; ++step) {
    for (int i = 0; i < 3; ++i) grown.remove(grown.random() % grown.ids.size());
    // Ids that the samples ask for come too, and enough of others to split pages.
    if (step == 42) {
      std::set<std::int64_t> known(grown.ids.begin(), grown.ids.end());
      for (const std::int64_t id : samples.ids[2]) {
        if (known.insert(id).second) grown.add_id(id);
      }
    }
    for (int i = 0; i < 2000; ++i) grown.add_id(static_cast<std::int64_t>(grown.random()));
    for (float& x : grown.rows) x *= 0.9F;
    for (float& x : grown.unknown) x += 0.5F;
    grown.save(folder / "root", step);
    model.update(Reader(folder / "root", step));
    auto lease = model.lease();
    EXPECT_EQ(Published::predict(lease, samples), predict_fixed(grown, samples, RowType::kInt4));
  }
  ASSERT_TRUE(model.lease(44));
  EXPECT_FALSE(model.lease(43));
  EXPECT_NE(Published::predict(model, samples), before);
}

TEST(ServingGrowing, RequestsBesideUpdatesBelongToOneVersionEach) {
  const Folder folder;
  GrowingModel grown(500);
  export_growing(grown, folder, RowType::kInt8);
  Model model(folder / "pkg", ModelOptions{.keep_versions = 2});
  const GrowingSamples samples(grown, 30);
  std::vector<std::vector<float>> wanted = {Published::predict(model, samples)};
  constexpr int kUpdates = 12;
  for (int i = 1; i <= kUpdates; ++i) {
    for (int k = 0; k < 20; ++k) grown.remove(grown.random() % grown.ids.size());
    for (int k = 0; k < 300; ++k) grown.add_id(static_cast<std::int64_t>(grown.random()));
    for (float& x : grown.rows) x += 0.125F;
    grown.save(folder / "root", 40 + i);
    wanted.push_back(predict_fixed(grown, samples, RowType::kInt8));
  }
  std::atomic<bool> is_over = false;
  std::atomic<int> num_torn = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!is_over) {
        auto lease = model.lease();
        const auto got = Published::predict(lease, samples);
        if (got != wanted[static_cast<std::size_t>(lease.step() - 40)]) ++num_torn;
      }
    });
  }
  for (int i = 1; i <= kUpdates; ++i) {
    const Reader reader(folder / "root", 40 + i);
    while (true) {
      try {
        model.update(reader);
        break;
      } catch (const std::runtime_error&) {
        std::this_thread::yield();  // requests hold all versions for now
      }
    }
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_torn, 0);
  EXPECT_EQ(Published::predict(model, samples), wanted.back());
}

TEST(ServingGrowing, WhatDoesNotFitChangesNothing) {
  const Folder folder;
  GrowingModel grown(40);
  export_growing(grown, folder, RowType::kInt8);
  Model model(folder / "pkg", ModelOptions{.keep_versions = 1});
  const GrowingSamples samples(grown, 40);
  const auto before = Published::predict(model, samples);
  std::int64_t step = 41;
  const auto expect_refused = [&](const std::string& text) {
    grown.save(folder / "root", step);
    try {
      model.update(Reader(folder / "root", step));
      ADD_FAILURE() << "was taken: " << text;
    } catch (const checkpoint::Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
    ++step;
    EXPECT_EQ(Published::predict(model, samples), before);
  };
  const GrowingModel good = grown;
  grown.add_id(grown.ids[7]);
  expect_refused("41 rows for 40 ids");
  grown = good;
  grown.rows[3] = std::numeric_limits<float>::quiet_NaN();
  expect_refused("the row of id 0 of table 't_2' holds a NaN");
  grown = good;
  grown.unknown[0] = -1e6F;
  expect_refused("the row of unknown ids of table 't_2'");
  // A package in which an id has two rows.
  grown = good;
  grown.add_id(grown.ids[7]);
  const Folder other;
  export_growing(grown, other, RowType::kInt8);
  EXPECT_THROW(Model(other / "pkg"), checkpoint::Error);
}

TEST(ServingGrowing, UnsignedIdsAreThoseOfTheSameBits) {
  const Folder folder;
  GrowingModel grown(10);
  export_growing(grown, folder, RowType::kFp32);
  const Package package(folder / "pkg");
  const InferParser parser(package.model(), ServerLimits{});
  const auto body_of = [](const std::string& fixed, const std::string& any) {
    return R"({"inputs":[{"name":"dense","shape":[1,5],"datatype":"FP32","data":[0,0,0,0,0]},)"
           R"({"name":"t_0.values","shape":[1],"datatype":"INT64","data":[)" +
           fixed +
           R"(]},)"
           R"({"name":"t_0.lengths","shape":[1],"datatype":"INT32","data":[1]},)"
           R"({"name":"t_1.values","shape":[0],"datatype":"INT64","data":[]},)"
           R"({"name":"t_1.lengths","shape":[1],"datatype":"INT32","data":[0]},)"
           R"({"name":"t_2.lengths","shape":[1],"datatype":"INT32","data":[3]},)"
           R"({"name":"t_2.values","shape":[3],"datatype":"INT64","data":[)" +
           any + R"(]}]})";
  };
  using Limits = std::numeric_limits<std::int64_t>;
  const auto request =
      parser.parse(body_of("0", "9223372036854775808,-5,18446744073709551615"), std::nullopt);
  EXPECT_EQ(request.features[2].ids, (std::vector<std::int64_t>{Limits::min(), -5, -1}));
  const auto text_of = [&](const std::string& body) -> std::string {
    try {
      parser.parse(body, std::nullopt);
    } catch (const HttpError& error) {
      return std::to_string(error.code()) + " " + error.what();
    }
    return "";
  };
  for (const std::string large : {"18446744073709551616", "-9223372036854775809"}) {
    EXPECT_EQ(text_of(body_of("0", "1,2," + large)), "422 number " + large + " is too large");
  }
  EXPECT_EQ(text_of(body_of("0", "1,2,0.5")), "422 number 0.5 is not whole");
  EXPECT_EQ(text_of(body_of("0", "1,2,3,4")), "422 there are more numbers than the shape says");
  // Rows of a fixed table are no bits.
  EXPECT_EQ(text_of(body_of("9223372036854775808", "1,2,3")),
            "422 number 9223372036854775808 is too large");
}

TEST(ServingGrowing, TextsAreTheIdsThatTrainingMadeOfThem) {
  if (!has_text_ids()) GTEST_SKIP() << "built without xxHash";
  EXPECT_EQ(static_cast<std::uint64_t>(text_id("abc")), 0x78AF5F94892F3950U);
  const Folder folder;
  GrowingModel grown(10);
  export_growing(grown, folder, RowType::kFp32);
  const Package package(folder / "pkg");
  const InferParser parser(package.model(), ServerLimits{});
  const std::string others =
      R"({"inputs":[{"name":"dense","shape":[1,5],"datatype":"FP32","data":[0,0,0,0,0]},)"
      R"({"name":"t_0.values","shape":[0],"datatype":"INT64","data":[]},)"
      R"({"name":"t_0.lengths","shape":[1],"datatype":"INT32","data":[0]},)"
      R"({"name":"t_1.values","shape":[0],"datatype":"INT64","data":[]},)"
      R"({"name":"t_1.lengths","shape":[1],"datatype":"INT32","data":[0]},)"
      R"({"name":"t_2.lengths","shape":[1],"datatype":"INT32","data":[2]},)";
  const std::string values = R"({"name":"t_2.values","shape":[2],"datatype":"BYTES",)";
  const auto request = parser.parse(others + values + R"("data":["abc","é"]}]})", std::nullopt);
  EXPECT_EQ(request.features[2].ids,
            (std::vector<std::int64_t>{text_id("abc"), text_id("\xc3\xa9")}));
  const std::string head = others + values + R"("parameters":{"binary_data_size":13}}]})";
  const std::string tail("\3\0\0\0abc\2\0\0\0\xc3\xa9", 13);
  EXPECT_EQ(parser.parse(head + tail, head.size()).features[2].ids, request.features[2].ids);
  const auto code_of = [&](const std::string& body, std::optional<std::uint64_t> json_bytes) {
    try {
      parser.parse(body, json_bytes);
      return 200;
    } catch (const HttpError& error) {
      EXPECT_TRUE(error.where().starts_with("inputs[6]")) << error.where();
      return error.code();
    }
  };
  EXPECT_EQ(code_of(others + values + R"("data":["abc"]}]})", std::nullopt), 422);
  EXPECT_EQ(code_of(others + values + R"("data":["a","b","c"]}]})", std::nullopt), 422);
  std::string wrong = tail;
  wrong[0] = 10;  // a byte more than there are
  EXPECT_EQ(code_of(head + wrong, head.size()), 400);
  // A table of fixed rows has no texts.
  std::string fixed = others;
  fixed.replace(fixed.find("INT64"), 5, "BYTES");
  EXPECT_THROW(parser.parse(fixed + values + R"("data":["a","b"]}]})", std::nullopt), HttpError);
}

}  // namespace
}  // namespace tessera::serving
