// The meaning of kernels/table_lookup.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/table_lookup.h"

#include "kernels/ref/logit_value.h"

namespace tessera::kernels {
namespace {

/// The number in row `id`, which is 0 if it is outside; `bad` notes the first such position.
double number(const LookupIds& ids, const TableFeature& feature, std::int64_t position,
              std::int64_t column, std::int64_t& bad) {
  std::int64_t id = ids.id(position);
  if (id < 0 || id >= feature.rows.num_rows) {
    if (bad < 0) bad = position;
    if (feature.rows.num_rows == 0) return 0;
    id = 0;
  }
  return ref::read(feature.rows.element, feature.rows.data, id * feature.rows.num_columns + column);
}

double weight(const LookupIds& ids, std::int64_t position) {
  return ids.weights == nullptr ? 1.0 : static_cast<double>(ids.weights[position]);
}

std::int64_t pooled(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                    std::int64_t end, float* output) {
  std::int64_t bad = -1;
  for (std::int64_t bag = begin; bag < end; ++bag) {
    const std::int64_t first = ids.offset(feature.first_bag + bag);
    const std::int64_t last = ids.offset(feature.first_bag + bag + 1);
    for (std::int64_t c = 0; c < feature.rows.num_columns; ++c) {
      double sum = 0;
      for (std::int64_t k = first; k < last; ++k) {
        sum += weight(ids, k) * number(ids, feature, k, c, bad);
      }
      if (feature.is_mean && last > first) sum /= static_cast<double>(last - first);
      output[feature.output + bag * feature.output_stride + c] = static_cast<float>(sum);
    }
  }
  return bad;
}

std::int64_t sequence(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                      std::int64_t end, float* output) {
  const std::int64_t start = ids.offset(feature.first_bag);
  std::int64_t bad = -1;
  for (std::int64_t k = begin; k < end; ++k) {
    for (std::int64_t c = 0; c < feature.rows.num_columns; ++c) {
      output[feature.output + k * feature.rows.num_columns + c] =
          static_cast<float>(weight(ids, start + k) * number(ids, feature, start + k, c, bad));
    }
  }
  return bad;
}

void weight_gradient(const LookupIds& ids, const TableFeature& feature, bool is_sequence,
                     std::int64_t begin, std::int64_t end, const float* gradient, float* output) {
  const std::int64_t start = ids.offset(feature.first_bag);
  std::int64_t bad = -1;
  for (std::int64_t bag = begin; bag < end; ++bag) {
    const std::int64_t first = ids.offset(feature.first_bag + bag);
    const std::int64_t last = ids.offset(feature.first_bag + bag + 1);
    for (std::int64_t k = first; k < last; ++k) {
      const std::int64_t base =
          feature.output +
          (is_sequence ? (k - start) * feature.rows.num_columns : bag * feature.output_stride);
      double sum = 0;
      for (std::int64_t c = 0; c < feature.rows.num_columns; ++c) {
        sum += static_cast<double>(gradient[base + c]) * number(ids, feature, k, c, bad);
      }
      if (feature.is_mean && !is_sequence) sum /= static_cast<double>(last - first);
      output[k] = static_cast<float>(sum);
    }
  }
}

}  // namespace

const TableLookupKernels& table_lookup_reference() noexcept {
  static constexpr TableLookupKernels kKernels{pooled, sequence, weight_gradient};
  return kKernels;
}

}  // namespace tessera::kernels
