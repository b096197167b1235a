#include "jagged/device.h"
#include "tessera/core/check.h"

namespace tessera::jagged::detail {

bool has_kernels_for(const at::Tensor&) noexcept { return false; }

at::Tensor device_offsets(const at::Tensor&, at::ScalarType) {
  TESSERA_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
at::Tensor device_row_sums(const at::Tensor&) {
  TESSERA_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
at::Tensor device_copy_segments(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                std::int64_t) {
  TESSERA_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
Bucketized device_bucketize(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const BucketizeOptions&) {
  TESSERA_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}

}  // namespace tessera::jagged::detail
