// src/vocab_parallel/logit_pieces.h — logits of any strides as rows the kernels can read.

#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "kernels/logit_rows.h"

namespace tessera::vocab_parallel::detail {

kernels::Element element_of(const at::Tensor& logits);

/// Rows of `tensor` (at least one dimension) if two strides reach them all and columns are
/// contiguous. Returns whether that is so.
bool as_rows(const at::Tensor& tensor, kernels::LogitRows& rows);

/// Calls `body(tensor, first_row)` for consecutive pieces of `logits` that as_rows accepts. Most
/// often that is one piece, the whole. Otherwise pieces of at most a few MiB are copied; if
/// `write_back`, each copy is written back after `body` has changed it.
void for_each_piece(
    const at::Tensor& logits, bool write_back,
    const std::function<void(const at::Tensor& piece, std::int64_t first_row)>& body);

}  // namespace tessera::vocab_parallel::detail
