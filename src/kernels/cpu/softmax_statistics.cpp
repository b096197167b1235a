// Softmax statistics of a row in one pass over memory. Compiled once per instruction set; only the
// pointer at the end is visible outside.

#include "kernels/softmax_statistics.h"

#include "kernels/cpu/softmax_block.h"

namespace tessera::kernels {

namespace {

template <typename Form>
std::int64_t best_of(const typename Form::Stored* x, std::int64_t count, const RowSums& row) {
  for (std::int64_t j = row.best_block; j < count; ++j) {
    if (Form::widen(x[j]) == row.maximum) return j;
  }
  return 0;
}

template <typename Form>
void statistics(const SoftmaxStatisticsTask& task, std::int64_t first, std::int64_t last) {
  using Stored = typename Form::Stored;
  const SoftmaxStatistics& out = task.out;
  const Labels& labels = task.labels;
  const bool extras = out.total != nullptr || out.weighted != nullptr;
  for (std::int64_t row = first; row < last; ++row) {
    const Stored* x = static_cast<const Stored*>(task.rows.data) + task.rows.offset(row);
    const std::int64_t label = labels.ids != nullptr ? labels.ids[row] : -1;
    const bool skip = task.skip_ignored && labels.ids != nullptr && label == labels.ignored;
    const std::int64_t count = skip ? 0 : task.rows.num_columns;
    const RowSums sums = extras ? sums_of_row<Form, true, false>(x, count, task.scale, {})
                                : sums_of_row<Form, false, false>(x, count, task.scale, {});
    const AtMaximum result = at_maximum(sums);
    out.maximum[row] = sums.maximum;
    out.sum[row] = static_cast<float>(result.sum);
    if (out.target != nullptr) {
      const std::int64_t column = label - labels.first_column;
      const bool owned = labels.ids != nullptr && column >= 0 && column < count;
      out.target[row] = owned ? Form::widen(x[column]) : kMinusInfinity;
    }
    if (out.total != nullptr) out.total[row] = static_cast<float>(sums.total);
    if (out.weighted != nullptr) out.weighted[row] = static_cast<float>(result.weighted);
    if (out.best != nullptr) {
      const std::int64_t best = best_of<Form>(x, count, sums);
      out.best[row] = static_cast<std::int32_t>(labels.first_column + best);
    }
  }
}

void run(const SoftmaxStatisticsTask& task, std::int64_t first, std::int64_t last) {
  with_form(task.rows.element, [&](auto form) { statistics<decltype(form)>(task, first, last); });
}

}  // namespace

extern const SoftmaxStatisticsKernel TESSERA_KERNEL_TABLE(kSoftmaxStatistics);
const SoftmaxStatisticsKernel TESSERA_KERNEL_TABLE(kSoftmaxStatistics) = run;

}  // namespace tessera::kernels
