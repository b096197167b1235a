// Merging of token statistics, the coefficients of the gradient, and scaling, on CUDA.

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/logit_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kReduceThreads = 1024;

template <typename Value>
__device__ Value block_sum(Value value, Value* shared) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0U, value, offset);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = threadIdx.x < blockDim.x / 32 ? shared[threadIdx.x] : Value(0);
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0U, value, offset);
  }
  return value;  // in thread 0
}

/// Loss and number of labels of one block of rows.
struct Partial {
  double loss;
  long long count;
};

/// With `partials`, one per block, for the sum that follows.
__global__ void __launch_bounds__(kThreads) merge_kernel(MergeTask task, Partial* partials) {
  __shared__ double losses[32];
  __shared__ long long counts[32];
  let_next_start();
  wait_for_previous();
  const int64_t vocab = vocab_of(task);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row == 0) *task.vocab = vocab;
  double loss = 0.0;
  long long count = 0;
  if (row < task.num_rows) {
    loss = merge_row(task, row, vocab);
    count = is_ignored(task.shape, task.labels, row) ? 0 : 1;
  }
  if (partials == nullptr) return;
  loss = block_sum(loss, losses);
  count = block_sum(count, counts);
  if (threadIdx.x == 0) {
    partials[blockIdx.x].loss = loss;
    partials[blockIdx.x].count = count;
  }
}

/// One block, so that the additions always have the same order.
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(MergeTask task, const Partial* partials, int num_partials) {
  __shared__ double losses[32];
  __shared__ long long counts[32];
  wait_for_previous();
  double loss = 0.0;
  long long count = 0;
  for (int i = threadIdx.x; i < num_partials; i += kThreads) {
    loss += partials[i].loss;
    count += partials[i].count;
  }
  loss = block_sum(loss, losses);
  count = block_sum(count, counts);
  if (threadIdx.x != 0) return;
  const double inverse =
      task.divide_by_count ? 1.0 / static_cast<double>(count > 0 ? count : 1) : 1.0;
  *task.reduced = static_cast<float>(loss * inverse);
  *task.inverse = static_cast<float>(inverse);
}

__global__ void fold_kernel(MergeTask task, float* statistics) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < task.num_rows) fold_row(task, statistics, row);
}

__global__ void coefficients_kernel(CoefficientsTask task) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < task.num_rows) coefficients_row(task, row);
}

__global__ void __launch_bounds__(kReduceThreads)
    inverse_count_kernel(const int64_t* labels, int64_t num_labels, int64_t ignored,
                         float* inverse) {
  __shared__ long long counts[32];
  long long count = 0;
  for (int64_t i = threadIdx.x; i < num_labels; i += kReduceThreads) {
    count += labels[i] != ignored ? 1 : 0;
  }
  count = block_sum(count, counts);
  if (threadIdx.x == 0) *inverse = static_cast<float>(1.0 / (count > 0 ? count : 1));
}

template <typename T>
__global__ void scale_kernel(T* data, int64_t count, const float* factor) {
  const float f = *factor;
  if (f == 1.F) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    data[i] = Form<T>::narrow(Form<T>::widen(data[i]) * f);
  }
}

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

/// Starts a kernel that waits for the one before by itself, so that its start takes no time of its
/// own where the device can do that.
template <typename... Parameters, typename... Arguments>
cudaError_t start_early(void (*kernel)(Parameters...), unsigned blocks, cudaStream_t stream,
                        Arguments... arguments) {
  int device = 0;
  int major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace

std::int64_t merge_workspace_bytes(std::int64_t num_rows) {
  return static_cast<std::int64_t>(sizeof(Partial)) * std::max(1U, blocks_for(num_rows));
}

int merge_tokens(const MergeTask& task, void* workspace, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const unsigned blocks = std::max(1U, blocks_for(task.num_rows));
  auto* partials = task.reduced != nullptr ? static_cast<Partial*>(workspace) : nullptr;
  cudaError_t error = start_early(merge_kernel, blocks, on, task, partials);
  if (error == cudaSuccess && partials != nullptr) {
    error = start_early(reduce_kernel, 1U, on, task, partials, static_cast<int>(blocks));
  }
  return static_cast<int>(error);
}

int fold_parts(const MergeTask& task, float* statistics, void* stream) {
  if (task.num_rows == 0) return 0;
  fold_kernel<<<blocks_for(task.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      task, statistics);
  return static_cast<int>(cudaGetLastError());
}

int token_coefficients(const CoefficientsTask& task, void* stream) {
  if (task.num_rows == 0) return 0;
  coefficients_kernel<<<blocks_for(task.num_rows), kThreads, 0,
                        static_cast<cudaStream_t>(stream)>>>(task);
  return static_cast<int>(cudaGetLastError());
}

int inverse_count(const std::int64_t* labels, std::int64_t count, std::int64_t ignored,
                  float* inverse, void* stream) {
  inverse_count_kernel<<<1, kReduceThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      labels, count, ignored, inverse);
  return static_cast<int>(cudaGetLastError());
}

int scale(Element element, void* data, std::int64_t count, const float* factor, void* stream) {
  if (count == 0) return 0;
  const auto on = static_cast<cudaStream_t>(stream);
  const unsigned blocks = std::min(blocks_for(count), 132U * 16U);
  with_type_of(element, [&]<typename T>() {
    scale_kernel<<<blocks, kThreads, 0, on>>>(static_cast<T*>(data), count, factor);
  });
  return static_cast<int>(cudaGetLastError());
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace tessera::kernels::cuda
