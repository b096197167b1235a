#include "kernels/token_rows.h"

namespace tessera::kernels {

void merge_tokens(const MergeTask& task) {
  const std::int64_t vocab = vocab_of(task);
  *task.vocab = vocab;
  double total = 0.0;
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    total += merge_row(task, row, vocab);
    count += is_ignored(task.shape, task.labels, row) ? 0 : 1;
  }
  if (task.reduced == nullptr) return;
  const double inverse =
      task.divide_by_count ? 1.0 / static_cast<double>(count > 0 ? count : 1) : 1.0;
  *task.reduced = static_cast<float>(total * inverse);
  *task.inverse = static_cast<float>(inverse);
}

void fold_parts(const MergeTask& task, float* statistics, std::int64_t first, std::int64_t last) {
  for (std::int64_t row = first; row < last; ++row) fold_row(task, statistics, row);
}

void token_coefficients(const CoefficientsTask& task) {
  for (std::int64_t row = 0; row < task.num_rows; ++row) coefficients_row(task, row);
}

}  // namespace tessera::kernels
