// tessera/regions/gather_scatter.h — between slices and the whole, when all later work is the same.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::regions {

using Sizes = std::vector<std::int64_t>;

/// Cuts `extent` into `num_parts` sizes that differ by at most one, the larger ones first. Not
/// collective. Throws ValueError if `extent` is negative or `num_parts` is not positive.
TESSERA_API Sizes even_sizes(std::int64_t extent, int num_parts);

/// Returns the ranks' slices, joined along `dim` in rank order.
///
/// Shard -> Replicated. Collective. `sizes[r]` is the extent of rank r's slice; without it the
/// ranks tell each other. Slices may differ in size and may be empty; nothing is padded.
/// Differentiable any number of times: each rank gets its slice of the gradient, which is right
/// only if all ranks do the same with the result. If they do not, use gather_shared.
TESSERA_API at::Tensor gather(const at::Tensor& x, const comm::Group& group, std::int64_t dim = 0,
                              const std::optional<Sizes>& sizes = std::nullopt);

/// Returns this rank's slice of `x` along `dim`, as a tensor of its own.
///
/// Replicated -> Shard. Collective; moves no data forward. `sizes[r]` is the extent of rank r's
/// slice; without it, even_sizes of the extent. Differentiable any number of times: the ranks'
/// gradients are joined. Throws ValueError if the sizes do not add up to the extent.
TESSERA_API at::Tensor scatter(const at::Tensor& x, const comm::Group& group, std::int64_t dim = 0,
                               const std::optional<Sizes>& sizes = std::nullopt);

}  // namespace tessera::regions
