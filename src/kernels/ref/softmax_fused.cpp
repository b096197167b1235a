// The meaning of kernels/softmax_fused.h as a plain loop, in double: the judge of the others.

#include "kernels/softmax_fused.h"

#include <cmath>
#include <limits>

#include "kernels/ref/logit_value.h"

namespace tessera::kernels {

void softmax_fused_reference(const SoftmaxFusedTask& task, std::int64_t first, std::int64_t last,
                             float* /*workspace*/) {
  softmax_statistics_reference(task.statistics, first, last);
  const LogitRows& rows = task.statistics.rows;
  const Labels& labels = task.statistics.labels;
  const double scale = task.statistics.scale;
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t offset = rows.offset(row);
    const bool ignored = labels.ids[row] == labels.ignored;
    const double weight = ignored ? 0.0 : scale * static_cast<double>(task.weight);
    double maximum = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = 0; j < rows.num_columns; ++j) {
      maximum = std::fmax(maximum, ref::read(rows.element, rows.data, offset + j));
    }
    double sum = 0.0;
    for (std::int64_t j = 0; j < rows.num_columns; ++j) {
      sum += std::exp(scale * (ref::read(rows.element, rows.data, offset + j) - maximum));
    }
    const double on_softmax =
        weight * (1.0 + 2.0 * task.z_loss * (scale * maximum + std::log(sum)));
    for (std::int64_t j = 0; j < rows.num_columns; ++j) {
      const double x = ref::read(rows.element, rows.data, offset + j);
      double gradient = 0.0;
      if (!ignored) {
        gradient = std::exp(scale * (x - maximum)) / sum * on_softmax;
        if (j == labels.ids[row] - labels.first_column) gradient -= weight;
      }
      ref::write(rows.element, const_cast<void*>(rows.data), offset + j, gradient);
    }
  }
}

}  // namespace tessera::kernels
