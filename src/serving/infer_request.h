// src/serving/infer_request.h — requests and answers of the Open Inference Protocol, version 2.
//
// Inputs: `dense` FP32 [samples, n]; for each feature `<feature>.values` INT64 [ids] (or BYTES if
// its table grows: texts),
// `<feature>.lengths` INT32 [samples] and, if wanted, `<feature>.weights` FP32 [ids]. Outputs:
// `probability` and, if asked for, `logit`, [samples], FP32 or FP16: as the package says, or the
// parameter `datatype` of an output.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/serving/model.h"
#include "tessera/serving/server.h"

namespace tessera::serving {

/// An answer that is not 200: what is wrong, and where in the request.
class HttpError : public std::runtime_error {
 public:
  HttpError(int code, const std::string& what, std::string where = {})
      : std::runtime_error(what), code_(code), where_(std::move(where)) {}
  int code() const noexcept { return code_; }
  const std::string& where() const noexcept { return where_; }

 private:
  int code_;
  std::string where_;
};

struct OwnedBags {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> lengths;
  std::vector<float> weights;
};

/// One output of a request.
struct WantedOutput {
  bool is_wanted = false;
  bool is_half = false;  // FP16
};

struct InferRequest {
  std::string id;
  std::string request_id;
  std::int64_t num_samples = 0;
  std::int64_t num_ids = 0;
  std::vector<float> dense;
  std::vector<OwnedBags> features;  // in the model's order
  WantedOutput probability{true, false};
  WantedOutput logit;
  bool wants_binary = false;

  std::vector<FeatureBags> bags() const;
};

/// What inputs a model has, by name.
class InferParser {
 public:
  InferParser(const ModelInfo& model, const ServerLimits& limits);

  /// Reads a body, of which the first `json_bytes` are JSON and the rest tensors; without a number,
  /// all is JSON. Throws HttpError 400 for what no model could understand, 413 for too many ids or
  /// samples, 422 for what this one cannot.
  InferRequest parse(std::string_view body, std::optional<std::uint64_t> json_bytes) const;

 private:
  enum class Kind : std::uint8_t { kDense, kValues, kLengths, kWeights };
  struct Place {
    Kind kind;
    std::size_t feature;
  };
  struct Input;
  struct Parse;

  std::vector<std::string> names_;  // of features
  std::vector<bool> takes_any_id_;  // of 64 bits, by feature
  std::vector<bool> takes_texts_;   // instead of ids, by feature
  std::int64_t num_dense_;
  bool has_half_outputs_;
  std::map<std::string, Place> inputs_;
  ServerLimits limits_;
};

struct InferAnswer {
  std::string body;
  std::uint64_t json_bytes = 0;  // 0: all of it is JSON
};

/// Logits of a model's version `step` as an answer. Throws HttpError 422 for a number that FP16,
/// where it was asked for, cannot hold; std::runtime_error for one that is not finite.
InferAnswer encode_answer(const InferRequest& request, const ModelInfo& model, std::int64_t step,
                          std::span<const float> logits);
/// {"error": ..., "where": ...}
std::string encode_error(const std::string& what, const std::string& where);
/// The answer to GET /v2/models/{name}.
std::string encode_metadata(const ModelInfo& model, const std::vector<std::int64_t>& steps);

}  // namespace tessera::serving
