// A plain gather of random rows, the measure of the table kernels on CUDA.

#include <cstdint>

namespace tessera::bench {
namespace {

/// 16 bytes per lane; a warp or a part of one copies each row.
__global__ void __launch_bounds__(256) gather_kernel(const uint4* table, const std::int64_t* rows,
                                                     std::int64_t count, int lanes, uint4* output) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const std::int64_t i = thread / lanes;
  if (i >= count) return;
  output[thread] = table[rows[i] * lanes + thread % lanes];
}

}  // namespace

int row_gather(const void* table, const std::int64_t* rows, std::int64_t count, int row_bytes,
               void* output, void* stream) {
  const int lanes = row_bytes / 16;
  const auto blocks = static_cast<unsigned>((count * lanes + 255) / 256);
  gather_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(table), rows, count, lanes, static_cast<uint4*>(output));
  return cudaGetLastError();
}

}  // namespace tessera::bench
