// Steps rows of tables. Compiled once per instruction set; see kernels/CMakeLists.txt and the note
// at the top of reduce.cpp.
//
// The lines of a row, its state and its gradient are fetched some entries ahead. A row that occurs
// once, with a gradient that needs no factor, is stepped straight from that gradient.

#include "kernels/table_update.h"

#include "kernels/cpu/row_vector.h"

namespace tessera::kernels {
namespace {

constexpr int kBlock = 8;

/// Where the gradient of an entry is, and what it is multiplied with.
struct Source {
  const float* data;
  float factor;
};

/// Whether every gradient is found by one multiplication and needs no factor.
inline bool is_plain(const RowGradients& gradients) {
  return gradients.num_segments == 1 && gradients.weights == nullptr &&
         gradients.bag_of == nullptr && gradients.bags == nullptr &&
         !(gradients.limit < __builtin_inff());
}

template <bool kPlain>
TESSERA_INLINE_ALWAYS Source source_at(const RowGradients& gradients, RowEntry entry) {
  std::int64_t source = source_of(entry);
  if constexpr (kPlain) {
    const GradientSegment& only = gradients.segments[0];
    return {gradients.data + only.base + (source - only.first) * only.stride, 1.0F};
  }
  float factor = 1.0F;
  if (gradients.weights != nullptr) factor = gradients.weights[source];
  if (gradients.bag_of != nullptr) source = gradients.bag_of[source];
  if (gradients.bags != nullptr) {
    factor /=
        static_cast<float>(gradients.bags->offset(source + 1) - gradients.bags->offset(source));
  }
  const GradientSegment* segment = gradients.segments + gradients.num_segments - 1;
  while (segment->first > source) --segment;
  return {gradients.data + segment->base + (source - segment->first) * segment->stride, factor};
}

inline bool has_factors(const RowGradients& gradients) {
  return gradients.weights != nullptr || gradients.bags != nullptr;
}

inline float within(float x, float limit) {
  // A NaN passes.
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

template <bool kPlain, int kVectors>
inline void add_block(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
                      std::int64_t end, std::int64_t column, float* sum) {
  Floats sums[kVectors] = {};
  for (std::int64_t i = begin; i < end; ++i) {
    const Source source = source_at<kPlain>(gradients, entries[i]);
    const Floats factor = splat(source.factor);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Floats part = SingleRow::load(source.data + column + v * kLanes);
      sums[v] += kPlain ? part : factor * part;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(sum + column + v * kLanes, sums[v]);
}

/// The sum of the gradients of entries begin .. end - 1, in `sum` or where it already lies.
template <bool kPlain>
const float* sum_run(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
                     std::int64_t end, std::int64_t num_columns, float* sum) {
  const bool is_limited = !kPlain && gradients.limit < __builtin_inff();
  if (end - begin == 1 && (kPlain || (!is_limited && !has_factors(gradients)))) {
    return source_at<kPlain>(gradients, entries[begin]).data;
  }
  if (is_limited) {
    for (std::int64_t c = 0; c < num_columns; ++c) sum[c] = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const Source source = source_at<kPlain>(gradients, entries[i]);
      for (std::int64_t c = 0; c < num_columns; ++c) {
        sum[c] += source.factor * within(source.data[c], gradients.limit);
      }
    }
    return sum;
  }
  std::int64_t column = 0;
  const auto left = [&] { return (num_columns - column) / kLanes; };
  for (; left() >= kBlock; column += kBlock * kLanes) {
    add_block<kPlain, kBlock>(gradients, entries, begin, end, column, sum);
  }
  for (; left() >= 2; column += 2 * kLanes) {
    add_block<kPlain, 2>(gradients, entries, begin, end, column, sum);
  }
  for (; left() >= 1; column += kLanes) {
    add_block<kPlain, 1>(gradients, entries, begin, end, column, sum);
  }
  for (; column < num_columns; ++column) {
    float total = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const Source source = source_at<kPlain>(gradients, entries[i]);
      total += source.factor * source.data[column];
    }
    sum[column] = total;
  }
  return sum;
}

// The rules, for a row of float32. `w`, `g`, `m` and `v` do not overlap.

inline void step_sgd(float* __restrict__ w, const float* __restrict__ g, std::int64_t count,
                     float rate) {
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t c = 0; c < whole; c += kLanes) {
    store(w + c, SingleRow::load(w + c) - SingleRow::load(g + c) * rate);
  }
  for (std::int64_t c = whole; c < count; ++c) w[c] -= rate * g[c];
}

inline void step_adagrad(float* __restrict__ w, const float* __restrict__ g, float* __restrict__ h,
                         std::int64_t count, const RowStep& step) {
  const float rate = step.rate;
  const float eps = step.eps;
  for (std::int64_t c = 0; c < count; ++c) {
    h[c] += g[c] * g[c];
    w[c] -= rate * g[c] / (__builtin_sqrtf(h[c]) + eps);
  }
}

inline void step_adam(float* __restrict__ w, const float* __restrict__ g, float* __restrict__ m,
                      float* __restrict__ v, std::int64_t count, const RowStep& step) {
  const RowStep s = step;
  for (std::int64_t c = 0; c < count; ++c) {
    m[c] = s.beta1 * m[c] + s.rest1 * g[c];
    v[c] = s.beta2 * v[c] + s.rest2 * g[c] * g[c];
    w[c] -= s.rate * (m[c] * s.correction1) / (__builtin_sqrtf(v[c] * s.correction2) + s.eps);
  }
}

inline void step_partial_adam(float* __restrict__ w, const float* __restrict__ g,
                              float* __restrict__ m, float denominator, std::int64_t count,
                              const RowStep& step) {
  const RowStep s = step;
  const float rate = s.rate * s.correction1 / denominator;
  for (std::int64_t c = 0; c < count; ++c) {
    m[c] = s.beta1 * m[c] + s.rest1 * g[c];
    w[c] -= rate * m[c];
  }
}

/// LAMB's direction into `u`; `row_denominator` is 0 if there is a v per element.
inline void lamb_direction(const float* __restrict__ w, const float* __restrict__ g,
                           float* __restrict__ m, float* __restrict__ v, float row_denominator,
                           float* __restrict__ u, std::int64_t count, const RowStep& step) {
  const RowStep s = step;
  if (row_denominator == 0.0F) {
    for (std::int64_t c = 0; c < count; ++c) {
      m[c] = s.beta1 * m[c] + s.rest1 * g[c];
      v[c] = s.beta2 * v[c] + s.rest2 * g[c] * g[c];
      u[c] =
          (m[c] * s.correction1) / (__builtin_sqrtf(v[c] * s.correction2) + s.eps) + s.decay * w[c];
    }
  } else {
    for (std::int64_t c = 0; c < count; ++c) {
      m[c] = s.beta1 * m[c] + s.rest1 * g[c];
      u[c] = m[c] * s.correction1 / row_denominator + s.decay * w[c];
    }
  }
}

inline void step_lars(float* __restrict__ w, const float* __restrict__ g, float* __restrict__ m,
                      std::int64_t count, const RowStep& step) {
  const float weight_norm = __builtin_sqrtf(dot<SingleRow>(w, w, count));
  const float grad_norm = __builtin_sqrtf(dot<SingleRow>(g, g, count));
  const float below = grad_norm + step.decay * weight_norm;
  const float rate =
      weight_norm > 0 && below > 0 ? step.rate * step.eta * weight_norm / below : step.rate;
  const float momentum = step.momentum;
  const float decay = step.decay;
  for (std::int64_t c = 0; c < count; ++c) {
    m[c] = momentum * m[c] + rate * (g[c] + decay * w[c]);
    w[c] -= m[c];
  }
}

inline float mean_square(const float* g, std::int64_t count) {
  return dot<SingleRow>(g, g, count) / static_cast<float>(count);
}

/// Steps one row; `spare` has room for a row and is not `g`. Inlined, so that a known number of
/// columns is known here, too.
TESSERA_INLINE_ALWAYS void step_row(float* w, const float* g, std::int64_t row, std::int64_t count,
                                    const RowState& state, const RowStep& step, float* spare) {
  const bool decays = step.decay != 0.0F && step.rule < RowRule::kLamb;
  if (decays && step.is_decoupled) {
    const float keep = 1.0F - step.rate * step.decay;
    for (std::int64_t c = 0; c < count; ++c) w[c] *= keep;
  } else if (decays) {
    const float decay = step.decay;
    for (std::int64_t c = 0; c < count; ++c) spare[c] = g[c] + decay * w[c];
    g = spare;
  }
  float* m = state.momentum1;
  if (m != nullptr && step.rule != RowRule::kRowWiseAdagrad) m += row * count;
  float* v = state.momentum2;
  float denominator = 0;  // of the rules with one v per row
  if (v != nullptr &&
      (step.rule == RowRule::kPartialRowWiseAdam || step.rule == RowRule::kPartialRowWiseLamb)) {
    v[row] = step.beta2 * v[row] + step.rest2 * mean_square(g, count);
    denominator = __builtin_sqrtf(v[row] * step.correction2) + step.eps;
  } else if (v != nullptr) {
    v += row * count;
  }
  switch (step.rule) {
    case RowRule::kSgd:
      return step_sgd(w, g, count, step.rate);
    case RowRule::kAdagrad:
      return step_adagrad(w, g, m, count, step);
    case RowRule::kRowWiseAdagrad:
      m[row] += mean_square(g, count);
      return step_sgd(w, g, count, step.rate / (__builtin_sqrtf(m[row]) + step.eps));
    case RowRule::kAdam:
      return step_adam(w, g, m, v, count, step);
    case RowRule::kPartialRowWiseAdam:
      return step_partial_adam(w, g, m, denominator, count, step);
    case RowRule::kLamb:
    case RowRule::kPartialRowWiseLamb: {
      lamb_direction(w, g, m, v, denominator, spare, count, step);
      const float weight_norm = __builtin_sqrtf(dot<SingleRow>(w, w, count));
      const float norm = __builtin_sqrtf(dot<SingleRow>(spare, spare, count));
      const float ratio = weight_norm > 0 && norm > 0 ? weight_norm / norm : 1.0F;
      return step_sgd(w, spare, count, step.rate * ratio);
    }
    case RowRule::kLarsSgd:
      return step_lars(w, g, m, count, step);
  }
}

template <typename Row>
inline void step_narrow_row(typename Row::Stored* w, const float* g, std::int64_t row,
                            std::int64_t count, const RowState& state, const RowStep& step,
                            float* wide, float* spare) {
  for (std::int64_t c = 0; c < count; ++c) wide[c] = Row::widen(w[c]);
  step_row(wide, g, row, count, state, step, spare);
  if (step.is_stochastic) {
    const std::uint32_t seed = row_seed(step.key, row);
    for (std::int64_t c = 0; c < count; ++c) {
      w[c] = Row::narrow_at_random(wide[c], column_bits(seed, static_cast<std::uint32_t>(c)));
    }
  } else {
    for (std::int64_t c = 0; c < count; ++c) w[c] = Row::narrow(wide[c]);
  }
}

/// What is fetched ahead for one entry.
template <bool kPlain>
struct Fetch {
  const RowGradients& gradients;
  const TableRows& rows;
  const RowState& state;
  const RowStep& step;
  std::int64_t row_bytes;

  std::int64_t state_bytes() const {
    const std::int64_t full = rows.num_columns * 4;
    return (has_full_momentum1(step.rule) ? full : 4) + (has_full_momentum2(step.rule) ? full : 4);
  }
  TESSERA_INLINE_ALWAYS void operator()(RowEntry entry) const {
    const std::int64_t row = row_of(entry);
    const std::int64_t full = rows.num_columns * 4;
    prefetch(static_cast<const char*>(rows.data) + row * row_bytes, row_bytes);
    if (state.momentum1 != nullptr) {
      if (has_full_momentum1(step.rule)) {
        prefetch(state.momentum1 + row * rows.num_columns, full);
      } else {
        prefetch_line(state.momentum1 + row);
      }
    }
    if (state.momentum2 != nullptr) {
      if (has_full_momentum2(step.rule)) {
        prefetch(state.momentum2 + row * rows.num_columns, full);
      } else {
        prefetch_line(state.momentum2 + row);
      }
    }
    prefetch(source_at<kPlain>(gradients, entry).data, full);
  }
};

inline std::int64_t end_of_run(const RowEntry* entries, std::int64_t begin, std::int64_t end) {
  std::int64_t last = begin + 1;
  while (last < end && row_of(entries[last]) == row_of(entries[begin])) ++last;
  return last;
}

/// `kColumns`: the number of columns, or 0 if it is any. Rows take so little arithmetic that loops
/// of unknown length cost as much as they do.
template <typename Row, int kColumns, bool kPlain>
void update_rows(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
                 std::int64_t end, TableRows rows, const RowState& state, const RowStep& step,
                 float* buffer) {
  using Stored = typename Row::Stored;
  if constexpr (kColumns > 0) rows.num_columns = kColumns;
  const std::int64_t count = rows.num_columns;
  const Fetch<kPlain> fetch{gradients, rows, state, step,
                            count * static_cast<std::int64_t>(sizeof(Stored))};
  const std::int64_t ahead = rows_ahead(fetch.row_bytes + fetch.state_bytes() + count * 4);
  float* sum = buffer;
  float* spare = buffer + count;
  float* wide = buffer + 2 * count;
  std::int64_t fetched = begin;
  for (std::int64_t first = begin; first < end;) {
    const std::int64_t last = end_of_run(entries, first, end);
    for (; fetched < end && fetched < last + ahead; ++fetched) fetch(entries[fetched]);
    const float* g = sum_run<kPlain>(gradients, entries, first, last, count, sum);
    const std::int64_t row = row_of(entries[first]);
    Stored* w = static_cast<Stored*>(rows.data) + row * count;
    if constexpr (sizeof(Stored) == 4) {
      step_row(w, g, row, count, state, step, spare);
    } else {
      step_narrow_row<Row>(w, g, row, count, state, step, wide, spare);
    }
    first = last;
  }
}

void update(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
            std::int64_t end, const TableRows& rows, const RowState& state, const RowStep& step,
            float* buffer) {
  with_row(rows.element, [&](auto row) {
    using Row = decltype(row);
    if (!is_plain(gradients)) {
      return update_rows<Row, 0, false>(gradients, entries, begin, end, rows, state, step, buffer);
    }
    if constexpr (sizeof(typename Row::Stored) == 4) {
      if (rows.num_columns == 32) {
        return update_rows<Row, 32, true>(gradients, entries, begin, end, rows, state, step,
                                          buffer);
      }
      if (rows.num_columns == 64) {
        return update_rows<Row, 64, true>(gradients, entries, begin, end, rows, state, step,
                                          buffer);
      }
      if (rows.num_columns == 128) {
        return update_rows<Row, 128, true>(gradients, entries, begin, end, rows, state, step,
                                           buffer);
      }
    }
    update_rows<Row, 0, true>(gradients, entries, begin, end, rows, state, step, buffer);
  });
}

void sum_rows(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
              std::int64_t end, std::int64_t num_columns, bool by_row, float* output,
              float* buffer) {
  std::int64_t index = 0;
  for (std::int64_t first = begin; first < end; ++index) {
    const std::int64_t last = end_of_run(entries, first, end);
    const float* sum = sum_run<false>(gradients, entries, first, last, num_columns, buffer);
    float* to = output + (by_row ? row_of(entries[first]) : index) * num_columns;
    __builtin_memcpy(to, sum, static_cast<std::size_t>(num_columns) * 4);
    first = last;
  }
}

}  // namespace

extern const TableUpdateKernels TESSERA_KERNEL_TABLE(kTableUpdate);
const TableUpdateKernels TESSERA_KERNEL_TABLE(kTableUpdate){update, sum_rows};

}  // namespace tessera::kernels
