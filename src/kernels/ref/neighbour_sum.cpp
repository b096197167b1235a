// The meaning of kernels/neighbour_sum.h as plain loops: slow, obvious, and the judge of the
// others.

#include "kernels/neighbour_sum.h"

namespace tessera::kernels {
namespace {

template <typename T>
void neighbour_sum(const EdgeRows& rows, std::int64_t begin, std::int64_t end, const T* input,
                   std::int64_t num_columns, const T* weights, std::int64_t width, T* output) {
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t c = 0; c < num_columns; ++c) {
      T sum = 0;
      for (std::int64_t k = rows.first[i]; k < rows.first[i + 1]; ++k) {
        const T value = input[rows.column[k] * num_columns + c];
        const T weight =
            weights == nullptr ? T(1) : weights[rows.edge[k] * width + (width == 1 ? 0 : c)];
        sum += value * weight;
      }
      output[i * num_columns + c] = sum;
    }
  }
}

template <typename T>
void edge_product(const EdgeRows& rows, std::int64_t begin, std::int64_t end, const T* a,
                  const T* b, std::int64_t num_columns, std::int64_t width, T* output) {
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t k = rows.first[i]; k < rows.first[i + 1]; ++k) {
      T sum = 0;
      for (std::int64_t c = 0; c < num_columns; ++c) {
        const T product = a[rows.column[k] * num_columns + c] * b[i * num_columns + c];
        sum += product;
        if (width != 1) output[rows.edge[k] * num_columns + c] = product;
      }
      if (width == 1) output[rows.edge[k]] = sum;
    }
  }
}

}  // namespace

template <>
const NeighbourSumKernels<float>& neighbour_sum_reference<float>() noexcept {
  static constexpr NeighbourSumKernels<float> kKernels{neighbour_sum<float>, edge_product<float>};
  return kKernels;
}

template <>
const NeighbourSumKernels<double>& neighbour_sum_reference<double>() noexcept {
  static constexpr NeighbourSumKernels<double> kKernels{neighbour_sum<double>,
                                                        edge_product<double>};
  return kKernels;
}

}  // namespace tessera::kernels
