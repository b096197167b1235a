// Statistics and gradient of a row with one exponential per element. Compiled once per instruction
// set; only the pointer at the end is visible outside.
//
// The exponentials of a row stay in the second-level cache between the two passes, so memory is
// read once and written once, and the second pass is one multiplication per element.

#include "kernels/softmax_fused.h"

#include "kernels/cpu/softmax_block.h"

namespace tessera::kernels {

namespace {

template <typename Form>
void write_block(typename Form::Stored* g, std::int64_t count, const float* e, float by) {
  const Floats factor = splat(by);
  std::int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    const Pair kept = SingleForm::load(e + i);
    Form::store(g + i, {kept.a * factor, kept.b * factor}, false);
  }
  if (i == count) return;
  const Pair kept = SingleForm::load(e + i);
  typename Form::Stored buffer[kPair];
  Form::store(buffer, {kept.a * factor, kept.b * factor}, false);
  for (std::int64_t j = i; j < count; ++j) g[j] = buffer[j - i];
}

template <typename Form>
void fused(const SoftmaxFusedTask& task, std::int64_t first, std::int64_t last, float* workspace) {
  using Stored = typename Form::Stored;
  const SoftmaxStatisticsTask& statistics = task.statistics;
  const std::int64_t num_columns = statistics.rows.num_columns;
  const std::int64_t num_blocks = (num_columns + Form::kBlock - 1) / Form::kBlock;
  float* e = workspace;
  auto* offsets = reinterpret_cast<double*>(workspace + num_blocks * Form::kBlock);
  for (std::int64_t row = first; row < last; ++row) {
    Stored* x =
        static_cast<Stored*>(const_cast<void*>(statistics.rows.data)) + statistics.rows.offset(row);
    const std::int64_t label = statistics.labels.ids[row];
    if (label == statistics.labels.ignored) {
      statistics.out.maximum[row] = kMinusInfinity;
      statistics.out.sum[row] = 0.0F;
      statistics.out.target[row] = kMinusInfinity;
      __builtin_memset(x, 0, static_cast<std::size_t>(num_columns) * sizeof(Stored));
      continue;
    }
    const std::int64_t column = label - statistics.labels.first_column;
    const bool owned = column >= 0 && column < num_columns;
    const float label_logit = owned ? Form::widen(x[column]) : kMinusInfinity;

    const auto length_of = [&](std::int64_t block) {
      const std::int64_t left = num_columns - block * Form::kBlock;
      return left < Form::kBlock ? left : std::int64_t{Form::kBlock};
    };
    const RowSums sums =
        sums_of_row<Form, false, true>(x, num_columns, statistics.scale, {e, offsets});
    const AtMaximum result = at_maximum(sums);
    const double scale = static_cast<double>(statistics.scale);
    const double weight = scale * static_cast<double>(task.weight);
    double on_softmax = weight;
    if (task.z_loss != 0.0) {
      const double log_sum_exp =
          scale * static_cast<double>(sums.maximum) + __builtin_log(result.sum);
      on_softmax += 2.0 * task.z_loss * log_sum_exp * weight;
    }
    const double by_sum = on_softmax / result.sum;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      const std::int64_t start = block * Form::kBlock;
      // The axis only moves up from block to block; a block far below it vanishes.
      const double below = offsets[block] - sums.axis.offset();
      const double factor = result.factor * (below == 0.0 ? 1.0 : __builtin_exp2(below));
      write_block<Form>(x + start, length_of(block), e + start,
                        static_cast<float>(by_sum * factor));
    }
    if (owned) {
      const double p = __builtin_exp(scale * static_cast<double>(label_logit - sums.maximum));
      const Floats value = splat(static_cast<float>(p * by_sum - weight));
      Stored buffer[kPair];
      Form::store(buffer, Pair{value, value}, false);
      x[column] = buffer[0];
    }
    statistics.out.maximum[row] = sums.maximum;
    statistics.out.sum[row] = static_cast<float>(result.sum);
    statistics.out.target[row] = label_logit;
  }
}

void run(const SoftmaxFusedTask& task, std::int64_t first, std::int64_t last, float* workspace) {
  with_form(task.statistics.rows.element,
            [&](auto form) { fused<decltype(form)>(task, first, last, workspace); });
}

}  // namespace

extern const SoftmaxFusedKernel TESSERA_KERNEL_TABLE(kSoftmaxFused);
const SoftmaxFusedKernel TESSERA_KERNEL_TABLE(kSoftmaxFused) = run;

}  // namespace tessera::kernels
