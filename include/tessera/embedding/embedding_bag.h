// tessera/embedding/embedding_bag.h — one table, ids and offsets in, pooled rows out.

#pragma once

#include <memory>

#include <torch/nn/module.h>

#include "tessera/core/export.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::embedding {

struct EmbeddingBagOptions {
  std::int64_t num_embeddings = 0;
  std::int64_t embedding_dim = 0;
  PoolingType mode = PoolingType::kMean;
  /// Whether the last offset is the end of the last bag.
  bool include_last_offset = false;
  DataType data_type = DataType::kFP32;
  at::Device device = at::kCPU;
  TableBatchOptions table = {};
};

/// LibTorch's module of the same name on the kernels of TableBatch; its parameter is `weight`,
/// which starts as normal numbers. Unlike there, per-sample weights may be used with the mean too.
class TESSERA_API EmbeddingBag : public torch::nn::Module {
 public:
  /// Throws ValueError for sizes below 1 and for mode kNone.
  explicit EmbeddingBag(const EmbeddingBagOptions& options);

  /// `input` is 1-D with `offsets` [bags], or 2-D, a bag per row, without. Returns [bags, dim],
  /// float32. `per_sample_weights`, float32, has the shape of `input`.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& offsets = {},
                     const at::Tensor& per_sample_weights = {});

  void reset_parameters();

  at::Tensor weight;

 private:
  const TableBatch& batch();

  EmbeddingBagOptions options_;
  std::unique_ptr<TableBatch> batch_;
  const void* bound_ = nullptr;
};

}  // namespace tessera::embedding
