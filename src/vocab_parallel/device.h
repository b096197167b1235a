// src/vocab_parallel/device.h — runs the kernels where the tensors are.

#pragma once

#include <c10/core/Device.h>

#include "kernels/softmax_gradient.h"
#include "kernels/softmax_statistics.h"
#include "kernels/token_rows.h"

namespace tessera::vocab_parallel::detail {

/// On the CPU these return when the work is done, with the threads of LibTorch; on CUDA they put it
/// on the current stream of the current device.
void run_statistics(c10::Device device, const kernels::SoftmaxStatisticsTask& task);
void run_gradient(c10::Device device, const kernels::SoftmaxGradientTask& task);
void run_merge(c10::Device device, const kernels::MergeTask& task);
void run_fold(c10::Device device, const kernels::MergeTask& task, float* statistics);
void run_coefficients(c10::Device device, const kernels::CoefficientsTask& task);

/// Statistics and gradient of a loss in one visit of each row, for one rank. The gradient
/// overwrites the logits. Returns false, having done nothing, where there is no such kernel for the
/// task.
///
/// The upstream gradient of every row is 1, or 1 over the number of labels that are not ignored if
/// `divide_by_count`.
bool run_fused(c10::Device device, const kernels::SoftmaxStatisticsTask& task,
               const kernels::LossShape& shape, bool divide_by_count);

// The CUDA side of the above; in a build without CUDA they throw.
void cuda_statistics(const kernels::SoftmaxStatisticsTask& task);
void cuda_gradient(const kernels::SoftmaxGradientTask& task);
void cuda_merge(const kernels::MergeTask& task);
void cuda_fold(const kernels::MergeTask& task, float* statistics);
void cuda_coefficients(const kernels::CoefficientsTask& task);
bool cuda_fused(const kernels::SoftmaxStatisticsTask& task, const kernels::LossShape& shape,
                bool divide_by_count);
/// Multiplies `count` elements by `*factor`, unless that is 1.
void cuda_scale(kernels::Element element, void* data, std::int64_t count, const float* factor);

}  // namespace tessera::vocab_parallel::detail
