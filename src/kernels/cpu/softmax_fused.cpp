// Statistics and gradient of a row with one exponential per element. Compiled once per instruction
// set; only the pointer at the end is visible outside.
//
// The exponentials of a row stay in the second-level cache between the two passes, so memory is
// read once and written once, and the second pass is one multiplication per element.

#include "kernels/softmax_fused.h"

#include "kernels/cpu/logit_vector.h"

namespace tessera::kernels {

namespace {

inline float center_of(float maximum) { return maximum == kMinusInfinity ? 0.0F : maximum; }

inline double exponential_of(float x) { return static_cast<double>(exponential(splat(x))[0]); }

struct RowSums {
  float maximum = kMinusInfinity;
  double sum = 0.0;
};

/// Writes exp(scale (x - centre)) of one block to `e`, its centre to `*center`, and adds to `sums`.
template <typename Form, bool kScaled>
void keep_block(const typename Form::Stored* x, std::int64_t count, float scale, float* e,
                float* center, RowSums& sums) {
  const std::int64_t whole = count / kPair * kPair;
  Floats top_a = splat(kMinusInfinity);
  Floats top_b = top_a;
  for (std::int64_t i = 0; i < whole; i += kPair) {
    const Pair p = Form::load(x + i);
    top_a = larger(top_a, p.a);
    top_b = larger(top_b, p.b);
  }
  Pair rest{splat(kMinusInfinity), splat(kMinusInfinity)};
  if (whole < count) rest = load_part<Form>(x + whole, count - whole);
  const float top = largest_of(larger(larger(top_a, top_b), larger(rest.a, rest.b)));
  if (top > sums.maximum) {
    if (sums.maximum != kMinusInfinity) sums.sum *= exponential_of(scale * (sums.maximum - top));
    sums.maximum = top;
  }
  *center = center_of(sums.maximum);
  const Floats middle = splat(*center);
  const Floats factor = splat(scale);
  Floats sum_a{};
  Floats sum_b{};
  std::int64_t i = 0;
  for (; i < whole; i += kPair) {
    prefetch_ahead(x + i + Form::kBlock);
    const Pair p = Form::load(x + i);
    const Pair kept{exponential(distance<kScaled>(p.a, middle, factor)),
                    exponential(distance<kScaled>(p.b, middle, factor))};
    SingleForm::store(e + i, kept, false);
    sum_a += kept.a;
    sum_b += kept.b;
  }
  if (i < count) {
    const Pair kept{exponential(distance<kScaled>(rest.a, middle, factor)),
                    exponential(distance<kScaled>(rest.b, middle, factor))};
    SingleForm::store(e + i, kept, false);
    sum_a += kept.a;
    sum_b += kept.b;
  }
  sums.sum += sum_of(sum_a + sum_b);
}

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
  float* centers = workspace + num_blocks * Form::kBlock;
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
    RowSums sums;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      const std::int64_t start = block * Form::kBlock;
      if (statistics.scale == 1.0F) {
        keep_block<Form, false>(x + start, length_of(block), statistics.scale, e + start,
                                centers + block, sums);
      } else {
        keep_block<Form, true>(x + start, length_of(block), statistics.scale, e + start,
                               centers + block, sums);
      }
    }
    const float center = center_of(sums.maximum);
    const double scale = static_cast<double>(statistics.scale);
    const double weight = scale * static_cast<double>(task.weight);
    double on_softmax = weight;
    if (task.z_loss != 0.0) {
      const double log_sum_exp =
          scale * static_cast<double>(sums.maximum) + __builtin_log(sums.sum);
      on_softmax += 2.0 * task.z_loss * log_sum_exp * weight;
    }
    const double by_sum = on_softmax / sums.sum;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      const std::int64_t start = block * Form::kBlock;
      // The centre only grows from block to block; a block far below it vanishes.
      const double shift = exponential_of(statistics.scale * (centers[block] - center));
      write_block<Form>(x + start, length_of(block), e + start, static_cast<float>(by_sum * shift));
    }
    if (owned) {
      const double p = exponential_of(statistics.scale * (label_logit - center));
      const Floats value = splat(static_cast<float>(p * by_sum - weight));
      Stored buffer[kPair];
      Form::store(buffer, Pair{value, value}, false);
      x[column] = buffer[0];
    }
    statistics.out.maximum[row] = sums.maximum;
    statistics.out.sum[row] = static_cast<float>(sums.sum);
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
