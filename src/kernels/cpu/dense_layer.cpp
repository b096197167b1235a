// A linear layer over a few samples. Compiled once per instruction set; see kernels/CMakeLists.txt
// and the note at the top of reduce.cpp.

#include "kernels/dense_layer.h"

#include "kernels/cpu/row_vector.h"

namespace tessera::kernels {
namespace {

constexpr int kVectors = kDenseBlock / kLanes;

TESSERA_INLINE_ALWAYS Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return bits_as<Floats>(_mm512_fmadd_ps(a, b, sum));
#elif defined(__AVX2__)
  return bits_as<Floats>(_mm256_fmadd_ps(a, b, sum));
#else
  return a * b + sum;
#endif
}

// kSamples samples and kBlocks blocks of outputs at a time. Each output is a sum of its own, made
// in the same order by every choice of both numbers.
template <int kSamples, int kBlocks>
TESSERA_INLINE_ALWAYS void apply_tile(const DenseLayer& layer, std::int64_t block,
                                      const float* input, std::int64_t input_stride, float* output,
                                      std::int64_t output_stride) {
  constexpr int kWide = kBlocks * kVectors;
  const std::int64_t block_numbers = layer.num_inputs * kDenseBlock;
  const float* weights = layer.weights + block * block_numbers;
  const float* bias = layer.bias + block * kDenseBlock;
  Floats sums[kSamples][kWide];
  for (int s = 0; s < kSamples; ++s) {
    for (int v = 0; v < kWide; ++v) sums[s][v] = SingleRow::load(bias + v * kLanes);
  }
  for (std::int64_t i = 0; i < layer.num_inputs; ++i) {
    Floats column[kWide];
    for (int v = 0; v < kWide; ++v) {
      column[v] = SingleRow::load(weights + v / kVectors * block_numbers + i * kDenseBlock +
                                  v % kVectors * kLanes);
    }
    for (int s = 0; s < kSamples; ++s) {
      const Floats x = splat(input[s * input_stride + i]);
      for (int v = 0; v < kWide; ++v) sums[s][v] = multiply_add(x, column[v], sums[s][v]);
    }
  }
  for (int s = 0; s < kSamples; ++s) {
    float* to = output + s * output_stride + block * kDenseBlock;
    std::int64_t left = layer.num_outputs - block * kDenseBlock;
    for (int v = 0; v < kWide; ++v, to += kLanes, left -= kLanes) {
      Floats sum = sums[s][v];
      if (layer.has_relu) sum = larger(sum, Floats{});
      if (left >= kLanes) {
        store(to, sum);
      } else {
        for (std::int64_t lane = 0; lane < left; ++lane) to[lane] = sum[lane];
      }
    }
  }
}

template <int kSamples>
void apply_samples(const DenseLayer& layer, const float* input, std::int64_t input_stride,
                   float* output, std::int64_t output_stride, std::int64_t block, bool is_double) {
  if (is_double) {
    apply_tile<kSamples, 2>(layer, block, input, input_stride, output, output_stride);
  } else {
    apply_tile<kSamples, 1>(layer, block, input, input_stride, output, output_stride);
  }
}

// Blocks outermost: their weights stay in the cache while all samples pass.
void apply(const DenseLayer& layer, const float* input, std::int64_t input_stride,
           std::int64_t num_samples, float* output, std::int64_t output_stride) {
  const std::int64_t num_blocks = layer.num_blocks();
  for (std::int64_t block = 0; block < num_blocks; block += 2) {
    const bool is_double = block + 1 < num_blocks;
    std::int64_t s = 0;
    for (; s + 4 <= num_samples; s += 4) {
      apply_samples<4>(layer, input + s * input_stride, input_stride, output + s * output_stride,
                       output_stride, block, is_double);
    }
    for (; s < num_samples; ++s) {
      apply_samples<1>(layer, input + s * input_stride, input_stride, output + s * output_stride,
                       output_stride, block, is_double);
    }
  }
}

}  // namespace

extern const DenseLayerKernels TESSERA_KERNEL_TABLE(kDenseLayer);
const DenseLayerKernels TESSERA_KERNEL_TABLE(kDenseLayer){apply};

}  // namespace tessera::kernels
