#include "embedding/quantised_device.h"
#include "tessera/core/check.h"

namespace tessera::embedding::detail {

bool has_quantised_cuda() noexcept { return false; }

std::int64_t quantised_lookup_cuda(const QuantisedPass&, const at::Tensor&) {
  TESSERA_INTERNAL_ASSERT(false, "tables on CUDA are refused where there are no kernels for them");
}

}  // namespace tessera::embedding::detail
