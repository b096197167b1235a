#include "tessera/embedding/config.h"

#include <cmath>
#include <set>
#include <unordered_map>

#include <ATen/core/grad_mode.h>

#include "tessera/core/check.h"

namespace tessera::embedding {

std::string_view name_of(DataType type) noexcept {
  switch (type) {
    case DataType::kFP32:
      return "FP32";
    case DataType::kFP16:
      return "FP16";
    case DataType::kBF16:
      return "BF16";
    case DataType::kINT8:
      return "INT8";
    case DataType::kINT4:
      return "INT4";
    case DataType::kINT2:
      return "INT2";
  }
  return "unknown";
}

std::string_view name_of(PoolingType pooling) noexcept {
  switch (pooling) {
    case PoolingType::kSum:
      return "SUM";
    case PoolingType::kMean:
      return "MEAN";
    case PoolingType::kNone:
      return "NONE";
  }
  return "unknown";
}

std::string_view name_of(BoundsCheckMode mode) noexcept {
  switch (mode) {
    case BoundsCheckMode::kFatal:
      return "FATAL";
    case BoundsCheckMode::kWarning:
      return "WARNING";
    case BoundsCheckMode::kIgnore:
      return "IGNORE";
  }
  return "unknown";
}

int bits_of(DataType type) noexcept {
  switch (type) {
    case DataType::kFP32:
      return 32;
    case DataType::kFP16:
    case DataType::kBF16:
      return 16;
    case DataType::kINT8:
      return 8;
    case DataType::kINT4:
      return 4;
    case DataType::kINT2:
      return 2;
  }
  return 0;
}

bool is_trainable(DataType type) noexcept { return bits_of(type) >= 16; }

at::ScalarType scalar_type(DataType type) {
  switch (type) {
    case DataType::kFP32:
      return at::kFloat;
    case DataType::kFP16:
      return at::kHalf;
    case DataType::kBF16:
      return at::kBFloat16;
    case DataType::kINT8:
      return at::kByte;
    default:
      break;
  }
  TESSERA_CHECK_VALUE(false, "embed.config: numbers of ", name_of(type),
                      " share bytes; no tensor type holds them one by one.");
}

std::vector<std::string> EmbeddingTableConfig::features() const {
  return feature_names.empty() ? std::vector<std::string>{name} : feature_names;
}

double EmbeddingTableConfig::get_weight_init_max() const {
  return weight_init_max.value_or(std::sqrt(1.0 / static_cast<double>(num_embeddings)));
}

double EmbeddingTableConfig::get_weight_init_min() const {
  return weight_init_min.value_or(-std::sqrt(1.0 / static_cast<double>(num_embeddings)));
}

void check_tables(std::string_view operation, const std::vector<EmbeddingTableConfig>& tables) {
  std::set<std::string_view> names;
  for (const auto& table : tables) {
    TESSERA_CHECK_VALUE(!table.name.empty(), operation,
                        ": a table has no name. Give every table one of its own.");
    TESSERA_CHECK_VALUE(table.name.find('.') == std::string::npos, operation, ": table '",
                        table.name, "' has a dot in its name, which parameter names cannot have.");
    TESSERA_CHECK_VALUE(names.insert(table.name).second, operation, ": two tables are named '",
                        table.name, "'. Give every table a name of its own.");
    TESSERA_CHECK_VALUE(table.num_embeddings > 0 && table.embedding_dim > 0, operation, ": table '",
                        table.name, "' has ", table.num_embeddings, " rows of ",
                        table.embedding_dim, " numbers. Both must be at least 1.");
    const auto features = table.features();
    std::set<std::string_view> seen;
    for (const auto& feature : features) {
      TESSERA_CHECK_VALUE(seen.insert(feature).second, operation, ": table '", table.name,
                          "' names feature '", feature, "' twice.");
    }
  }
}

std::vector<std::vector<std::string>> embedding_names_by_table(
    const std::vector<EmbeddingTableConfig>& tables) {
  std::unordered_map<std::string, int> num_tables;
  for (const auto& table : tables) {
    for (const auto& feature : table.features()) ++num_tables[feature];
  }
  std::vector<std::vector<std::string>> names;
  names.reserve(tables.size());
  for (const auto& table : tables) {
    auto& own = names.emplace_back(table.features());
    for (auto& name : own) {
      if (num_tables.at(name) > 1) name.append("@").append(table.name);
    }
  }
  return names;
}

void initialize(const EmbeddingTableConfig& table, at::Tensor weight) {
  const at::NoGradGuard no_grad;
  if (table.init_fn) {
    table.init_fn(weight);
  } else {
    weight.uniform_(table.get_weight_init_min(), table.get_weight_init_max());
  }
}

}  // namespace tessera::embedding
