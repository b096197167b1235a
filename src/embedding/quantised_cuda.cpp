#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <ATen/Functions.h>

#include "embedding/quantised_device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/quantised_launch.h"
#include "tessera/core/check.h"

namespace tessera::embedding::detail {
namespace {

namespace cuda = kernels::cuda;

void check(int error, const char* kernel) {
  TORCH_CHECK(error == 0, "embed.quantised: the CUDA kernel '", kernel,
              "' did not start: ", cuda::error_text(error), ".");
}

kernels::RowType kernel_type(RowType type) {
  using Kernel = kernels::RowType;
  constexpr Kernel kTypes[] = {Kernel::kFloat32, Kernel::kFloat16, Kernel::kBFloat16, Kernel::kInt8,
                               Kernel::kInt4,    Kernel::kInt2,    Kernel::kFloat8};
  return kTypes[static_cast<std::size_t>(type)];
}

}  // namespace

bool has_quantised_cuda() noexcept { return true; }

std::int64_t quantised_lookup_cuda(const QuantisedPass& pass, const at::Tensor& output) {
  const c10::cuda::CUDAGuard guard(output.device());
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
  std::vector<cuda::QuantisedFeature> features;
  for (const QuantisedPass::Feature& feature : pass.features) {
    features.push_back({{kernel_type(feature.rows.type), feature.rows.data, feature.rows.num_rows,
                         feature.rows.num_columns, feature.rows.row_bytes},
                        feature.column,
                        feature.is_mean});
  }
  const auto num_bytes =
      static_cast<std::int64_t>(features.size() * sizeof(cuda::QuantisedFeature));
  const at::Tensor uploaded = at::empty({num_bytes}, output.options().dtype(at::kByte));
  check(cudaMemcpyAsync(uploaded.data_ptr(), features.data(), static_cast<std::size_t>(num_bytes),
                        cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
        "upload");
  cuda::QuantisedCall call;
  call.ids = pass.ids.const_data_ptr<std::int64_t>();
  call.offsets = pass.offsets.const_data_ptr<std::int64_t>();
  call.weights = pass.weights.defined() ? pass.weights.const_data_ptr<float>() : nullptr;
  call.features = static_cast<const cuda::QuantisedFeature*>(uploaded.const_data_ptr());
  call.num_features = static_cast<int>(features.size());
  call.num_bags = pass.batch;
  call.num_positions = pass.ids.numel();
  call.stride = output.size(1);
  call.is_sequence = pass.is_sequence;
  const at::Tensor bad = at::empty({1}, pass.ids.options());
  check(cuda::quantised_check(call, bad.data_ptr<std::int64_t>(), stream), "quantised_check");
  const auto found = bad.item<std::int64_t>();
  // Offsets that are wrong would be followed; ids that are wrong are refused by the caller.
  if (found != call.num_positions) return found;
  check(cuda::quantised_lookup(call, features.data(), output.data_ptr<float>(), stream),
        "quantised_lookup");
  return found;
}

}  // namespace tessera::embedding::detail
