// tessera/sharding/sharded_feature_processed_collection.h — pooled lookups of tables cut over
// ranks, of features that get weights first.

#pragma once

#include <memory>
#include <vector>

#include "tessera/embedding/feature_processor.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::sharding {

/// A FeatureProcessedEmbeddingBagCollection whose tables lie over the ranks of a group as a plan
/// says. The processor is whole on every rank and processes the rank's own features, when the rows
/// are read: so a batch whose ids were sent ahead still meets the parameters of its turn.
///
/// Gradients of the processor's parameters are those of the rank's own loss. Averaged over the
/// ranks, by DistributedDataParallel or DistributedModelParallel, they equal those of one process
/// with all batches. Collective as ShardedEmbeddingBagCollection is.
class TESSERA_API ShardedFeatureProcessedEmbeddingBagCollection : public torch::nn::Module,
                                                                  public ShardedTables {
 public:
  /// Throws as ShardedEmbeddingBagCollection does.
  ShardedFeatureProcessedEmbeddingBagCollection(
      std::vector<embedding::EmbeddingBagConfig> tables,
      std::shared_ptr<embedding::FeatureProcessor> processor, ModulePlan plan, comm::Group group,
      ShardedOptions options = {});

  /// A batch that the processor cannot process, as far as `longest_bags` tells, is the same
  /// ValueError on all ranks.
  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features);
  /// Processes the features, sends their weights, reads the rows and starts sending them home.
  comm::LazyAwaitable<jagged::KeyedTensor> compute_and_output_dist(const DistributedInput& input);

  const std::shared_ptr<ShardedEmbeddingBagCollection>& bags() const noexcept { return bags_; }
  const std::shared_ptr<embedding::FeatureProcessor>& processor() const noexcept {
    return processor_;
  }

 private:
  std::shared_ptr<ShardedEmbeddingBagCollection> bags_;
  std::shared_ptr<embedding::FeatureProcessor> processor_;
};

}  // namespace tessera::sharding
