// tessera/graph_parallel/tensor_parts.h — padding, trimming and splitting for a group of equal
// parts, under the names of ocpmodels.common.gp_utils. Nothing here communicates.
//
// Where no number of parts is given, it is get_gp_world_size(). Dimensions may be negative.

#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::graph_parallel {

/// Grows `dim` to `target_size`, or to the next multiple of the number of parts, with zeros.
/// Returns `tensor` itself if nothing is missing. Differentiable. Throws ValueError if the target
/// is smaller than the extent.
TESSERA_API at::Tensor pad_tensor(const at::Tensor& tensor, std::int64_t dim = -1,
                                  std::optional<std::int64_t> target_size = std::nullopt);
TESSERA_API at::Tensor pad_tensor(const at::Tensor& tensor, std::int64_t dim,
                                  std::optional<std::int64_t> target_size, int num_parts);

/// Shrinks `dim` to a multiple of the number of parts, from the end. Returns the trimmed tensor and
/// `sizes`, taken from its last entries, never below zero; the tensors given are not changed.
TESSERA_API std::pair<at::Tensor, at::Tensor> trim_tensor(const at::Tensor& tensor,
                                                          const at::Tensor& sizes = {},
                                                          std::int64_t dim = 0);
TESSERA_API std::pair<at::Tensor, at::Tensor> trim_tensor(const at::Tensor& tensor,
                                                          const at::Tensor& sizes, std::int64_t dim,
                                                          int num_parts);

/// Returns exactly `num_parts` pieces along `dim` that differ by at most one, the larger ones
/// first: views, or copies with `contiguous_chunks`.
TESSERA_API std::vector<at::Tensor> _split_tensor(const at::Tensor& tensor, int num_parts,
                                                  std::int64_t dim = -1,
                                                  bool contiguous_chunks = false);

}  // namespace tessera::graph_parallel
