// src/kernels/cuda/launch.h — starts the CUDA kernels. No torch header, no CUDA header.
//
// Same tasks and same meaning as the CPU kernels; pointers are device pointers. `stream` is a
// cudaStream_t. Each function returns a cudaError_t (0 is success) and waits for nothing.

#pragma once

#include <cstdint>

#include "kernels/softmax_gradient.h"
#include "kernels/softmax_statistics.h"
#include "kernels/token_rows.h"

namespace tessera::kernels::cuda {

int softmax_statistics(const SoftmaxStatisticsTask& task, void* stream);
int softmax_gradient(const SoftmaxGradientTask& task, void* stream);
/// `workspace` holds merge_workspace_bytes; it may be null if the losses are not reduced.
int merge_tokens(const MergeTask& task, void* workspace, void* stream);
std::int64_t merge_workspace_bytes(std::int64_t num_rows);
int fold_parts(const MergeTask& task, float* statistics, void* stream);
int token_coefficients(const CoefficientsTask& task, void* stream);

/// Statistics, and the gradient of the summed loss written over the logits, with each row held on
/// chip in between. `inverse` (device, one value) multiplies the gradient if not null.
///
/// Needs 16-bit logits and a row that fits: one block on any GPU, a cluster on Hopper. See
/// can_fuse.
int softmax_fused(const SoftmaxStatisticsTask& task, const LossShape& shape, const float* inverse,
                  void* stream);

/// Whether softmax_fused takes the task on the current device.
bool can_fuse(const SoftmaxStatisticsTask& task, const LossShape& shape);

/// *inverse = 1 / max(1, number of labels that are not `ignored`).
int inverse_count(const std::int64_t* labels, std::int64_t count, std::int64_t ignored,
                  float* inverse, void* stream);

/// Multiplies `count` elements by *factor; reads and writes nothing if that is 1.
int scale(Element element, void* data, std::int64_t count, const float* factor, void* stream);

/// The text of a cudaError_t.
const char* error_text(int error);

}  // namespace tessera::kernels::cuda
