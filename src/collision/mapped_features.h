// src/collision/mapped_features.h — features whose ids become rows, table by table.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/embedding/config.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::collision {

/// The features that tables look up, in the order of the tables, as often as they do.
class MappedFeatures {
 public:
  /// Throws ValueError, naming feature and table, for a feature that is not there.
  MappedFeatures(const std::vector<embedding::EmbeddingTableConfig>& tables,
                 const jagged::KeyedJaggedTensor& features);

  /// The ids of a table, feature by feature.
  at::Tensor ids_of(std::size_t table) const;
  /// The features with these values in place of all ids, table by table, by the names of the
  /// result.
  jagged::KeyedJaggedTensor with_rows(const at::Tensor& rows) const;

 private:
  std::vector<std::string> names_;    // of the result
  std::vector<std::string> sources_;  // the features they are of
  jagged::KeyedJaggedTensor arranged_;
  std::optional<jagged::InverseIndices> inverse_;
  std::vector<std::int64_t> first_;  // value of each table, and the end
};

/// The tables with the names that their features have once they are mapped.
std::vector<embedding::EmbeddingTableConfig> mapped_configs_of(
    std::vector<embedding::EmbeddingTableConfig> tables);

/// Fills rows of a table as its config fills a new one, and lets a fused optimizer begin anew.
void reset_rows(const embedding::EmbeddingTableConfig& table, const at::Tensor& weight,
                const at::Tensor& rows, const std::vector<at::Tensor>& states,
                const embedding::OptimizerOptions& optimizer);

}  // namespace tessera::collision
