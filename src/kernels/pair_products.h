// src/kernels/pair_products.h — products of all pairs of the vectors of a sample, and their
// gradient.
//
// A sample has vectors 0 .. count of `dim` numbers each: vector 0 is `first`, vector i begins at
// parts + offsets[i - 1].
//
//   products:   output = vector 0, then for i in 1 .. count, for j in 0 .. i - 1:
//                 dot(vector i, vector j)
//
//   gradients:  for i in 0 .. count:
//                 gradient of vector i = sum over j != i of g(i, j) * vector j,
//                 where g(i, j) is the gradient of dot(vector i, vector j);
//                 that of vector 0 has the gradient of the first `dim` outputs added

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

/// So many vectors a sample may have besides the first.
inline constexpr std::int64_t kMostPairVectors = 255;

/// Samples lie first_stride and parts_stride numbers apart.
struct SampleVectors {
  const float* first = nullptr;
  std::int64_t first_stride = 0;
  const float* parts = nullptr;
  std::int64_t parts_stride = 0;
  const std::int64_t* offsets = nullptr;
  std::int64_t count = 0;  // at most kMostPairVectors
  std::int64_t dim = 0;

  std::int64_t num_outputs() const { return dim + count * (count + 1) / 2; }
};

/// For samples begin .. end - 1. Rows of outputs are num_outputs() numbers apart.
struct PairProductKernels {
  void (*products)(const SampleVectors& vectors, std::int64_t begin, std::int64_t end,
                   float* output);
  /// `first_gradient` is [samples, dim]; `parts_gradient` is laid out as the parts, and what no
  /// vector covers is left alone.
  void (*gradients)(const SampleVectors& vectors, std::int64_t begin, std::int64_t end,
                    const float* gradient, float* first_gradient, float* parts_gradient);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const PairProductKernels* pair_product_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const PairProductKernels& pair_product_kernels() noexcept;
/// The plain loops that judge the others.
const PairProductKernels& pair_product_reference() noexcept;

}  // namespace tessera::kernels
