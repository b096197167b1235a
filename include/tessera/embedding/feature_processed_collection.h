// tessera/embedding/feature_processed_collection.h — pooled tables whose features get weights
// first.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/feature_processor.h"

namespace tessera::embedding {

/// An EmbeddingBagCollection behind a processor, e.g. position weights; both get gradients.
///
/// Parameters are `_embedding_bag_collection.embedding_bags.<table>.weight` and, under
/// `_feature_processors.`, those of the processor, as in the Python module.
class TESSERA_API FeatureProcessedEmbeddingBagCollection : public torch::nn::Module {
 public:
  /// Throws ValueError unless the collection is weighted.
  FeatureProcessedEmbeddingBagCollection(std::shared_ptr<EmbeddingBagCollection> bags,
                                         std::shared_ptr<FeatureProcessor> processor);

  /// Features need no weights; those they have are what the processor makes of them.
  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features);

  const std::shared_ptr<EmbeddingBagCollection>& bags() const noexcept { return bags_; }
  const std::shared_ptr<FeatureProcessor>& processor() const noexcept { return processor_; }
  const std::vector<EmbeddingBagConfig>& embedding_bag_configs() const noexcept;
  bool is_weighted() const noexcept { return true; }
  at::Tensor weight(const std::string& table) const;

  /// Looks up through `forward` from now on. The child `_embedding_bag_collection` of `tables`
  /// takes the place of the collection's own tables; the processor stays.
  void delegate(const std::shared_ptr<torch::nn::Module>& tables,
                EmbeddingBagCollection::Forward forward);

 private:
  std::shared_ptr<EmbeddingBagCollection> bags_;
  std::shared_ptr<FeatureProcessor> processor_;
  EmbeddingBagCollection::Forward forward_;  // elsewhere; empty: here
};

}  // namespace tessera::embedding
