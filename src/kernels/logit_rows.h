// src/kernels/logit_rows.h — one rank's columns of a matrix of logits, as the softmax kernels see
// it.

#pragma once

#include <cstdint>

#include "kernels/reduce.h"

namespace tessera::kernels {

/// Rows of float32, bfloat16 or float16 values whose columns are contiguous.
///
/// Row r starts at element (r / inner_rows) * outer_stride + (r % inner_rows) * inner_stride, so a
/// slice such as logits[:, :-1] or the transpose of the first two dimensions needs no copy.
struct LogitRows {
  Element element = Element::kFloat32;
  const void* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  std::int64_t inner_rows = 1;
  std::int64_t inner_stride = 0;
  std::int64_t outer_stride = 0;

  constexpr std::int64_t offset(std::int64_t row) const {
    if (row < inner_rows) return row * inner_stride;  // the usual case, without divisions
    return row / inner_rows * outer_stride + row % inner_rows * inner_stride;
  }
};

/// Which columns the rank holds, and which labels stand for no token.
struct Labels {
  const std::int64_t* ids = nullptr;  // one per row; null: no labels
  std::int64_t first_column = 0;      // vocabulary id of column 0
  std::int64_t ignored = -100;
};

}  // namespace tessera::kernels
