// tessera/regions/copy_reduce.h — into and out of a region where the ranks do different work.

#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::regions {

/// Returns `x` itself, for use in work that differs between ranks.
///
/// Replicated -> Shared. Collective. Differentiable any number of times: the gradients of all ranks
/// are added up. Moves no data forward. The result shares memory with `x`; writing it in place in a
/// differentiated region is an error.
TESSERA_API at::Tensor copy(const at::Tensor& x, const comm::Group& group);

/// Returns the sum of all ranks' `x`.
///
/// Partial -> Replicated. Collective. Differentiable any number of times: each rank gets the
/// gradient of the sum. The result is new.
TESSERA_API at::Tensor reduce(const at::Tensor& x, const comm::Group& group);

/// Returns the sum of all ranks' `x`, for use in work that differs between ranks: copy after
/// reduce.
///
/// Partial -> Shared. Collective. Differentiable any number of times; its own partner.
TESSERA_API at::Tensor all_reduce(const at::Tensor& x, const comm::Group& group);

}  // namespace tessera::regions
