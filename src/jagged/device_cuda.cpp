#include <cstring>
#include <vector>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "jagged/device.h"
#include "kernels/cuda/jagged_launch.h"
#include "kernels/cuda/launch.h"
#include "tessera/core/check.h"

namespace tessera::jagged::detail {
namespace {

namespace cuda = kernels::cuda;

void* stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

void check(int error, const char* kernel) {
  TORCH_CHECK(error == 0, "jagged: the CUDA kernel '", kernel,
              "' did not start: ", cuda::error_text(error), ".");
}

cuda::Integers integers(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type() == at::kLong};
}

/// A few numbers of the host, from pinned memory: the host does not wait for what the device does.
at::Tensor on_device(const void* numbers, std::size_t bytes, c10::Device device) {
  const auto count = static_cast<std::int64_t>(bytes);
  at::Tensor staged = at::empty({count}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::memcpy(staged.data_ptr(), numbers, bytes);
  return staged.to(device, /*non_blocking=*/true);
}

}  // namespace

bool has_kernels_for(const at::Tensor& tensor) noexcept { return tensor.is_cuda(); }

at::Tensor device_offsets(const at::Tensor& lengths, at::ScalarType type) {
  const c10::cuda::CUDAGuard guard(lengths.device());
  const at::Tensor flat = lengths.reshape({-1}).contiguous();
  at::Tensor offsets = at::empty({flat.numel() + 1}, flat.options().dtype(type));
  const std::size_t bytes = cuda::running_sums_bytes(flat.numel());
  const at::Tensor work =
      at::empty({static_cast<std::int64_t>(bytes)}, flat.options().dtype(at::kByte));
  check(cuda::running_sums(integers(flat), flat.numel(), offsets.data_ptr(), type == at::kLong,
                           work.data_ptr(), bytes, stream()),
        "running sums");
  return offsets;
}

at::Tensor device_row_sums(const at::Tensor& lengths) {
  const c10::cuda::CUDAGuard guard(lengths.device());
  const at::Tensor rows = lengths.contiguous();
  at::Tensor sums = at::empty({rows.size(0)}, rows.options().dtype(at::kLong));
  check(cuda::row_sums(integers(rows), rows.size(0), rows.size(1), sums.data_ptr<std::int64_t>(),
                       stream()),
        "row sums");
  return sums;
}

at::Tensor device_copy_segments(const at::Tensor& data, const at::Tensor& sizes,
                                const at::Tensor& order, std::int64_t num_rows) {
  const c10::cuda::CUDAGuard guard(data.device());
  const at::Tensor input = data.contiguous();
  const at::Tensor from = device_offsets(sizes, at::kLong);
  const at::Tensor to = device_offsets(sizes.index_select(0, order), at::kLong);
  auto shape = input.sizes().vec();
  shape[0] = num_rows;
  at::Tensor output = at::empty(shape, input.options());
  const std::int64_t row_bytes =
      num_rows == 0 ? 0 : static_cast<std::int64_t>(output.nbytes()) / num_rows;
  check(cuda::copy_segments(input.const_data_ptr(), row_bytes, from.const_data_ptr<std::int64_t>(),
                            order.const_data_ptr<std::int64_t>(), to.const_data_ptr<std::int64_t>(),
                            order.numel(), num_rows, output.data_ptr(), stream()),
        "copy segments");
  return output;
}

Bucketized device_bucketize(const at::Tensor& lengths, const at::Tensor& values,
                            const at::Tensor& weights, const BucketizeOptions& options) {
  const c10::Device device = values.device();
  const c10::cuda::CUDAGuard guard(device);
  const at::Tensor ids = values.contiguous();
  const std::int64_t total = ids.numel();
  const at::Tensor offsets = device_offsets(lengths, at::kLong);
  const auto wide = ids.options().dtype(at::kLong);

  std::vector<std::int64_t> starts;
  for (const auto& of_feature : options.block_starts) {
    starts.insert(starts.end(), of_feature.begin(), of_feature.end());
  }
  const at::Tensor device_starts =
      starts.empty() ? at::Tensor() : on_device(starts.data(), starts.size() * 8, device);
  const auto* next_start =
      starts.empty() ? nullptr : static_cast<const std::int64_t*>(device_starts.const_data_ptr());
  std::vector<cuda::BucketBlocks> features(options.bags_per_feature.size());
  std::int64_t end_bag = 0;
  for (std::size_t f = 0; f < features.size(); ++f) {
    features[f].end_bag = end_bag += options.bags_per_feature[f];
    if (!options.block_starts.empty() && !options.block_starts[f].empty()) {
      features[f].starts = next_start;
      next_start += options.block_starts[f].size();
    } else {
      features[f].block_size = options.block_sizes[f];
    }
  }
  const at::Tensor device_features =
      on_device(features.data(), features.size() * sizeof(features[0]), device);

  cuda::BucketCall call;
  call.ids = integers(ids);
  call.num_ids = total;
  call.offsets = offsets.const_data_ptr<std::int64_t>();
  call.num_bags = lengths.numel();
  call.num_buckets = options.num_buckets;
  call.features = static_cast<const cuda::BucketBlocks*>(device_features.const_data_ptr());
  call.num_features = static_cast<int>(features.size());
  at::Tensor counts = at::empty({options.num_buckets * call.num_bags}, wide);
  check(cuda::count_buckets(call, counts.data_ptr<std::int64_t>(), stream()), "count buckets");
  at::Tensor cursors = device_offsets(counts, at::kLong);

  Bucketized result;
  result.lengths = counts.to(lengths.scalar_type());
  result.values = at::empty_like(ids);
  if (options.positions) result.positions = at::empty_like(ids);
  if (options.unbucketize) result.unbucketize_permute = at::empty({total}, wide);
  const at::Tensor from = weights.defined() ? at::empty({total}, wide) : at::Tensor();
  cuda::BucketTargets targets;
  targets.ids = result.values.data_ptr();
  if (options.positions) targets.positions = result.positions.data_ptr();
  if (options.unbucketize) targets.place = result.unbucketize_permute.data_ptr<std::int64_t>();
  if (from.defined()) targets.from = from.data_ptr<std::int64_t>();
  check(cuda::fill_buckets(call, cursors.data_ptr<std::int64_t>(), targets, stream()),
        "fill buckets");
  if (weights.defined()) result.weights = weights.index_select(0, from);
  return result;
}

}  // namespace tessera::jagged::detail
