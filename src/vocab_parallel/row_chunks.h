// src/vocab_parallel/row_chunks.h — work over rows whose temporaries must stay small.

#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/Functions.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel::detail {

/// All leading dimensions as one; a copy only if strides ask for it.
inline at::Tensor flat_rows(const at::Tensor& logits) {
  const std::int64_t num_rows = c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1));
  return logits.reshape({num_rows, logits.size(-1)});
}

/// Calls `body(first, last)` for ranges of rows whose float32 copy takes at most 8 MiB.
template <typename Body>
void chunk_rows(const at::Tensor& rows, const Body& body) {
  const std::int64_t row_bytes = std::max<std::int64_t>(rows.size(1), 1) * 4;
  const std::int64_t step = std::max<std::int64_t>((std::int64_t{8} << 20) / row_bytes, 1);
  for (std::int64_t first = 0; first < rows.size(0); first += step) {
    body(first, std::min(first + step, rows.size(0)));
  }
}

/// log softmax of rows [first, last), the padding left out, float32. Taken from the distance to the
/// row's maximum: a log-sum-exp that was rounded far from 0 would lose the digits that matter.
inline at::Tensor log_softmax_rows(const at::Tensor& rows, std::int64_t first, std::int64_t last,
                                   const at::Tensor& maximum, const at::Tensor& log_sum,
                                   const PassSettings& settings) {
  return rows.slice(0, first, last)
      .slice(1, 0, settings.num_valid)
      .to(at::kFloat)
      .sub(maximum.slice(0, first, last).unsqueeze(1))
      .mul_(settings.shape.scale)
      .sub_(log_sum.slice(0, first, last).unsqueeze(1));
}

inline at::Tensor sum_over_group(const at::Tensor& tensor, const comm::Group& group) {
  return group.size() == 1 ? tensor : comm::all_reduce(tensor, group);
}

}  // namespace tessera::vocab_parallel::detail
