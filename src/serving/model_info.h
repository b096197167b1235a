// src/serving/model_info.h — a model's description as text, and the tensors it asks for.

#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/serving/package.h"

namespace tessera::serving {

inline constexpr const char* kModelFile = "model.json";
inline constexpr const char* kPackageMark = "package";  // a value of the manifest
inline constexpr std::int64_t kPackageVersion = 1;
inline constexpr std::int64_t kGrowingVersion = 2;  // with tables that grow

// Names of tensors in a checkpoint of `tessera train dlrm`.
inline constexpr const char* kTablePrefix = "tables.embedding_bags.";
inline constexpr const char* kWeightSuffix = ".weight";
// Of tables that grow.
inline constexpr const char* kIdsSuffix = ".ids";
inline constexpr const char* kUnknownSuffix = ".unknown";
inline constexpr const char* kDensePrefix = "model.";

std::string encode_model(const ModelInfo& model);
/// Throws checkpoint::Error(kCorrupt) that begins with `where` unless everything fits together.
ModelInfo decode_model(std::string_view text, const std::string& where);

/// Whether a request for the one is a request for the other, and answered in the same types.
bool has_same_inputs(const ModelInfo& a, const ModelInfo& b);

bool has_growing(const ModelInfo& model);
/// Ids up to which a growing table that begins with so many has room.
std::int64_t most_ids(std::int64_t num_ids);

/// Names and shapes of the dense tensors.
std::vector<std::pair<std::string, std::vector<std::int64_t>>> dense_tensors(
    const ModelInfo& model);
/// Numbers that enter the top layers.
std::int64_t mixed_width(const ModelInfo& model);

}  // namespace tessera::serving
