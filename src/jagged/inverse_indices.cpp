#include "tessera/jagged/inverse_indices.h"

#include <algorithm>

#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged {

at::Tensor inverse_of(const InverseIndices& inverse, const std::string& feature,
                      const std::string& operation) {
  const auto& names = inverse.first;
  const auto found = std::find(names.rbegin(), names.rend(), feature);
  TESSERA_CHECK_VALUE(found != names.rend(), operation,
                      ": there are no inverse indices for feature '", feature, "'.");
  return inverse.second[names.rend() - found - 1].to(at::kLong);
}

JaggedTensor spread_bags(const JaggedTensor& bags, const at::Tensor& inverse) {
  const JaggedParts moved =
      permute_1d(inverse, bags.lengths(), bags.values(), bags.weights_or_none());
  return JaggedTensor(moved.values, moved.weights, moved.lengths);
}

}  // namespace tessera::jagged
