// The meaning of kernels/dense_layer.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/dense_layer.h"

#include <algorithm>

namespace tessera::kernels {
namespace {

void apply(const DenseLayer& layer, const float* input, std::int64_t input_stride,
           std::int64_t num_samples, float* output, std::int64_t output_stride) {
  for (std::int64_t s = 0; s < num_samples; ++s) {
    for (std::int64_t o = 0; o < layer.num_outputs; ++o) {
      const float* weights =
          layer.weights + o / kDenseBlock * kDenseBlock * layer.num_inputs + o % kDenseBlock;
      float sum = layer.bias[o];
      for (std::int64_t i = 0; i < layer.num_inputs; ++i) {
        sum += input[s * input_stride + i] * weights[i * kDenseBlock];
      }
      output[s * output_stride + o] = layer.has_relu ? std::max(sum, 0.0F) : sum;
    }
  }
}

}  // namespace

const DenseLayerKernels& dense_layer_reference() noexcept {
  static const DenseLayerKernels kernels{apply};
  return kernels;
}

}  // namespace tessera::kernels
