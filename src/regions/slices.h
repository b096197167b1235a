// src/regions/slices.h — the data movement behind the operators on slices; no gradients here.

#pragma once

#include <ATen/core/Tensor.h>

#include "regions/agreement.h"

namespace tessera::regions::detail {

/// Joins the ranks' slices along the cut's dimension. Collective.
at::Tensor join_slices(const at::Tensor& slice, const Cut& cut);

/// Copies this rank's slice out of the whole. Not collective.
at::Tensor own_slice(const at::Tensor& whole, const Cut& cut);

/// Adds up the ranks' tensors and keeps this rank's slice. Collective.
at::Tensor sum_slices(const at::Tensor& addend, const Cut& cut);

}  // namespace tessera::regions::detail
