// tessera/embedding/embedding_bag_collection.h — tables whose rows are pooled bag by bag.

#pragma once

#include <vector>

#include <torch/nn/module.h>

#include "tessera/core/export.h"
#include "tessera/embedding/collection_lookup.h"

namespace tessera::embedding {

/// Many tables, looked up in one call. Parameters are named `embedding_bags.<table>.weight`.
///
/// Pooling and the weighted mean: see PoolingType. An empty bag is zero. The result is float32
/// whatever the tables are. Any number of columns, different ones per table.
class TESSERA_API EmbeddingBagCollection : public torch::nn::Module {
 public:
  /// Throws ValueError for configs that cannot be; see CollectionLookup.
  explicit EmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables, bool is_weighted = false,
                                  at::Device device = at::kCPU, TableBatchOptions options = {});

  /// Keys: tables in order, in a table its features in order; `feature@table` where several tables
  /// use a feature.
  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features);

  const std::vector<EmbeddingBagConfig>& embedding_bag_configs() const noexcept;
  bool is_weighted() const noexcept { return is_weighted_; }
  /// Fills the tables anew; nothing on the meta device.
  void reset_parameters();
  at::Tensor weight(const std::string& table) const;
  /// The lookup itself, e.g. for its fused optimizer.
  const TableBatch& batch() const;

  using Forward = std::function<jagged::KeyedTensor(const jagged::KeyedJaggedTensor&)>;
  /// Looks up through `forward` from now on and lets go of its own tables; the child
  /// `embedding_bags` of `tables` takes their place among the parameters. So shards over ranks
  /// stand in.
  void delegate(const std::shared_ptr<torch::nn::Module>& tables, Forward forward);
  /// Where it looks up; null if in its own tables.
  const std::shared_ptr<torch::nn::Module>& delegated() const noexcept { return delegated_; }

 private:
  CollectionLookup lookup_;
  bool is_weighted_;
  // The parameters themselves: moving the module changes what they hold, not which they are.
  std::vector<at::Tensor> weights_;
  Forward forward_;  // elsewhere; empty: here
  std::shared_ptr<torch::nn::Module> delegated_;
};

}  // namespace tessera::embedding
