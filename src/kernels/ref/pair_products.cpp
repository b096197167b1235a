// The meaning of kernels/pair_products.h as plain loops: slow, obvious, and the judge of the
// others.

#include "kernels/pair_products.h"

namespace tessera::kernels {
namespace {

const float* vector_of(const SampleVectors& vectors, std::int64_t sample, std::int64_t i) {
  return i == 0 ? vectors.first + sample * vectors.first_stride
                : vectors.parts + sample * vectors.parts_stride + vectors.offsets[i - 1];
}

void products(const SampleVectors& vectors, std::int64_t begin, std::int64_t end, float* output) {
  for (std::int64_t b = begin; b < end; ++b) {
    float* out = output + b * vectors.num_outputs();
    for (std::int64_t c = 0; c < vectors.dim; ++c) *out++ = vector_of(vectors, b, 0)[c];
    for (std::int64_t i = 1; i <= vectors.count; ++i) {
      for (std::int64_t j = 0; j < i; ++j) {
        double sum = 0;
        for (std::int64_t c = 0; c < vectors.dim; ++c) {
          sum += static_cast<double>(vector_of(vectors, b, i)[c]) * vector_of(vectors, b, j)[c];
        }
        *out++ = static_cast<float>(sum);
      }
    }
  }
}

void gradients(const SampleVectors& vectors, std::int64_t begin, std::int64_t end,
               const float* gradient, float* first_gradient, float* parts_gradient) {
  for (std::int64_t b = begin; b < end; ++b) {
    const float* row = gradient + b * vectors.num_outputs();
    for (std::int64_t i = 0; i <= vectors.count; ++i) {
      float* to = i == 0 ? first_gradient + b * vectors.dim
                         : parts_gradient + b * vectors.parts_stride + vectors.offsets[i - 1];
      for (std::int64_t c = 0; c < vectors.dim; ++c) {
        double sum = i == 0 ? row[c] : 0;
        for (std::int64_t j = 0; j <= vectors.count; ++j) {
          if (j == i) continue;
          const std::int64_t larger = i > j ? i : j;
          const std::int64_t pair = larger * (larger - 1) / 2 + (i > j ? j : i);
          sum += static_cast<double>(row[vectors.dim + pair]) * vector_of(vectors, b, j)[c];
        }
        to[c] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace

const PairProductKernels& pair_product_reference() noexcept {
  static constexpr PairProductKernels kKernels{products, gradients};
  return kKernels;
}

}  // namespace tessera::kernels
