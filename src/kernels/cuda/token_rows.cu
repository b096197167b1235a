// Merging of token statistics, the coefficients of the gradient, and scaling, on CUDA.

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/logit_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kReduceThreads = 512;  // at 1024 the merge does not fit the registers

__global__ void merge_kernel(MergeTask task) {
  const int64_t vocab = vocab_of(task);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row == 0) *task.vocab = vocab;
  if (row < task.num_rows) merge_row(task, row, vocab);
}

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

/// One block: few rows, and always the same order of additions.
__global__ void __launch_bounds__(kReduceThreads, 1) merge_and_reduce_kernel(MergeTask task) {
  __shared__ double losses[32];
  __shared__ long long counts[32];
  const int64_t vocab = vocab_of(task);
  double loss = 0.0;
  long long count = 0;
  for (int64_t row = threadIdx.x; row < task.num_rows; row += kReduceThreads) {
    loss += merge_row(task, row, vocab);
    count += is_ignored(task.shape, task.labels, row) ? 0 : 1;
  }
  loss = block_sum(loss, losses);
  count = block_sum(count, counts);
  if (threadIdx.x != 0) return;
  const double inverse = task.divide_by_count ? 1.0 / (count > 0 ? count : 1) : 1.0;
  *task.vocab = vocab;
  *task.reduced = static_cast<float>(loss * inverse);
  *task.inverse = static_cast<float>(inverse);
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

}  // namespace

int merge_tokens(const MergeTask& task, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (task.reduced != nullptr) {
    merge_and_reduce_kernel<<<1, kReduceThreads, 0, on>>>(task);
  } else {
    merge_kernel<<<std::max(1U, blocks_for(task.num_rows)), kThreads, 0, on>>>(task);
  }
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
  switch (element) {
    case Element::kBFloat16:
      scale_kernel<<<blocks, kThreads, 0, on>>>(static_cast<__nv_bfloat16*>(data), count, factor);
      break;
    case Element::kFloat16:
      scale_kernel<<<blocks, kThreads, 0, on>>>(static_cast<__half*>(data), count, factor);
      break;
    default:
      scale_kernel<<<blocks, kThreads, 0, on>>>(static_cast<float*>(data), count, factor);
  }
  return static_cast<int>(cudaGetLastError());
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace tessera::kernels::cuda
