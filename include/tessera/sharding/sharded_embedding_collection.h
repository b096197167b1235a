// tessera/sharding/sharded_embedding_collection.h — rows of single ids, of tables cut over ranks.

#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/embedding/collection_lookup.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"
#include "tessera/sharding/sharded_module.h"

namespace tessera::sharding {

struct ShardedSequenceOptions : ShardedOptions {
  /// The ids go along as the weights of the results.
  bool need_indices = false;
  /// Every rank sends an id once, however often its batch holds it, and gets its row once. Features
  /// of the same tables share their ids. Changes what travels, not the results.
  bool use_index_dedup = false;
};

/// An EmbeddingCollection whose tables lie over the ranks of a group as a plan says. Every rank
/// puts in its own batch and gets the rows of its own ids. Tables may have different numbers of
/// columns; the batch of every feature may be another. Gradients are those of
/// ShardedEmbeddingBagCollection.
///
/// Collective over the group: construction, forward, backward, state transfer. Parameters are this
/// rank's shards, `embeddings.<table>.weight`, and `weight_1`, `weight_2` … for further shards of a
/// table on this rank.
class TESSERA_API ShardedEmbeddingCollection : public torch::nn::Module, public ShardedTables {
 public:
  /// Throws ValueError for a plan that does not fit, and if the ranks' plans differ, naming the
  /// table.
  ShardedEmbeddingCollection(std::vector<embedding::EmbeddingConfig> tables, ModulePlan plan,
                             const comm::Group& group, const ShardedSequenceOptions& options = {});
  ~ShardedEmbeddingCollection() override;

  /// Results by name; their order is that of ShardedEmbeddingBagCollection.
  embedding::NamedRows forward(const jagged::KeyedJaggedTensor& features);

  /// Reads the rows and starts sending them home.
  comm::LazyAwaitable<embedding::NamedRows> compute_and_output_dist(const DistributedInput& input);

  const std::vector<embedding::EmbeddingConfig>& embedding_configs() const noexcept;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera::sharding
