// tessera/jagged/inverse_indices.h — from the different bags of a variable batch to its samples.
//
// Nothing here communicates.

#pragma once

#include <optional>
#include <string>

#include "tessera/core/export.h"
#include "tessera/jagged/jagged_tensor.h"
#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::jagged {

/// Returns the row of `feature`, int64: the bag of each sample. ValueError, beginning with
/// `operation`, if there is none.
TESSERA_API at::Tensor inverse_of(const InverseIndices& inverse, const std::string& feature,
                                  const std::string& operation);

/// Returns one bag per sample: bag `inverse[0]`, `inverse[1]`, …. Gradients of a bag add up.
TESSERA_API JaggedTensor spread_bags(const JaggedTensor& bags, const at::Tensor& inverse);

}  // namespace tessera::jagged
