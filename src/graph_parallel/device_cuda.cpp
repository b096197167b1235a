#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "graph_parallel/device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/neighbour_launch.h"
#include "tessera/core/check.h"

namespace tessera::graph_parallel::detail {
namespace {

namespace cuda = kernels::cuda;

void check(int error, const char* kernel) {
  TORCH_CHECK(error == 0, "graph: the CUDA kernel '", kernel,
              "' did not start: ", cuda::error_text(error), ".");
}

/// Calls `body` with a number of the tensor's type, on its device and stream.
template <typename Body>
void for_type(const at::Tensor& tensor, const Body& body) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  void* const stream = c10::cuda::getCurrentCUDAStream().stream();
  if (tensor.scalar_type() == at::kFloat) {
    body(float{}, stream);
  } else {
    body(double{}, stream);
  }
}

}  // namespace

bool has_kernels_for(const at::Tensor& tensor) noexcept {
  return tensor.is_cuda() &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
}

void device_neighbour_sum(const kernels::EdgeRows& rows, const at::Tensor& input,
                          const at::Tensor& weights, const at::Tensor& output) {
  for_type(output, [&](auto zero, void* stream) {
    using T = decltype(zero);
    check(cuda::neighbour_sum<T>(rows, output.size(0), input.const_data_ptr<T>(), input.size(1),
                                 weights.defined() ? weights.const_data_ptr<T>() : nullptr,
                                 weights.defined() ? weights.size(1) : 1, output.data_ptr<T>(),
                                 stream),
          "neighbour sum");
  });
}

void device_edge_product(const kernels::EdgeRows& rows, const at::Tensor& a, const at::Tensor& b,
                         const at::Tensor& output) {
  for_type(output, [&](auto zero, void* stream) {
    using T = decltype(zero);
    check(cuda::edge_product<T>(rows, b.size(0), a.const_data_ptr<T>(), b.const_data_ptr<T>(),
                                b.size(1), output.size(1), output.data_ptr<T>(), stream),
          "edge product");
  });
}

}  // namespace tessera::graph_parallel::detail
