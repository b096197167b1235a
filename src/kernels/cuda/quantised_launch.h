// src/kernels/cuda/quantised_launch.h — starts lookups in rows of few bits on CUDA. No torch
// header, no CUDA header; pointers are device pointers and `stream` is a cudaStream_t. Each
// function returns a cudaError_t (0 is success) and waits for nothing.

#pragma once

#include <cstdint>

#include "kernels/quantised_rows.h"

namespace tessera::kernels::cuda {

/// One feature: which rows, and where its output begins.
struct QuantisedFeature {
  QuantisedRows rows;
  std::int64_t column = 0;  // of the output; 0 without pooling
  bool is_mean = false;
};

/// Bags of all features: bag b of feature f owns the positions offsets[f * num_bags + b] to the
/// next offset - 1. `features` is on the device.
struct QuantisedCall {
  const std::int64_t* ids = nullptr;
  const std::int64_t* offsets = nullptr;
  const float* weights = nullptr;  // one per position; null: all 1
  const QuantisedFeature* features = nullptr;
  int num_features = 0;
  std::int64_t num_bags = 0;  // of each feature
  std::int64_t num_positions = 0;
  std::int64_t stride = 0;  // numbers from one output to the next
  bool is_sequence = false;
};

/// *result = the smallest position whose id is not a row, num_positions if there is none, or -2 if
/// the offsets do not ascend from 0 to at most num_positions.
int quantised_check(const QuantisedCall& call, std::int64_t* result, void* stream);
/// The bits of the CPU's kernels: see kernels/quantised_rows.h. Ids that are no rows count as row
/// 0. `host_features` are the call's features, on the host: they choose the kernels.
int quantised_lookup(const QuantisedCall& call, const QuantisedFeature* host_features,
                     float* output, void* stream);

}  // namespace tessera::kernels::cuda
