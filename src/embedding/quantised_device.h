// src/embedding/quantised_device.h — lookups in rows of few bits on a CUDA device.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/embedding/quantised_rows.h"

namespace tessera::embedding::detail {

/// One call; all tensors are on one device, contiguous, ids and offsets int64, weights float32.
struct QuantisedPass {
  struct Feature {
    RowTable rows;  // on the device
    std::int64_t column = 0;
    bool is_mean = false;
  };
  std::vector<Feature> features;
  at::Tensor ids;
  at::Tensor offsets;
  at::Tensor weights;  // undefined: all 1
  std::int64_t batch = 0;
  bool is_sequence = false;
};

/// Whether this build has the kernels.
bool has_quantised_cuda() noexcept;
/// Fills `output`. Returns the smallest position whose id is not a row, the number of ids if there
/// is none, or -2 for offsets that do not ascend; waits for that.
std::int64_t quantised_lookup_cuda(const QuantisedPass& pass, const at::Tensor& output);

}  // namespace tessera::embedding::detail
