// Bodies of requests, good and hostile.

#include "serving/infer_request.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "serving/json_reader.h"

namespace tessera::serving {
namespace {

ModelInfo two_features() {
  ModelInfo model;
  model.num_dense = 2;
  model.features = {{"user", 0, false}, {"item", 1, false}};
  model.tables.resize(2);
  return model;
}

const std::string kGood =
    R"({"id": "a", "inputs": [
      {"name": "dense", "shape": [2, 2], "datatype": "FP32", "data": [[0.5, -1], [2e1, 0]]},
      {"name": "user.values", "shape": [3], "datatype": "INT64", "data": [7, 8, 9]},
      {"name": "user.lengths", "shape": [2], "datatype": "INT32", "data": [2, 1]},
      {"data": [5], "name": "item.values", "datatype": "INT64", "shape": [1]},
      {"name": "item.lengths", "shape": [2], "datatype": "INT32", "data": [0, 1]}]})";

InferRequest parse(const std::string& body) {
  return InferParser(two_features(), ServerLimits{}).parse(body, std::nullopt);
}

void expect_error(const std::string& body, int code, const std::string& where,
                  std::optional<std::uint64_t> json_bytes = std::nullopt) {
  try {
    InferParser(two_features(), ServerLimits{}).parse(body, json_bytes);
    ADD_FAILURE() << "accepted: " << body;
  } catch (const HttpError& error) {
    EXPECT_EQ(error.code(), code) << error.what() << '\n' << body;
    EXPECT_EQ(error.where(), where) << error.what() << '\n' << body;
  }
}

std::string with(const std::string& from, const std::string& to) {
  std::string body = kGood;
  const std::size_t place = body.find(from);
  EXPECT_NE(place, std::string::npos) << from;
  return body.replace(place, from.size(), to);
}

// An error at the byte where `bad` begins, which stands for `from`, or some bytes behind it.
void expect_bad_byte(const std::string& from, const std::string& bad, std::size_t behind = 0) {
  const std::string body = with(from, bad);
  expect_error(body, 400, "byte " + std::to_string(body.find(bad) + behind));
}

TEST(InferRequest, ReadsNumbersInAnyOrderOfMembers) {
  const InferRequest request = parse(kGood);
  EXPECT_EQ(request.id, "a");
  EXPECT_EQ(request.num_samples, 2);
  EXPECT_EQ(request.num_ids, 4);
  EXPECT_EQ(request.dense, (std::vector<float>{0.5F, -1, 20, 0}));
  EXPECT_EQ(request.features[0].ids, (std::vector<std::int64_t>{7, 8, 9}));
  EXPECT_EQ(request.features[0].lengths, (std::vector<std::int32_t>{2, 1}));
  EXPECT_EQ(request.features[1].ids, (std::vector<std::int64_t>{5}));
  EXPECT_TRUE(request.probability.is_wanted);
  EXPECT_FALSE(request.wants_binary);
}

TEST(InferRequest, ReadsTensorsBehindTheJson) {
  const std::string json =
      R"({"inputs": [
        {"name": "dense", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
        {"name": "user.values", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 16}},
        {"name": "user.lengths", "shape": [1], "datatype": "INT32", "data": [2]},
        {"name": "item.values", "shape": [0], "datatype": "INT64", "data": []},
        {"name": "item.lengths", "shape": [1], "datatype": "INT32", "parameters": {"binary_data_size": 4}}],
        "outputs": [{"name": "logit", "parameters": {"binary_data": true}}]})";
  std::string body = json;
  const auto append = [&](auto value) {
    body.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  append(1.5F);
  append(-2.0F);
  append(std::int64_t{1} << 40);
  append(std::int64_t{3});
  append(std::int32_t{0});
  const InferRequest request = InferParser(two_features(), ServerLimits{}).parse(body, json.size());
  EXPECT_EQ(request.dense, (std::vector<float>{1.5F, -2}));
  EXPECT_EQ(request.features[0].ids, (std::vector<std::int64_t>{std::int64_t{1} << 40, 3}));
  EXPECT_EQ(request.features[1].lengths, (std::vector<std::int32_t>{0}));
  EXPECT_TRUE(request.wants_binary && request.logit.is_wanted && !request.probability.is_wanted);

  ModelInfo model = two_features();
  model.step = 9;
  const std::vector<float> logits = {0.25F};
  const InferAnswer answer = encode_answer(request, model, model.step, logits);
  ASSERT_EQ(answer.body.size(), answer.json_bytes + 4);
  float value = 0;
  std::memcpy(&value, answer.body.data() + answer.json_bytes, 4);
  EXPECT_EQ(value, 0.25F);

  expect_error(body + "x", 400, "body", json.size());
  expect_error(body.substr(0, body.size() - 1), 400, "inputs[4].binary_data_size", json.size());
  expect_error(body, 400, "Inference-Header-Content-Length", body.size() + 1);
}

TEST(InferRequest, OutputsAreHalvesWhereTheyAreAskedFor) {
  const std::string asks =
      R"(, "outputs": [{"name": "logit", "parameters": {"datatype": "FP16"}}, {"name": "probability"}]})";
  const std::string body = kGood.substr(0, kGood.rfind('}')) + asks;
  InferRequest request = parse(body);
  EXPECT_TRUE(request.logit.is_half);
  EXPECT_FALSE(request.probability.is_half);
  const ModelInfo model = two_features();
  const std::vector<float> logits = {0.1F, -2.0F};
  const std::string json = encode_answer(request, model, 1, logits).body;
  EXPECT_NE(json.find(R"("name":"probability","datatype":"FP32","shape":[2],"data":[0.52)"),
            std::string::npos)
      << json;
  // The nearest half.
  EXPECT_NE(json.find(R"("name":"logit","datatype":"FP16","shape":[2],"data":[0.099975586,-2]})"),
            std::string::npos)
      << json;
  request.wants_binary = true;
  const InferAnswer answer = encode_answer(request, model, 1, logits);
  ASSERT_EQ(answer.body.size(), answer.json_bytes + 2 * 4 + 2 * 2);
  std::uint16_t halves[2];
  std::memcpy(halves, answer.body.data() + answer.json_bytes + 8, 4);
  EXPECT_EQ(halves[0], 0x2E66);
  EXPECT_EQ(halves[1], 0xC000);

  // As the package says, unless the request says something else.
  ModelInfo half = two_features();
  half.has_half_outputs = true;
  const InferParser parser(half, ServerLimits{});
  EXPECT_TRUE(parser.parse(kGood, std::nullopt).probability.is_half);
  std::string other = body;
  other.replace(other.find("FP16"), 4, "FP32");
  EXPECT_FALSE(parser.parse(other, std::nullopt).logit.is_half);
  EXPECT_TRUE(parser.parse(other, std::nullopt).probability.is_half);
  EXPECT_NE(encode_metadata(half, {1}).find("FP16"), std::string::npos);

  other.replace(other.find("\"FP32\"}}"), 6, "\"FP64\"");
  expect_error(other, 422, "outputs[0].parameters.datatype");
  const std::vector<float> large = {70000.0F, 0.0F};
  EXPECT_THROW(encode_answer(request, model, 1, large), HttpError);
  const std::vector<float> infinite = {INFINITY, 0.0F};
  EXPECT_THROW(encode_answer(parse(body), model, 1, infinite), std::runtime_error);
}

TEST(InferRequest, SaysWhatIsWrongAndWhere) {
  expect_error("", 400, "byte 0");
  expect_error("[]", 400, "byte 0");
  expect_error("{", 400, "byte 1");
  expect_error(kGood + "x", 400, "byte " + std::to_string(kGood.size()));
  expect_error("{}", 422, "inputs");
  expect_error(R"({"inputs": []})", 422, "inputs");
  expect_error(with("\"id\"", "\"di\""), 400, "di");
  expect_error(with("user.values", "usher.values"), 422, "inputs[1].name");
  expect_error(with("item.values", "user.values"), 422, "inputs[3].name");
  expect_error(with("\"INT64\"", "\"INT32\""), 422, "inputs[1].datatype");
  expect_error(with("[2, 2]", "[2, 3]"), 422, "inputs[0].shape");
  expect_error(with("[2, 2]", "[3, 2]"), 422, "inputs[0].data");
  expect_error(with("[2, 2]", "[-2, 2]"), 422, "inputs[0].shape");
  expect_error(with("[2, 2]", "[4]"), 422, "inputs[0].shape");
  expect_error(with("[3]", "[4]"), 422, "inputs[1].data");
  expect_error(with("[3]", "[2]"), 422, "inputs[1].data[2]");
  expect_error(with("[3]", "[9000000000000]"), 413, "inputs[1].shape");
  expect_error(with("[7, 8, 9]", "[7, 8.5, 9]"), 422, "inputs[1].data[1]");
  expect_error(with("[7, 8, 9]", "[7, 8, 99999999999999999999]"), 422, "inputs[1].data[2]");
  expect_bad_byte("[7, 8, 9]", "[7, \"8\", 9]", 4);
  expect_bad_byte("[7, 8, 9]", "null");
  expect_error(with("[2, 1]", "[2, 1e0]"), 422, "inputs[2].data[1]");
  expect_error(with("2e1", "2e99"), 422, "inputs[0].data[2]");
  expect_bad_byte("2e1", "NaN");
  expect_bad_byte("2e1", "02", 1);
  expect_error(with("[2e1, 0]", "[2e1]"), 422, "inputs[0].data[3]");
  expect_error(with("\"data\": [2, 1]", "\"shape\": [2]"), 422, "inputs[2].data");
  expect_error(with("\"id\": \"a\"", "\"outputs\": [{\"name\": \"x\"}]"), 422, "outputs[0].name");
  ServerLimits tight;
  tight.ids_per_request = 3;
  EXPECT_THROW(InferParser(two_features(), tight).parse(kGood, std::nullopt), HttpError);
  tight = {};
  tight.ids_per_sample = 1;
  EXPECT_THROW(InferParser(two_features(), tight).parse(kGood, std::nullopt), HttpError);
  EXPECT_EQ(parse(with("2e1", "1e-60")).dense[2], 0.0F);
}

TEST(InferRequest, DeepNestingAndLongStringsEnd) {
  expect_error(R"({"parameters": {"x": )" + std::string(100000, '[') + "}}", 400, "byte 53");
  expect_error(R"({"id": ")" + std::string(100000, 'x') + "\"}", 400,
               "byte " + std::to_string(8 + (1 << 16) + 1));
}

TEST(InferRequest, StringsAreDecoded) {
  EXPECT_EQ(JsonReader(R"("a\n\u00e9\ud83d\ude00\"")").string(), "a\n\xC3\xA9\xF0\x9F\x98\x80\"");
  for (const char* bad : {R"("\ud83d")", R"("\udc00")", R"("\x")", R"("\u12g4")", "\"\n\"", "\""}) {
    EXPECT_THROW(JsonReader(bad).string(), JsonError) << bad;
  }
}

// Bytes changed, cut out and doubled at random: an answer or an HttpError, nothing else.
TEST(InferRequest, DamagedBodiesNeverDoMoreThanFail) {
  std::mt19937 random(7);
  const InferParser parser(two_features(), ServerLimits{});
  int num_read = 0;
  for (int round = 0; round < 40000; ++round) {
    std::string body = kGood;
    for (unsigned change = 1 + random() % 4; change > 0 && !body.empty(); --change) {
      const std::size_t place = random() % body.size();
      constexpr std::string_view kBytes = "{}[]\",:0123456789.-+eE\\ntfu \x01\xFF";
      switch (random() % 4) {
        case 0:
          body[place] = kBytes[random() % kBytes.size()];
          break;
        case 1:
          body.erase(place, 1 + random() % 20);
          break;
        case 2:
          body.insert(place, body.substr(random() % body.size(), random() % 20));
          break;
        default:
          body[place] = static_cast<char>(random());
      }
    }
    try {
      std::optional<std::uint64_t> json_bytes;
      if (random() % 4 == 0) json_bytes = random() % (body.size() + 2);
      parser.parse(body, json_bytes);
      ++num_read;
    } catch (const HttpError& error) {
      EXPECT_TRUE(error.code() == 400 || error.code() == 413 || error.code() == 422);
    }
  }
  EXPECT_GT(num_read, 100);
}

TEST(InferRequest, TextsOfErrorsAreJson) {
  const std::string text = encode_error("a \"quoted\" \xFF thing", "inputs[0]");
  std::string error;
  JsonReader reader(text);
  reader.object([&](const std::string& key) {
    const std::string value = reader.string();
    if (key == "error") error = value;
  });
  EXPECT_EQ(error, "a \"quoted\" \xEF\xBF\xBD thing");
}

}  // namespace
}  // namespace tessera::serving
