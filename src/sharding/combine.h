// src/sharding/combine.h — rows from all ranks become the samples' columns.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::sharding {

/// A block [batch, columns] of one of the sources, and the columns of the result it belongs to.
struct CombinePiece {
  std::size_t source = 0;
  std::int64_t begin = 0;  // first element of the block
  std::int64_t batch = 0;
  std::int64_t columns = 0;
  std::int64_t column = 0;  // of the result
  std::size_t feature = 0;  // whose samples
  bool is_added = false;    // to what an earlier piece left there: rows that lie in several shards
  bool is_divided = false;  // by the number of ids: the mean of such rows
};

/// What one batch becomes. Pieces that add lie behind the one they add to.
struct CombinePlan {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<CombinePiece> pieces;
  /// Per feature: 1 / max(number of ids, 1) of its samples, float32; undefined if not divided.
  std::vector<at::Tensor> factors;
  /// Per feature: which sample each row of the result reads, int64; undefined: its own.
  std::vector<at::Tensor> inverse;
  /// Makes the flat float32 tensor that the gradient of a source goes to; null: of this rank's own
  /// memory.
  std::function<at::Tensor(std::size_t source, std::int64_t size)> gradient_memory;
  /// Lives as long as the record for backward.
  std::shared_ptr<const void> owner;
};

/// Returns [plan.rows, plan.columns]. Sources are flat, float32, on one device. Differentiable.
at::Tensor combine(CombinePlan plan, const std::vector<at::Tensor>& sources);

}  // namespace tessera::sharding
