// Stands in for device_cuda.cpp in a build without CUDA.

#include "graph_parallel/device.h"
#include "tessera/core/check.h"

namespace tessera::graph_parallel::detail {

bool has_kernels_for(const at::Tensor&) noexcept { return false; }

void device_neighbour_sum(const kernels::EdgeRows&, const at::Tensor&, const at::Tensor&,
                          const at::Tensor&) {
  TESSERA_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
void device_edge_product(const kernels::EdgeRows&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&) {
  TESSERA_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}

}  // namespace tessera::graph_parallel::detail
