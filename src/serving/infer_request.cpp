#include "serving/infer_request.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>

#include <nlohmann/json.hpp>

#include "serving/json_reader.h"
#include "serving/text_id.h"
#include "tessera/embedding/quantised_rows.h"

namespace tessera::serving {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostInputs = 4096;

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

template <typename Number>
void copy_binary(std::vector<Number>& to, std::string_view bytes) {
  to.resize(bytes.size() / sizeof(Number));
  if (!to.empty()) std::memcpy(to.data(), bytes.data(), bytes.size());
}

// The nearest FP16, as bytes and as the number it stands for.
void round_to_half(float& value, std::uint8_t* half, const std::string& name, std::size_t sample) {
  using embedding::RowType;
  if (embedding::quantise_row(RowType::kFp16, {&value, 1}, half).is_overflow) {
    throw HttpError(422,
                    "the " + name + " of sample " + std::to_string(sample) + " is " +
                        std::to_string(value) + ", which FP16 cannot hold; ask for FP32",
                    "outputs");
  }
  embedding::dequantise_row(RowType::kFp16, half, {&value, 1});
}

}  // namespace

std::vector<FeatureBags> InferRequest::bags() const {
  std::vector<FeatureBags> bags;
  for (const OwnedBags& own : features) bags.push_back({own.ids, own.lengths, own.weights});
  return bags;
}

struct InferParser::Input {
  std::string where;
  std::string name;
  std::string type;
  std::vector<std::int64_t> shape;
  bool has_shape = false;
  std::optional<std::size_t> data;      // where in the JSON it begins
  std::optional<std::uint64_t> binary;  // bytes behind the JSON
  bool is_read = false;
};

// One body while it is read.
struct InferParser::Parse {
  Parse(const InferParser& owner, std::string_view json, std::string_view tail)
      : owner(owner), json(json), tail(tail), reader(json) {
    request.features.resize(owner.names_.size());
    request.probability.is_half = request.logit.is_half = owner.has_half_outputs_;
    seen.resize(4 * owner.names_.size() + 4);
  }

  const InferParser& owner;
  std::string_view json;
  std::string_view tail;
  JsonReader reader;
  InferRequest request;
  std::optional<std::int64_t> num_samples;
  std::vector<bool> seen;
  bool has_inputs = false;

  void run() {
    reader.object([this](const std::string& key) { member(key); });
    reader.finish();
    if (!has_inputs) throw HttpError(422, "the request has no inputs", "inputs");
    if (!tail.empty()) {
      throw HttpError(400,
                      std::to_string(tail.size()) +
                          " bytes are left after the tensors; binary_data_size says how many each "
                          "has",
                      "body");
    }
    check_all_seen();
    request.num_samples = *num_samples;
    for (std::size_t f = 0; f < request.features.size(); ++f) check_bags(f);
  }

  void member(const std::string& key) {
    if (key == "id") {
      request.id = reader.string();
    } else if (key == "parameters") {
      reader.object([this](const std::string& name) {
        if (name == "request_id") {
          request.request_id = reader.string();
        } else if (name == "binary_data_output") {
          request.wants_binary = reader.boolean();
        } else {
          reader.skip();
        }
      });
    } else if (key == "inputs") {
      if (has_inputs) throw HttpError(400, "the key 'inputs' comes twice", "inputs");
      has_inputs = true;
      reader.array([this](std::size_t index) { input(index); });
    } else if (key == "outputs") {
      request.probability.is_wanted = false;
      reader.array([this](std::size_t index) { output(index); });
      if (!request.logit.is_wanted) request.probability.is_wanted = true;
    } else {
      throw HttpError(400, "unknown key '" + key.substr(0, 100) + "'", key.substr(0, 100));
    }
  }

  void output(std::size_t index) {
    const std::string where = "outputs[" + std::to_string(index) + "]";
    std::string name;
    std::string type;
    reader.object([&](const std::string& key) {
      if (key == "name") {
        name = reader.string();
      } else if (key == "parameters") {
        reader.object([&](const std::string& parameter) {
          if (parameter == "binary_data") {
            request.wants_binary = reader.boolean();
          } else if (parameter == "datatype") {
            type = reader.string();
          } else {
            reader.skip();
          }
        });
      } else {
        throw HttpError(400, "unknown key '" + key.substr(0, 100) + "'", where);
      }
    });
    if (name != "probability" && name != "logit") {
      throw HttpError(422, "there is no output '" + name.substr(0, 100) + "'", where + ".name");
    }
    WantedOutput& wanted = name == "probability" ? request.probability : request.logit;
    wanted.is_wanted = true;
    if (type.empty()) return;
    if (type != "FP32" && type != "FP16") {
      throw HttpError(422, "outputs are FP32 or FP16, not '" + type.substr(0, 100) + "'",
                      where + ".parameters.datatype");
    }
    wanted.is_half = type == "FP16";
  }

  void input(std::size_t index) {
    if (index >= kMostInputs) throw HttpError(413, "there are too many inputs", "inputs");
    Input one;
    one.where = "inputs[" + std::to_string(index) + "]";
    reader.object([&](const std::string& key) {
      if (key == "name") {
        one.name = reader.string();
      } else if (key == "datatype") {
        one.type = reader.string();
      } else if (key == "shape") {
        one.has_shape = true;
        one.shape.clear();
        try {
          reader.numbers(one.shape, 8, 0);
        } catch (const NumberError& error) {
          throw HttpError(422, error.what(), one.where + ".shape");
        }
      } else if (key == "parameters") {
        reader.object([&](const std::string& parameter) {
          if (parameter == "binary_data_size") {
            const std::int64_t size = reader.integer();
            if (size < 0) {
              throw HttpError(400, "a size is negative", one.where + ".binary_data_size");
            }
            one.binary = static_cast<std::uint64_t>(size);
          } else {
            reader.skip();
          }
        });
      } else if (key == "data") {
        one.data = reader.place();
        if (!one.name.empty() && !one.type.empty() && one.has_shape) {
          read(one, reader);
        } else {
          reader.skip();
        }
      } else {
        throw HttpError(400, "unknown key '" + key.substr(0, 100) + "'", one.where);
      }
    });
    if (one.is_read) return;
    if (one.data) {
      JsonReader again(json, *one.data);
      read(one, again);
    } else {
      read(one, reader);
    }
  }

  // Which input it is, whether its type and shape fit, and its numbers.
  void read(Input& one, JsonReader& from) {
    const std::string& where = one.where;
    one.is_read = true;
    const auto place = owner.inputs_.find(one.name);
    if (place == owner.inputs_.end()) {
      throw HttpError(422, "there is no input '" + one.name.substr(0, 100) + "'", where + ".name");
    }
    const auto [kind, feature] = place->second;
    const std::size_t slot = 4 * feature + static_cast<std::size_t>(kind);
    if (seen[slot]) throw HttpError(422, "input '" + one.name + "' comes twice", where + ".name");
    seen[slot] = true;
    const char* type = kind == Kind::kValues ? "INT64" : kind == Kind::kLengths ? "INT32" : "FP32";
    const bool is_text =
        kind == Kind::kValues && one.type == "BYTES" && owner.takes_texts_[feature];
    if (one.type != type && !is_text) {
      throw HttpError(
          422,
          "input '" + one.name + "' has type '" + one.type.substr(0, 100) + "'; it must be " + type,
          where + ".datatype");
    }
    const std::size_t count = count_of(one, kind);
    OwnedBags& bags = request.features[kind == Kind::kDense ? 0 : feature];
    switch (kind) {
      case Kind::kDense:
        return fill(one, from, request.dense, count, static_cast<std::size_t>(owner.num_dense_));
      case Kind::kValues:
        return is_text ? fill_texts(one, from, bags.ids, count)
                       : fill(one, from, bags.ids, count, 0, owner.takes_any_id_[feature]);
      case Kind::kLengths:
        return fill(one, from, bags.lengths, count, 0);
      case Kind::kWeights:
        return fill(one, from, bags.weights, count, 0);
    }
  }

  std::size_t count_of(const Input& one, Kind kind) {
    const std::string where = one.where + ".shape";
    const std::size_t num_dims = kind == Kind::kDense ? 2 : 1;
    if (!one.has_shape || one.shape.size() != num_dims || one.shape[0] < 0 ||
        (kind == Kind::kDense && one.shape[1] != owner.num_dense_)) {
      throw HttpError(
          422,
          "input '" + one.name + "' must have shape " +
              (kind == Kind::kDense ? "[samples, " + std::to_string(owner.num_dense_) + "]"
                                    : "[n]"),
          where);
    }
    if (kind == Kind::kDense || kind == Kind::kLengths) {
      if (one.shape[0] > owner.limits_.samples_per_request) {
        throw HttpError(413,
                        std::to_string(one.shape[0]) + " samples; the limit is " +
                            std::to_string(owner.limits_.samples_per_request),
                        where);
      }
      if (one.shape[0] == 0) throw HttpError(422, "there are no samples", where);
      if (num_samples && *num_samples != one.shape[0]) {
        throw HttpError(422,
                        "input '" + one.name + "' has " + std::to_string(one.shape[0]) +
                            " samples, those before it " + std::to_string(*num_samples),
                        where);
      }
      num_samples = one.shape[0];
      return static_cast<std::size_t>(one.shape[0] * (kind == Kind::kDense ? owner.num_dense_ : 1));
    }
    if (one.shape[0] > owner.limits_.ids_per_request) {
      throw HttpError(413,
                      std::to_string(one.shape[0]) + " ids; the limit is " +
                          std::to_string(owner.limits_.ids_per_request),
                      where);
    }
    return static_cast<std::size_t>(one.shape[0]);
  }

  template <typename Number>
  void fill(const Input& one, JsonReader& from, std::vector<Number>& to, std::size_t count,
            std::size_t inner, bool takes_any_id = false) {
    const std::string where = one.where + ".data";
    if (one.binary) {
      if (one.data) throw HttpError(400, "an input has data in JSON and behind it", where);
      if (*one.binary != count * sizeof(Number) || *one.binary > tail.size()) {
        throw HttpError(400,
                        "input '" + one.name + "' has " + std::to_string(*one.binary) +
                            " bytes of " + std::to_string(tail.size()) +
                            " that are left; its shape asks for " +
                            std::to_string(count * sizeof(Number)),
                        one.where + ".binary_data_size");
      }
      copy_binary(to, tail.substr(0, *one.binary));
      tail.remove_prefix(*one.binary);
      return;
    }
    if (!one.data) throw HttpError(422, "input '" + one.name + "' has no data", where);
    try {
      if constexpr (std::is_same_v<Number, std::int64_t>) {
        takes_any_id ? from.ids(to, count) : from.numbers(to, count, inner);
      } else {
        from.numbers(to, count, inner);
      }
    } catch (const NumberError& error) {
      throw HttpError(422, error.what(), where + "[" + std::to_string(error.index()) + "]");
    }
    if (to.size() != count) {
      throw HttpError(422,
                      "there are " + std::to_string(to.size()) + " numbers, the shape says " +
                          std::to_string(count),
                      where);
    }
  }

  // Texts, each of which becomes the id that training gave it.
  void fill_texts(const Input& one, JsonReader& from, std::vector<std::int64_t>& to,
                  std::size_t count) {
    const std::string where = one.where + ".data";
    if (one.binary) {
      if (one.data) throw HttpError(400, "an input has data in JSON and behind it", where);
      if (*one.binary > tail.size()) {
        throw HttpError(400,
                        "input '" + one.name + "' has " + std::to_string(*one.binary) +
                            " bytes of " + std::to_string(tail.size()) + " that are left",
                        one.where + ".binary_data_size");
      }
      read_texts(one, tail.substr(0, *one.binary), to, count);
      tail.remove_prefix(*one.binary);
    } else if (one.data) {
      from.array([&](std::size_t index) {
        if (index >= count) throw HttpError(422, "there are more texts than the shape says", where);
        to.push_back(text_id(from.string()));
      });
    } else {
      throw HttpError(422, "input '" + one.name + "' has no data", where);
    }
    if (to.size() != count) {
      throw HttpError(422,
                      "there are " + std::to_string(to.size()) + " texts, the shape says " +
                          std::to_string(count),
                      where);
    }
  }

  // Each with its length in four bytes before it.
  static void read_texts(const Input& one, std::string_view bytes, std::vector<std::int64_t>& to,
                         std::size_t count) {
    while (!bytes.empty()) {
      std::uint32_t length = 0;
      const bool has_length = bytes.size() >= sizeof(length);
      if (has_length) std::memcpy(&length, bytes.data(), sizeof(length));
      if (!has_length || length > bytes.size() - sizeof(length) || to.size() == count) {
        throw HttpError(400,
                        "text " + std::to_string(to.size()) + " of input '" + one.name +
                            "' does not fit its bytes and shape",
                        one.where + ".binary_data_size");
      }
      to.push_back(text_id(bytes.substr(sizeof(length), length)));
      bytes.remove_prefix(sizeof(length) + length);
    }
  }

  void check_all_seen() const {
    const auto check = [this](std::size_t feature, Kind kind, const std::string& name) {
      if (!seen[4 * feature + static_cast<std::size_t>(kind)]) {
        throw HttpError(422, "input '" + name + "' is missing", "inputs");
      }
    };
    check(owner.names_.size(), Kind::kDense, "dense");
    for (std::size_t f = 0; f < owner.names_.size(); ++f) {
      check(f, Kind::kValues, owner.names_[f] + ".values");
      check(f, Kind::kLengths, owner.names_[f] + ".lengths");
    }
  }

  void check_bags(std::size_t feature) {
    const OwnedBags& bags = request.features[feature];
    request.num_ids += static_cast<std::int64_t>(bags.ids.size());
    if (request.num_ids > owner.limits_.ids_per_request) {
      throw HttpError(
          413,
          "there are more than " + std::to_string(owner.limits_.ids_per_request) + " ids in all",
          "inputs");
    }
    for (std::size_t s = 0; s < bags.lengths.size(); ++s) {
      if (bags.lengths[s] > owner.limits_.ids_per_sample) {
        throw HttpError(413,
                        std::to_string(bags.lengths[s]) + " ids in a sample; the limit is " +
                            std::to_string(owner.limits_.ids_per_sample),
                        owner.names_[feature] + ".lengths[" + std::to_string(s) + "]");
      }
    }
    // A vector that is there and empty would read as none.
    const bool has_weights = seen[4 * feature + static_cast<std::size_t>(Kind::kWeights)];
    if (has_weights && bags.weights.size() != bags.ids.size()) {
      throw HttpError(422,
                      "there are " + std::to_string(bags.weights.size()) + " weights for " +
                          std::to_string(bags.ids.size()) + " values",
                      owner.names_[feature] + ".weights");
    }
  }
};

InferParser::InferParser(const ModelInfo& model, const ServerLimits& limits)
    : num_dense_(model.num_dense), has_half_outputs_(model.has_half_outputs), limits_(limits) {
  for (const FeatureInfo& feature : model.features) {
    names_.push_back(feature.name);
    takes_any_id_.push_back(model.tables[feature.table].is_growing);
    takes_texts_.push_back(takes_any_id_.back() && has_text_ids());
  }
  inputs_["dense"] = {Kind::kDense, names_.size()};
  for (std::size_t f = 0; f < names_.size(); ++f) {
    inputs_[names_[f] + ".values"] = {Kind::kValues, f};
    inputs_[names_[f] + ".lengths"] = {Kind::kLengths, f};
    inputs_[names_[f] + ".weights"] = {Kind::kWeights, f};
  }
}

InferRequest InferParser::parse(std::string_view body,
                                std::optional<std::uint64_t> json_bytes) const {
  if (json_bytes && *json_bytes > body.size()) {
    throw HttpError(400,
                    "the body has " + std::to_string(body.size()) +
                        " bytes, Inference-Header-Content-Length says " +
                        std::to_string(*json_bytes),
                    "Inference-Header-Content-Length");
  }
  const std::size_t length = json_bytes ? static_cast<std::size_t>(*json_bytes) : body.size();
  Parse parse(*this, body.substr(0, length), body.substr(length));
  try {
    parse.run();
  } catch (const JsonError& error) {
    throw HttpError(400, std::string("not the JSON of a request: ") + error.what(),
                    "byte " + std::to_string(error.place()));
  }
  return std::move(parse.request);
}

InferAnswer encode_answer(const InferRequest& request, const ModelInfo& model, std::int64_t step,
                          std::span<const float> logits) {
  std::string text = "{\"model_name\":" + quoted(model.name) + ",\"model_version\":\"" +
                     std::to_string(step) + "\"";
  if (!request.id.empty()) text += ",\"id\":" + quoted(request.id);
  if (!request.request_id.empty()) {
    text += ",\"parameters\":{\"request_id\":" + quoted(request.request_id) + "}";
  }
  text += ",\"outputs\":[";
  std::string tail;
  bool is_first = true;
  const auto add = [&](const std::string& name, const WantedOutput& wanted,
                       const std::function<float(float)>& of) {
    if (!wanted.is_wanted) return;
    const std::size_t bytes = wanted.is_half ? 2 : 4;
    text += is_first ? "{" : ",{";
    is_first = false;
    text += "\"name\":\"" + name + "\",\"datatype\":\"" + (wanted.is_half ? "FP16" : "FP32") +
            "\",\"shape\":[" + std::to_string(logits.size()) + "],";
    if (request.wants_binary) {
      text +=
          "\"parameters\":{\"binary_data_size\":" + std::to_string(bytes * logits.size()) + "}}";
    } else {
      text += "\"data\":[";
    }
    for (std::size_t i = 0; i < logits.size(); ++i) {
      float value = of(logits[i]);
      if (!std::isfinite(value)) {
        throw std::runtime_error("the model's " + name + " of sample " + std::to_string(i) +
                                 " is not finite");
      }
      std::uint8_t half[2];
      if (wanted.is_half) round_to_half(value, half, name, i);
      if (request.wants_binary) {
        const void* from = wanted.is_half ? static_cast<const void*>(half) : &value;
        tail.append(static_cast<const char*>(from), bytes);
        continue;
      }
      if (i > 0) text += ',';
      char digits[32];
      const auto end = std::to_chars(digits, digits + sizeof(digits), value);
      text.append(digits, end.ptr);
    }
    if (!request.wants_binary) text += "]}";
  };
  add("probability", request.probability, sigmoid);
  add("logit", request.logit, [](float x) { return x; });
  text += "]}";
  InferAnswer answer;
  if (request.wants_binary) answer.json_bytes = text.size();
  answer.body = std::move(text) + tail;
  return answer;
}

std::string encode_error(const std::string& what, const std::string& where) {
  std::string text = "{\"error\":" + quoted(what);
  if (!where.empty()) text += ",\"where\":" + quoted(where);
  return text + "}\n";
}

std::string encode_metadata(const ModelInfo& model, const std::vector<std::int64_t>& steps) {
  Json versions = Json::array();
  for (const std::int64_t step : steps) versions.push_back(std::to_string(step));
  Json inputs = Json::array();
  inputs.push_back({{"name", "dense"}, {"datatype", "FP32"}, {"shape", {-1, model.num_dense}}});
  for (const FeatureInfo& feature : model.features) {
    inputs.push_back({{"name", feature.name + ".values"}, {"datatype", "INT64"}, {"shape", {-1}}});
    inputs.push_back({{"name", feature.name + ".lengths"}, {"datatype", "INT32"}, {"shape", {-1}}});
  }
  Json outputs = Json::array();
  for (const char* name : {"probability", "logit"}) {
    outputs.push_back(
        {{"name", name}, {"datatype", model.has_half_outputs ? "FP16" : "FP32"}, {"shape", {-1}}});
  }
  const Json metadata = {{"name", model.name},
                         {"versions", versions},
                         {"platform", "tessera"},
                         {"inputs", inputs},
                         {"outputs", outputs}};
  return metadata.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::serving
