#include "tessera/sharding/sharded_feature_processed_collection.h"

#include <utility>

#include <ATen/core/grad_mode.h>

#include "sharding/input_dist.h"

namespace tessera::sharding {
namespace {

ShardedOptions with_late_weights(ShardedOptions options,
                                 const embedding::FeatureProcessor& processor) {
  options.weights_come_later = true;
  options.longest_bags = processor.longest_bags();
  return options;
}

}  // namespace

ShardedFeatureProcessedEmbeddingBagCollection::ShardedFeatureProcessedEmbeddingBagCollection(
    std::vector<embedding::EmbeddingBagConfig> tables,
    std::shared_ptr<embedding::FeatureProcessor> processor, ModulePlan plan, comm::Group group,
    ShardedOptions options)
    : torch::nn::Module("ShardedFeatureProcessedEmbeddingBagCollection") {
  bags_ =
      register_module("_embedding_bag_collection",
                      std::make_shared<ShardedEmbeddingBagCollection>(
                          std::move(tables), std::move(plan), std::move(group),
                          /*is_weighted=*/true, with_late_weights(std::move(options), *processor)));
  tables_state_ = bags_->tables_state();
  processor_ = register_module("_feature_processors", std::move(processor));
}

jagged::KeyedTensor ShardedFeatureProcessedEmbeddingBagCollection::forward(
    const jagged::KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

comm::LazyAwaitable<jagged::KeyedTensor>
ShardedFeatureProcessedEmbeddingBagCollection::compute_and_output_dist(
    const DistributedInput& input) {
  const at::AutoGradMode recorded(input.context->is_recorded);
  return bags_->compute_and_output_dist(input,
                                        processor_->forward(input.context->features).weights());
}

}  // namespace tessera::sharding
