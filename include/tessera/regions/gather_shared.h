// tessera/regions/gather_shared.h — between slices and the whole, when the later work differs.

#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/regions/gather_scatter.h"

namespace tessera::regions {

/// Returns the ranks' slices, joined along `dim` in rank order, for work that differs between
/// ranks.
///
/// Shard -> Shared. Collective. As gather, but each rank gets its slice of the sum of all ranks'
/// gradients: what message passing over a split graph needs.
TESSERA_API at::Tensor gather_shared(const at::Tensor& x, const comm::Group& group,
                                     std::int64_t dim = 0,
                                     const std::optional<Sizes>& sizes = std::nullopt);

/// Returns this rank's slice, along `dim`, of the sum of all ranks' `x`.
///
/// Partial -> Shard. Collective. `sizes[r]` is the extent of rank r's slice; without it, even_sizes
/// of the extent. Differentiable any number of times: the ranks' gradients are joined.
TESSERA_API at::Tensor reduce_scatter(const at::Tensor& x, const comm::Group& group,
                                      std::int64_t dim = 0,
                                      const std::optional<Sizes>& sizes = std::nullopt);

}  // namespace tessera::regions
