// The meaning of kernels/softmax_gradient.h as a plain loop, in double: the judge of the others.

#include "kernels/softmax_gradient.h"

#include <cmath>

#include "kernels/ref/logit_value.h"

namespace tessera::kernels {

void softmax_gradient_reference(const SoftmaxGradientTask& task, std::int64_t first,
                                std::int64_t last) {
  const LogitRows& rows = task.rows;
  const SoftmaxCoefficients& coefficients = task.coefficients;
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t from = rows.offset(row);
    const std::int64_t to = task.gradient_offset(row);
    const double maximum = coefficients.maximum[row];
    const double softmax = coefficients.softmax[row];
    const double weighted = coefficients.weighted != nullptr ? coefficients.weighted[row] : 0.0;
    const double uniform = coefficients.uniform[row];
    const double target = coefficients.target[row];
    const std::int64_t column =
        task.labels.ids != nullptr ? task.labels.ids[row] - task.labels.first_column : -1;
    const bool is_zero = softmax == 0 && weighted == 0 && uniform == 0 && target == 0;
    for (std::int64_t j = 0; j < task.num_written; ++j) {
      double gradient = 0.0;
      if (j < rows.num_columns && !is_zero) {
        const double distance =
            task.scale * (ref::read(rows.element, rows.data, from + j) - maximum);
        const double weight = std::exp(distance);
        gradient = uniform + (j == column ? target : 0.0);
        if (weight != 0.0) gradient += weight * (softmax + weighted * distance);
      }
      ref::write(rows.element, task.gradient, to + j, gradient);
    }
  }
}

}  // namespace tessera::kernels
