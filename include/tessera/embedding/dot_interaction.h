// tessera/embedding/dot_interaction.h — products of all pairs of a sample's vectors.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::embedding {

/// Returns [batch, dim + n(n+1)/2] for dense [batch, dim] and embeddings [batch, m * dim]: dense,
/// then for i = 1..n the products of vector i with vectors 0..i-1, where vector 0 is dense and
/// vector i is part `order[i-1]` of the embeddings; without an order, all m parts as they lie.
/// On the CPU computed in float32, whatever is given, and differentiable once; float64, more than
/// 255 parts and other devices go through the reference. Throws ValueError for shapes that do not
/// fit, and for an order that names a part twice or one that is not there.
TESSERA_API at::Tensor dot_interaction(const at::Tensor& dense, const at::Tensor& embeddings,
                                       const std::vector<std::int64_t>& order = {});

/// The same by torch's own operators, differentiable any number of times: the judge. Parts are in
/// order.
TESSERA_API at::Tensor dot_interaction_reference(const at::Tensor& dense,
                                                 const at::Tensor& embeddings);

}  // namespace tessera::embedding
