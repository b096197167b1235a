// Stands in for row_cache_cuda.cpp in a build without CUDA.

#include "embedding/row_cache.h"
#include "tessera/core/check.h"

namespace tessera::embedding::detail {

// Never asked for: without CUDA no table lies in a GPU's host memory.
std::shared_ptr<RowCache> make_row_cache(const std::vector<Table>&, CachePolicy, RowOptimizer*) {
  TESSERA_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}

bool is_mapped(const at::Tensor&) { return false; }

at::Tensor make_mapped(std::int64_t, std::int64_t, at::ScalarType, at::Device) {
  TORCH_CHECK(false,
              "embedding.mapped_rows: this build has no CUDA kernels. Rebuild with "
              "TESSERA_BUILD_CUDA=ON, or use the CPU.");
}

}  // namespace tessera::embedding::detail
