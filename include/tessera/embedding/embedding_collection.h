// tessera/embedding/embedding_collection.h — tables whose rows stay apart, one per id.

#pragma once

#include <vector>

#include <torch/nn/module.h>

#include "tessera/core/export.h"
#include "tessera/embedding/collection_lookup.h"

namespace tessera::embedding {

/// Many tables, looked up in one call. Parameters are named `embeddings.<table>.weight`. Tables may
/// have different numbers of columns.
class TESSERA_API EmbeddingCollection : public torch::nn::Module {
 public:
  explicit EmbeddingCollection(std::vector<EmbeddingConfig> tables, at::Device device = at::kCPU,
                               bool need_indices = false, TableBatchOptions options = {});

  /// Returns for every result its name, and the rows of its ids in bags as long as the feature's.
  /// If indices are needed, the ids are the weights of the result.
  NamedRows forward(const jagged::KeyedJaggedTensor& features);

  const std::vector<EmbeddingConfig>& embedding_configs() const noexcept;
  std::vector<std::vector<std::string>> embedding_names_by_table() const;
  bool need_indices() const noexcept { return need_indices_; }
  /// The number of columns of all tables. Throws ValueError if they differ.
  std::int64_t embedding_dim() const;
  void reset_parameters();
  at::Tensor weight(const std::string& table) const;
  const TableBatch& batch() const;

  using Forward = std::function<NamedRows(const jagged::KeyedJaggedTensor&)>;
  /// Looks up through `forward` from now on and lets go of its own tables; the child `embeddings`
  /// of `tables` takes their place among the parameters. So shards over ranks stand in.
  void delegate(const std::shared_ptr<torch::nn::Module>& tables, Forward forward);
  /// Where it looks up; null if in its own tables.
  const std::shared_ptr<torch::nn::Module>& delegated() const noexcept { return delegated_; }

 private:
  CollectionLookup lookup_;
  bool need_indices_;
  // The parameters themselves: moving the module changes what they hold, not which they are.
  std::vector<at::Tensor> weights_;
  Forward forward_;  // elsewhere; empty: here
  std::shared_ptr<torch::nn::Module> delegated_;
};

}  // namespace tessera::embedding
