// src/kernels/dense_layer.h — a linear layer over a few samples, for models that only predict.
//
//   output[s][o] = bias[o] + sum over i of input[s][i] * weight[o][i], not below 0 if has_relu
//
// The sum goes over i in order, whatever else is computed beside it: a sample's result does not
// depend on which samples share its batch.

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

/// Outputs are laid out in blocks of so many.
inline constexpr std::int64_t kDenseBlock = 16;

/// Block by block: the weights of input 0 to the block's outputs, those of input 1, ...; outputs
/// beyond the last are 0. `bias` is filled up likewise.
struct DenseLayer {
  const float* weights = nullptr;
  const float* bias = nullptr;
  std::int64_t num_inputs = 0;
  std::int64_t num_outputs = 0;
  bool has_relu = false;

  std::int64_t num_blocks() const { return (num_outputs + kDenseBlock - 1) / kDenseBlock; }
};

struct DenseLayerKernels {
  /// Samples lie `input_stride` and `output_stride` numbers apart.
  void (*apply)(const DenseLayer& layer, const float* input, std::int64_t input_stride,
                std::int64_t num_samples, float* output, std::int64_t output_stride);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const DenseLayerKernels* dense_layer_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const DenseLayerKernels& dense_layer_kernels() noexcept;
/// The plain loops that judge the others.
const DenseLayerKernels& dense_layer_reference() noexcept;

}  // namespace tessera::kernels
