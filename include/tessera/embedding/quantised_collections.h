// tessera/embedding/quantised_collections.h — collections of tables with rows in few bits.
//
// For models that only predict: nothing here has gradients, and nothing communicates. The rows are
// buffers, uint8 [rows, row bytes], in the layout of quantised_rows.h. A module lies where it was
// made; one that was moved or converted refuses to look up.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/core/export.h"
#include "tessera/embedding/collection_lookup.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"
#include "tessera/embedding/quantised_tables.h"

namespace tessera::embedding {

/// The row type of a table's data type.
TESSERA_API RowType row_type_of(DataType type) noexcept;

/// What a collection has besides its tables.
struct QuantOptions {
  std::int64_t row_alignment = 16;
  at::ScalarType output_type = at::kFloat;  // any floating point
  at::Device device = at::kCPU;
};

/// Tables in groups that are looked up in one call each: what pooled and unpooled collections
/// share.
class TESSERA_API QuantisedGroups {
 public:
  /// One group per pooling, or without pooling per width. Throws as check_tables, and ValueError
  /// for pooling NONE of pooled tables and outputs that are not floating point.
  QuantisedGroups(std::string operation, std::vector<EmbeddingTableConfig> tables, bool is_pooled,
                  const QuantOptions& options);

  /// [batch, columns] of every feature, in the order of tables and their features.
  std::vector<at::Tensor> pooled(const jagged::KeyedJaggedTensor& features, bool is_weighted) const;
  /// [ids, columns] of every feature, in the same order.
  std::vector<at::Tensor> sequence(const jagged::KeyedJaggedTensor& features) const;

  const std::vector<EmbeddingTableConfig>& tables() const noexcept { return tables_; }
  const QuantOptions& options() const noexcept { return options_; }
  /// The rows of a table, shared. Throws IndexError for a table that is not here.
  const at::Tensor& rows(const std::string& table) const;
  /// Rounds numbers into a table, see QuantisedTables::assign.
  void assign(const std::string& table, const at::Tensor& numbers);
  at::Tensor dequantised(const std::string& table) const;
  /// Puts the rows into `module`, as `<folder>.<table>.weight`.
  void show(torch::nn::Module& module, const std::string& folder) const;

 private:
  struct Place {
    std::size_t group;
    std::size_t table;    // in the group
    std::size_t feature;  // its first, in the group
    std::int64_t column;  // where that begins in the group's output
  };
  const Place& place_of(const std::string& table) const;
  // The features of one group, in its order; checked.
  jagged::KeyedJaggedTensor features_of(const jagged::KeyedJaggedTensor& features,
                                        std::size_t group) const;

  std::string operation_;
  std::vector<EmbeddingTableConfig> tables_;
  QuantOptions options_;
  std::vector<QuantisedTables> groups_;
  std::vector<std::vector<std::string>> features_;  // of each group
  std::vector<Place> places_;                       // of each table
};

/// Pooled tables; buffers are named `embedding_bags.<table>.weight`.
class TESSERA_API QuantEmbeddingBagCollection : public torch::nn::Module {
 public:
  /// Rows are 0. The type of a table's rows is its `data_type`.
  explicit QuantEmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                                       bool is_weighted = false, QuantOptions options = {});
  /// The tables of `module`, each rounded to `type`. Throws ValueError naming table and row for
  /// what the type cannot hold.
  static std::shared_ptr<QuantEmbeddingBagCollection> from_float(
      const EmbeddingBagCollection& module, DataType type, QuantOptions options = {});

  /// As EmbeddingBagCollection. Throws IndexError naming table, feature, position and id for an id
  /// that is not a row.
  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features) const;

  const std::vector<EmbeddingBagConfig>& embedding_bag_configs() const noexcept {
    return groups_.tables();
  }
  bool is_weighted() const noexcept { return is_weighted_; }
  const QuantOptions& options() const noexcept { return groups_.options(); }
  const at::Tensor& rows(const std::string& table) const { return groups_.rows(table); }
  void assign(const std::string& table, const at::Tensor& numbers) {
    groups_.assign(table, numbers);
  }
  at::Tensor dequantised(const std::string& table) const { return groups_.dequantised(table); }

 private:
  QuantisedGroups groups_;
  bool is_weighted_;
};

/// Tables whose rows stay apart; buffers are named `embeddings.<table>.weight`.
class TESSERA_API QuantEmbeddingCollection : public torch::nn::Module {
 public:
  explicit QuantEmbeddingCollection(std::vector<EmbeddingConfig> tables, bool need_indices = false,
                                    QuantOptions options = {});
  static std::shared_ptr<QuantEmbeddingCollection> from_float(const EmbeddingCollection& module,
                                                              DataType type,
                                                              QuantOptions options = {});

  /// As EmbeddingCollection.
  NamedRows forward(const jagged::KeyedJaggedTensor& features) const;

  const std::vector<EmbeddingConfig>& embedding_configs() const noexcept {
    return groups_.tables();
  }
  bool need_indices() const noexcept { return need_indices_; }
  const QuantOptions& options() const noexcept { return groups_.options(); }
  const at::Tensor& rows(const std::string& table) const { return groups_.rows(table); }
  void assign(const std::string& table, const at::Tensor& numbers) {
    groups_.assign(table, numbers);
  }
  at::Tensor dequantised(const std::string& table) const { return groups_.dequantised(table); }

 private:
  QuantisedGroups groups_;
  bool need_indices_;
};

}  // namespace tessera::embedding
