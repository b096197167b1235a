// Softmax statistics of a row in one pass over memory. Compiled once per instruction set; only the
// pointer at the end is visible outside.

#include "kernels/softmax_statistics.h"

#include "kernels/cpu/logit_vector.h"

namespace tessera::kernels {

namespace {

struct Running {
  float maximum = kMinusInfinity;
  double sum = 0.0;
  double total = 0.0;
  double weighted = 0.0;
  std::int64_t best_block = 0;  // where the maximum was first met
};

/// Sums over the lanes of one block.
struct Lanes {
  Floats sum{};
  Floats total{};
  Floats weighted{};
};

template <bool kExtras, bool kScaled>
inline void accumulate(Floats x, Floats center, Floats scale, Lanes& lanes) {
  const Floats d = distance<kScaled>(x, center, scale);
  const Floats e = exponential(d);
  lanes.sum += e;
  // Where e is 0, d may be -inf; any finite number makes the product 0.
  if constexpr (kExtras) lanes.weighted += e * larger(d, splat(-200.0F));
}

/// Makes `maximum` the centre of the sums collected so far.
inline void recenter(Running& running, float maximum, float scale) {
  if (running.maximum != kMinusInfinity) {
    const float shift = scale * (running.maximum - maximum);
    const double factor = static_cast<double>(exponential(splat(shift))[0]);
    running.weighted = factor == 0.0
                           ? 0.0
                           : factor * (running.weighted + static_cast<double>(shift) * running.sum);
    running.sum *= factor;
  }
  running.maximum = maximum;
}

/// A block fits the first-level cache: its maximum is found first, so that the exponentials need no
/// correction afterwards. Sums of blocks are added in double.
template <typename Form, bool kExtras, bool kScaled>
void add_block(const typename Form::Stored* x, std::int64_t start, std::int64_t count, float scale,
               Running& running) {
  const std::int64_t whole = count / kPair * kPair;
  Floats top[4] = {splat(kMinusInfinity), splat(kMinusInfinity), splat(kMinusInfinity),
                   splat(kMinusInfinity)};
  std::int64_t i = 0;
  for (; i + 2 * kPair <= whole; i += 2 * kPair) {
    const Pair p = Form::load(x + i);
    const Pair q = Form::load(x + i + kPair);
    top[0] = larger(top[0], p.a);
    top[1] = larger(top[1], p.b);
    top[2] = larger(top[2], q.a);
    top[3] = larger(top[3], q.b);
  }
  for (; i < whole; i += kPair) {
    const Pair p = Form::load(x + i);
    top[0] = larger(top[0], p.a);
    top[1] = larger(top[1], p.b);
  }
  Pair rest{splat(kMinusInfinity), splat(kMinusInfinity)};
  if (whole < count) rest = load_part<Form>(x + whole, count - whole);
  top[0] = larger(larger(top[0], top[1]), larger(rest.a, rest.b));
  const float block_maximum = largest_of(larger(top[0], larger(top[2], top[3])));
  if (block_maximum > running.maximum) {
    recenter(running, block_maximum, scale);
    running.best_block = start;
  }

  const Floats center = splat(running.maximum == kMinusInfinity ? 0.0F : running.maximum);
  const Floats factor = splat(scale);
  Lanes even;
  Lanes odd;
  for (i = 0; i < whole; i += kPair) {
    prefetch_ahead(x + i + Form::kBlock);
    const Pair p = Form::load(x + i);
    accumulate<kExtras, kScaled>(p.a, center, factor, even);
    accumulate<kExtras, kScaled>(p.b, center, factor, odd);
    if constexpr (kExtras) {
      even.total += p.a;
      odd.total += p.b;
    }
  }
  if (whole < count) {
    accumulate<kExtras, kScaled>(rest.a, center, factor, even);
    accumulate<kExtras, kScaled>(rest.b, center, factor, odd);
    if constexpr (kExtras) {
      for (std::int64_t j = whole; j < count; ++j) {
        running.total += static_cast<double>(Form::widen(x[j]));
      }
    }
  }
  running.sum += sum_of(even.sum + odd.sum);
  if constexpr (kExtras) {
    running.total += sum_of(even.total + odd.total);
    running.weighted += sum_of(even.weighted + odd.weighted);
  }
}

template <typename Form, bool kExtras>
Running statistics_of(const typename Form::Stored* x, std::int64_t count, float scale) {
  Running running;
  for (std::int64_t start = 0; start < count; start += Form::kBlock) {
    const std::int64_t length = count - start < Form::kBlock ? count - start : Form::kBlock;
    if (scale == 1.0F) {
      add_block<Form, kExtras, false>(x + start, start, length, scale, running);
    } else {
      add_block<Form, kExtras, true>(x + start, start, length, scale, running);
    }
  }
  return running;
}

template <typename Form>
std::int64_t best_of(const typename Form::Stored* x, std::int64_t count, const Running& running) {
  for (std::int64_t j = running.best_block; j < count; ++j) {
    if (Form::widen(x[j]) == running.maximum) return j;
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
    const Running running = extras ? statistics_of<Form, true>(x, count, task.scale)
                                   : statistics_of<Form, false>(x, count, task.scale);
    out.maximum[row] = running.maximum;
    out.sum[row] = static_cast<float>(running.sum);
    if (out.target != nullptr) {
      const std::int64_t column = label - labels.first_column;
      const bool owned = labels.ids != nullptr && column >= 0 && column < count;
      out.target[row] = owned ? Form::widen(x[column]) : kMinusInfinity;
    }
    if (out.total != nullptr) out.total[row] = static_cast<float>(running.total);
    if (out.weighted != nullptr) out.weighted[row] = static_cast<float>(running.weighted);
    if (out.best != nullptr) {
      const std::int64_t best = best_of<Form>(x, count, running);
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
