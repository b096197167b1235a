// tessera/embedding/collection_lookup.h — from the features of a batch to the rows of its tables.
//
// What the collections have in common: which feature goes to which table, in which order results
// come out and how they are called. The weights are handed in with every call, so that whoever owns
// them (a C++ module, a Python module) may move or replace them.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/jagged/keyed_tensor.h"

namespace tessera::embedding {

/// Results by name, in order: tables as configured, in a table its features as configured.
using NamedRows = std::vector<std::pair<std::string, jagged::JaggedTensor>>;

class TESSERA_API CollectionLookup {
 public:
  /// Throws ValueError for tables that cannot be: no name, no rows, a name used twice, a data type
  /// that does not train; and, if `is_pooled`, pooling NONE. `operation` begins the texts.
  CollectionLookup(std::string operation, std::vector<EmbeddingTableConfig> tables, bool is_pooled,
                   TableBatchOptions options = {});

  /// Returns the pooled rows of every feature, side by side, float32. `weights` are the tables' in
  /// the order of the configs. Features may hold further keys, in any order.
  ///
  /// With `is_weighted`, rows are multiplied by the features' weights, which get a gradient if they
  /// ask for one. Of a variable batch, every feature's rows are spread over the full batch by its
  /// inverse indices. Throws ValueError for a missing key or missing weights, IndexError as the
  /// bounds check mode says.
  jagged::KeyedTensor pooled(const jagged::KeyedJaggedTensor& features,
                             const std::vector<at::Tensor>& weights, bool is_weighted) const;

  /// Returns the rows of every id, float32. With `need_indices` the ids go along as weights.
  NamedRows sequence(const jagged::KeyedJaggedTensor& features,
                     const std::vector<at::Tensor>& weights, bool need_indices) const;

  const std::vector<EmbeddingTableConfig>& tables() const noexcept;
  /// Names of the results, and how many columns each has.
  const std::vector<std::string>& names() const noexcept;
  const std::vector<std::int64_t>& dims() const noexcept;
  /// The tables as they are looked up now; made by the first lookup or by `bind`.
  const TableBatch& batch() const;
  /// Makes `weights` the tables' weights. A lookup with other tensors does it by itself.
  const TableBatch& bind(const std::vector<at::Tensor>& weights) const;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

/// Makes the weights of the tables, as the configs say; on the meta device they have no contents.
TESSERA_API std::vector<at::Tensor> make_weights(const std::vector<EmbeddingTableConfig>& tables,
                                                 at::Device device);

}  // namespace tessera::embedding
