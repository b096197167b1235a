// The meaning of kernels/combine.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/combine.h"

namespace tessera::kernels {
namespace {

std::int64_t sample_of(const RowBlock& block, std::int64_t row) {
  return block.sample == nullptr ? row : block.sample[row];
}

float factor_of(const RowBlock& block, std::int64_t row) {
  return block.factor == nullptr ? 1.0F : block.factor[sample_of(block, row)];
}

void combine(const RowBlock* blocks, std::int64_t num_blocks, std::int64_t begin, std::int64_t end,
             std::int64_t stride, float* output) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      const RowBlock& block = blocks[b];
      for (std::int64_t c = 0; c < block.columns; ++c) {
        const float value =
            block.data[sample_of(block, row) * block.columns + c] * factor_of(block, row);
        float& sum = output[row * stride + block.column + c];
        sum = block.is_added ? sum + value : value;
      }
    }
  }
}

void spread(const RowBlock& block, std::int64_t begin, std::int64_t end, const float* gradient,
            std::int64_t stride) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t c = 0; c < block.columns; ++c) {
      const float value = gradient[row * stride + block.column + c] * factor_of(block, row);
      float& sum = block.data[sample_of(block, row) * block.columns + c];
      sum = block.sample == nullptr ? value : sum + value;
    }
  }
}

}  // namespace

const CombineKernels& combine_reference() noexcept {
  static constexpr CombineKernels kKernels{combine, spread};
  return kKernels;
}

}  // namespace tessera::kernels
