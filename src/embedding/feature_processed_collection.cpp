#include "tessera/embedding/feature_processed_collection.h"

#include "tessera/core/check.h"

namespace tessera::embedding {

using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

namespace {

constexpr const char* kOperation = "embed.feature_processed";
constexpr const char* kCollection = "_embedding_bag_collection";

}  // namespace

FeatureProcessedEmbeddingBagCollection::FeatureProcessedEmbeddingBagCollection(
    std::shared_ptr<EmbeddingBagCollection> bags, std::shared_ptr<FeatureProcessor> processor)
    : torch::nn::Module("FeatureProcessedEmbeddingBagCollection"),
      bags_(register_module(kCollection, std::move(bags))),
      processor_(register_module("_feature_processors", std::move(processor))) {
  TESSERA_CHECK_VALUE(bags_->is_weighted(), kOperation,
                      ": the collection is not weighted. Make it with is_weighted.");
}

KeyedTensor FeatureProcessedEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  return forward_ ? forward_(features) : bags_->forward(processor_->forward(features));
}

const std::vector<EmbeddingBagConfig>&
FeatureProcessedEmbeddingBagCollection::embedding_bag_configs() const noexcept {
  return bags_->embedding_bag_configs();
}

at::Tensor FeatureProcessedEmbeddingBagCollection::weight(const std::string& table) const {
  return bags_->weight(table);
}

void FeatureProcessedEmbeddingBagCollection::delegate(
    const std::shared_ptr<torch::nn::Module>& tables, EmbeddingBagCollection::Forward forward) {
  bags_->delegate(tables->named_children()[kCollection],
                  [](const KeyedJaggedTensor&) -> KeyedTensor {
                    TESSERA_CHECK_VALUE(false, kOperation,
                                        ": the tables lie elsewhere; call forward of the whole "
                                        "collection, not of the tables in it.");
                  });
  forward_ = std::move(forward);
}

}  // namespace tessera::embedding
