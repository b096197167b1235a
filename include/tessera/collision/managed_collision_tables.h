// tessera/collision/managed_collision_tables.h — tables behind managed collision, on one rank: any
// ids in, rows of their own out.

#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/collision/managed_collision.h"
#include "tessera/core/export.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"

namespace tessera::collision {

/// Mapped features, if they were asked for.
using RemappedFeatures = std::optional<jagged::KeyedJaggedTensor>;

/// Maps ids, resets the rows that got another one, and pools the rows of an EmbeddingBagCollection.
///
/// Rows are reset as the config fills a new table, with the state of a fused optimizer, before the
/// lookup of the same call; an optimizer outside keeps its state of the row. Parameters and buffers
/// have the reference's names: `_embedding_module.embedding_bags.<table>.weight` and
/// `_managed_collision_collection._managed_collision_modules.<table>.<buffer>`.
class TESSERA_API ManagedCollisionEmbeddingBagCollection : public torch::nn::Module {
 public:
  ManagedCollisionEmbeddingBagCollection(std::vector<embedding::EmbeddingBagConfig> tables,
                                         const ManagedCollisionModules& modules,
                                         bool return_remapped_features = false,
                                         bool is_weighted = false,
                                         const embedding::TableBatchOptions& options = {});

  std::pair<jagged::KeyedTensor, RemappedFeatures> forward(
      const jagged::KeyedJaggedTensor& features);

  const std::shared_ptr<ManagedCollisionCollection>& ids() const noexcept { return ids_; }
  const std::shared_ptr<embedding::EmbeddingBagCollection>& tables() const noexcept {
    return tables_;
  }

 private:
  std::shared_ptr<ManagedCollisionCollection> ids_;
  std::shared_ptr<embedding::EmbeddingBagCollection> tables_;
  bool returns_remapped_;
};

/// The same over an EmbeddingCollection: the rows of single ids.
class TESSERA_API ManagedCollisionEmbeddingCollection : public torch::nn::Module {
 public:
  ManagedCollisionEmbeddingCollection(std::vector<embedding::EmbeddingConfig> tables,
                                      const ManagedCollisionModules& modules,
                                      bool return_remapped_features = false,
                                      const embedding::TableBatchOptions& options = {});

  std::pair<embedding::NamedRows, RemappedFeatures> forward(
      const jagged::KeyedJaggedTensor& features);

  const std::shared_ptr<ManagedCollisionCollection>& ids() const noexcept { return ids_; }
  const std::shared_ptr<embedding::EmbeddingCollection>& tables() const noexcept { return tables_; }

 private:
  std::shared_ptr<ManagedCollisionCollection> ids_;
  std::shared_ptr<embedding::EmbeddingCollection> tables_;
  bool returns_remapped_;
};

}  // namespace tessera::collision
