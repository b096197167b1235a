// The meaning of kernels/softmax_statistics.h as a plain loop, in double: the judge of the others.

#include "kernels/softmax_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ref/logit_value.h"

namespace tessera::kernels {

void softmax_statistics_reference(const SoftmaxStatisticsTask& task, std::int64_t first,
                                  std::int64_t last) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const LogitRows& rows = task.rows;
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t offset = rows.offset(row);
    const bool has_label = task.labels.ids != nullptr;
    const std::int64_t label = has_label ? task.labels.ids[row] : -1;
    const bool skip = task.skip_ignored && has_label && label == task.labels.ignored;
    const std::int64_t num_columns = skip ? 0 : rows.num_columns;
    const auto logit = [&](std::int64_t j) {
      return ref::read(rows.element, rows.data, offset + j);
    };

    double maximum = -kInfinity;
    std::int64_t best = 0;
    for (std::int64_t j = 0; j < num_columns; ++j) {
      if (logit(j) > maximum) {
        maximum = logit(j);
        best = j;
      }
    }
    const double center = maximum == -kInfinity ? 0.0 : maximum;
    double sum = 0.0;
    double total = 0.0;
    double weighted = 0.0;
    for (std::int64_t j = 0; j < num_columns; ++j) {
      const double distance = task.scale * (logit(j) - center);
      const double weight = std::exp(distance);
      sum += weight;
      total += logit(j);
      weighted += weight == 0.0 ? 0.0 : weight * distance;
    }
    const std::int64_t column = label - task.labels.first_column;
    const bool owned = has_label && !skip && column >= 0 && column < num_columns;

    task.out.maximum[row] = static_cast<float>(maximum);
    task.out.sum[row] = static_cast<float>(sum);
    if (task.out.target != nullptr) {
      task.out.target[row] = static_cast<float>(owned ? logit(column) : -kInfinity);
    }
    if (task.out.total != nullptr) task.out.total[row] = static_cast<float>(total);
    if (task.out.weighted != nullptr) task.out.weighted[row] = static_cast<float>(weighted);
    if (task.out.best != nullptr) {
      task.out.best[row] = static_cast<std::int32_t>(task.labels.first_column + best);
    }
  }
}

}  // namespace tessera::kernels
