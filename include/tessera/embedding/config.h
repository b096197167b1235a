// tessera/embedding/config.h — what an embedding table is, before it has weights.
//
// Configs are plain records. The same ones describe tables on one rank and tables cut over many.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::embedding {

/// How the numbers of a row are stored. Rows that train are kFP32, kFP16 or kBF16; the others are
/// for serving.
enum class DataType : std::uint8_t { kFP32, kFP16, kBF16, kINT8, kINT4, kINT2 };

/// What happens to the rows of one bag. kNone keeps them apart.
///
/// There is one meaning of the mean, with per-sample weights or without: the (weighted) sum of the
/// rows divided by the number of ids in the bag. An empty bag is zero.
enum class PoolingType : std::uint8_t { kSum, kMean, kNone };

/// What happens to an id outside its table.
///
/// kFatal throws IndexError that names feature, sample and id, before anything is looked up.
/// kWarning reads row 0 in its place and says so once per process. kIgnore reads row 0 silently.
/// In the gradient such an id counts as row 0, which is the row that was read.
enum class BoundsCheckMode : std::uint8_t { kFatal, kWarning, kIgnore };

/// "FP32", "FP16", "BF16", "INT8", "INT4" or "INT2".
TESSERA_API std::string_view name_of(DataType type) noexcept;
/// "SUM", "MEAN" or "NONE".
TESSERA_API std::string_view name_of(PoolingType pooling) noexcept;
/// "FATAL", "WARNING" or "IGNORE".
TESSERA_API std::string_view name_of(BoundsCheckMode mode) noexcept;

/// Bits of one number of a row: 32, 16, 16, 8, 4, 2.
TESSERA_API int bits_of(DataType type) noexcept;
/// Whether rows of the type can be trained.
TESSERA_API bool is_trainable(DataType type) noexcept;
/// The type of the tensor that holds the rows. Throws ValueError for kINT4 and kINT2, of which
/// several share a byte.
TESSERA_API at::ScalarType scalar_type(DataType type);

/// One table. `feature_names` are the keys of the input that look up in it; none means `name`.
struct EmbeddingTableConfig {
  std::int64_t num_embeddings = 0;
  std::int64_t embedding_dim = 0;
  std::string name;
  DataType data_type = DataType::kFP32;
  std::vector<std::string> feature_names;
  /// Not read by an EmbeddingCollection.
  PoolingType pooling = PoolingType::kSum;
  /// Bounds of the uniform numbers a table starts with; by default ±sqrt(1 / num_embeddings).
  std::optional<double> weight_init_max;
  std::optional<double> weight_init_min;
  /// Fills a new table in place of the uniform numbers.
  std::function<void(at::Tensor)> init_fn;

  /// `feature_names`, or the table's own name if there are none.
  TESSERA_API std::vector<std::string> features() const;
  TESSERA_API double get_weight_init_max() const;
  TESSERA_API double get_weight_init_min() const;
};
using EmbeddingBagConfig = EmbeddingTableConfig;
using EmbeddingConfig = EmbeddingTableConfig;

/// Throws ValueError for a table without a name, rows or columns, for two tables of one name, and
/// for a feature that a table names twice. `operation` begins the text.
TESSERA_API void check_tables(std::string_view operation,
                              const std::vector<EmbeddingTableConfig>& tables);

/// The names of the outputs, table by table, feature by feature: the feature's name if one table
/// uses it, `feature@table` if several do.
TESSERA_API std::vector<std::vector<std::string>> embedding_names_by_table(
    const std::vector<EmbeddingTableConfig>& tables);

/// Fills `weight` as the config says: `init_fn`, or uniform numbers within its bounds.
TESSERA_API void initialize(const EmbeddingTableConfig& table, at::Tensor weight);

}  // namespace tessera::embedding
