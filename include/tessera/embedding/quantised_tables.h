// tessera/embedding/quantised_tables.h — tables with rows in few bits, looked up in one call.
//
// For models that only predict. Rows lie in plain uint8 tensors, [rows, row bytes], in the layout
// of quantised_rows.h; whoever holds such a tensor may change rows between two lookups. On the CPU
// or a CUDA device: the same bits. Nothing here communicates.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/quantised_rows.h"

namespace tessera::embedding {

struct QuantisedTableSpec {
  std::string name;
  std::int64_t num_embeddings = 0;
  std::int64_t embedding_dim = 0;
  RowType type = RowType::kInt8;
  std::vector<std::string> features;  // that look up in it
};

class TESSERA_API QuantisedTables {
 public:
  /// Makes tables whose rows are 0, each row at a multiple of `alignment` bytes, on `device`.
  /// Throws ValueError for tables that make no sense, without pooling for tables of different
  /// width, and for a device that this build has no kernels for.
  QuantisedTables(std::vector<QuantisedTableSpec> tables, PoolingType pooling,
                  std::int64_t alignment = 16, at::Device device = at::kCPU);

  const std::vector<QuantisedTableSpec>& tables() const noexcept { return tables_; }
  PoolingType pooling() const noexcept { return pooling_; }
  at::Device device() const noexcept { return device_; }
  /// uint8 [rows, row bytes], shared.
  const at::Tensor& rows(std::size_t table) const { return rows_.at(table); }

  /// Rounds numbers [rows, dim] into the table. Throws ValueError naming table and row for a NaN
  /// and for numbers that the type cannot hold; nothing is changed then.
  void assign(std::size_t table, const at::Tensor& numbers);
  /// float32 [rows, dim], on the tables' device.
  at::Tensor dequantised(std::size_t table) const;

  /// Returns [batch, sum of the widths of all features], or without pooling [ids, dim], float32.
  /// `ids` (int32 or int64) are those of the first feature's bags, then of the second's, and so on;
  /// `offsets` say where each bag begins, with the end last; `weights` has one number per id.
  /// All are on the tables' device. Throws IndexError naming table, feature, position and id for
  /// one that is not a row: on CUDA the caller waits for that answer.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& offsets,
                     const std::optional<at::Tensor>& weights = std::nullopt) const;

 private:
  struct Feature {
    std::size_t table;
    std::string name;
    std::int64_t column;  // where its output begins
  };

  at::Tensor forward_on_device(const at::Tensor& ids, const at::Tensor& offsets,
                               const at::Tensor& weights, std::int64_t batch) const;
  [[noreturn]] void refuse_id(const at::Tensor& ids, const at::Tensor& offsets, std::int64_t batch,
                              std::int64_t position) const;

  std::vector<QuantisedTableSpec> tables_;
  PoolingType pooling_;
  at::Device device_;
  std::vector<at::Tensor> rows_;
  std::vector<Feature> features_;
  std::int64_t width_ = 0;
};

}  // namespace tessera::embedding
