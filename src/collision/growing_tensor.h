// src/collision/growing_tensor.h — a tensor whose rows become more without moving.

#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "collision/reserved_memory.h"

namespace tessera::collision {

/// Rows on the CPU, zero at first. Whoever holds `tensor()` sees it grow: nothing is copied, and no
/// pointer changes.
class GrowingTensor {
 public:
  /// `columns` numbers a row; 0: one number, and the tensor has one dimension.
  GrowingTensor(std::int64_t columns, at::ScalarType type);

  /// Makes memory for `rows`; false if it cannot be had. The tensor is as it was.
  [[nodiscard]] bool reserve(std::int64_t rows) noexcept;
  /// Gives the tensor as many rows as `reserve` has made memory for, at most.
  void resize(std::int64_t rows);

  const at::Tensor& tensor() const noexcept { return tensor_; }
  std::int64_t bytes() const noexcept { return static_cast<std::int64_t>(memory_->size()); }

 private:
  std::int64_t columns_;
  std::int64_t row_bytes_;
  std::shared_ptr<ReservedMemory> memory_;
  at::Tensor tensor_;
};

}  // namespace tessera::collision
