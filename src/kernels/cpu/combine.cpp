// Blocks of rows side by side. Compiled once per instruction set; see kernels/CMakeLists.txt. The
// inner loops run over columns and are left to the compiler's vectoriser.

#include <cstring>

#include "kernels/combine.h"

namespace tessera::kernels {
namespace {

inline void put(float* __restrict__ to, const float* __restrict__ from, std::int64_t count,
                float factor, bool is_added) {
  if (is_added) {
    for (std::int64_t c = 0; c < count; ++c) to[c] += from[c] * factor;
  } else {
    for (std::int64_t c = 0; c < count; ++c) to[c] = from[c] * factor;
  }
}

inline void put(float* __restrict__ to, const float* __restrict__ from, std::int64_t count,
                bool is_added) {
  if (is_added) {
    for (std::int64_t c = 0; c < count; ++c) to[c] += from[c];
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  }
}

void combine(const RowBlock* blocks, std::int64_t num_blocks, std::int64_t begin, std::int64_t end,
             std::int64_t stride, float* output) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      const RowBlock& block = blocks[b];
      const std::int64_t sample = block.sample == nullptr ? row : block.sample[row];
      const float* from = block.data + sample * block.columns;
      float* to = output + row * stride + block.column;
      if (block.factor == nullptr) {
        put(to, from, block.columns, block.is_added);
      } else {
        put(to, from, block.columns, block.factor[sample], block.is_added);
      }
    }
  }
}

void spread(const RowBlock& block, std::int64_t begin, std::int64_t end, const float* gradient,
            std::int64_t stride) {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t sample = block.sample == nullptr ? row : block.sample[row];
    const float* from = gradient + row * stride + block.column;
    float* to = block.data + sample * block.columns;
    if (block.factor == nullptr) {
      put(to, from, block.columns, block.sample != nullptr);
    } else {
      put(to, from, block.columns, block.factor[sample], block.sample != nullptr);
    }
  }
}

}  // namespace

extern const CombineKernels TESSERA_KERNEL_TABLE(kCombine);
const CombineKernels TESSERA_KERNEL_TABLE(kCombine){combine, spread};

}  // namespace tessera::kernels
