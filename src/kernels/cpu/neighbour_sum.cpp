// Sums of rows along edges. Compiled once per instruction set; see kernels/CMakeLists.txt. The
// inner loops run over columns and are left to the compiler's vectoriser; rows to come are
// prefetched, since their addresses are known long before they are needed.

#include "kernels/neighbour_sum.h"

namespace tessera::kernels {
namespace {

// Entries ahead: a row from memory takes about as long as eight rows from cache.
constexpr std::int64_t kAhead = 8;
constexpr std::int64_t kLineBytes = 64;

template <typename T>
inline void prefetch_row(const T* row, std::int64_t num_columns) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const std::int64_t size = num_columns * static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t at = 0; at < size && at < 16 * kLineBytes; at += kLineBytes) {
    __builtin_prefetch(bytes + at);
  }
}

template <typename T>
void neighbour_sum(const EdgeRows& rows, std::int64_t begin, std::int64_t end, const T* input,
                   std::int64_t num_columns, const T* weights, std::int64_t width, T* output) {
  const std::int64_t last = rows.first[end];
  for (std::int64_t i = begin; i < end; ++i) {
    T* __restrict__ sums = output + i * num_columns;
    for (std::int64_t c = 0; c < num_columns; ++c) sums[c] = 0;
    for (std::int64_t k = rows.first[i]; k < rows.first[i + 1]; ++k) {
      if (k + kAhead < last) {
        prefetch_row(input + rows.column[k + kAhead] * num_columns, num_columns);
      }
      const T* __restrict__ row = input + rows.column[k] * num_columns;
      if (weights == nullptr) {
        for (std::int64_t c = 0; c < num_columns; ++c) sums[c] += row[c];
      } else if (width == 1) {
        const T weight = weights[rows.edge[k]];
        for (std::int64_t c = 0; c < num_columns; ++c) sums[c] += row[c] * weight;
      } else {
        const T* __restrict__ weight = weights + rows.edge[k] * num_columns;
        for (std::int64_t c = 0; c < num_columns; ++c) sums[c] += row[c] * weight[c];
      }
    }
  }
}

template <typename T>
inline T dot(const T* __restrict__ a, const T* __restrict__ b, std::int64_t num_columns) {
  constexpr int kLanes = 16;  // as many sums as two vectors of the widest level hold
  T lanes[kLanes] = {};
  std::int64_t c = 0;
  for (; c + kLanes <= num_columns; c += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += a[c + lane] * b[c + lane];
  }
  T sum = 0;
  for (; c < num_columns; ++c) sum += a[c] * b[c];
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

template <typename T>
void edge_product(const EdgeRows& rows, std::int64_t begin, std::int64_t end, const T* a,
                  const T* b, std::int64_t num_columns, std::int64_t width, T* output) {
  const std::int64_t last = rows.first[end];
  for (std::int64_t i = begin; i < end; ++i) {
    const T* __restrict__ right = b + i * num_columns;
    for (std::int64_t k = rows.first[i]; k < rows.first[i + 1]; ++k) {
      if (k + kAhead < last) prefetch_row(a + rows.column[k + kAhead] * num_columns, num_columns);
      const T* __restrict__ left = a + rows.column[k] * num_columns;
      if (width == 1) {
        output[rows.edge[k]] = dot(left, right, num_columns);
      } else {
        T* __restrict__ product = output + rows.edge[k] * num_columns;
        for (std::int64_t c = 0; c < num_columns; ++c) product[c] = left[c] * right[c];
      }
    }
  }
}

}  // namespace

extern const NeighbourSumKernels<float> TESSERA_KERNEL_TABLE(kNeighbourSumFloat);
const NeighbourSumKernels<float> TESSERA_KERNEL_TABLE(kNeighbourSumFloat){neighbour_sum<float>,
                                                                          edge_product<float>};
extern const NeighbourSumKernels<double> TESSERA_KERNEL_TABLE(kNeighbourSumDouble);
const NeighbourSumKernels<double> TESSERA_KERNEL_TABLE(kNeighbourSumDouble){neighbour_sum<double>,
                                                                            edge_product<double>};

}  // namespace tessera::kernels
