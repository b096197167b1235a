// The meaning of kernels/table_update.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/table_update.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ref/logit_value.h"

namespace tessera::kernels {
namespace {

using Numbers = std::vector<double>;

/// The gradient of one entry, with its factor.
Numbers gradient_of(const RowGradients& gradients, RowEntry entry, std::int64_t num_columns) {
  std::int64_t source = source_of(entry);
  double factor = 1.0;
  if (gradients.weights != nullptr) factor = gradients.weights[source];
  if (gradients.bag_of != nullptr) source = gradients.bag_of[source];
  if (gradients.bags != nullptr) {
    factor /=
        static_cast<double>(gradients.bags->offset(source + 1) - gradients.bags->offset(source));
  }
  int segment = gradients.num_segments - 1;
  while (gradients.segments[segment].first > source) --segment;
  const GradientSegment& place = gradients.segments[segment];
  const float* data = gradients.data + place.base + (source - place.first) * place.stride;
  Numbers values(static_cast<std::size_t>(num_columns));
  for (std::int64_t c = 0; c < num_columns; ++c) {
    const double limit = gradients.limit;
    values[c] = factor * std::clamp(static_cast<double>(data[c]), -limit, limit);
  }
  return values;
}

Numbers sum_of(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
               std::int64_t end, std::int64_t num_columns) {
  Numbers sum(static_cast<std::size_t>(num_columns), 0.0);
  for (std::int64_t i = begin; i < end; ++i) {
    const Numbers values = gradient_of(gradients, entries[i], num_columns);
    for (std::int64_t c = 0; c < num_columns; ++c) sum[c] += values[c];
  }
  return sum;
}

double norm_of(const Numbers& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

/// One row and its state as doubles.
struct WideRow {
  Numbers w;
  Numbers m;
  Numbers v;
};

void moments(WideRow& row, const Numbers& g, const RowStep& s) {
  const double beta1 = s.beta1;
  const double beta2 = s.beta2;
  for (std::size_t c = 0; c < g.size(); ++c) row.m[c] = beta1 * row.m[c] + s.rest1 * g[c];
  if (row.v.size() == g.size() && has_full_momentum2(s.rule)) {
    for (std::size_t c = 0; c < g.size(); ++c) {
      row.v[c] = beta2 * row.v[c] + s.rest2 * g[c] * g[c];
    }
  } else {
    const double square = norm_of(g) * norm_of(g) / static_cast<double>(g.size());
    row.v[0] = beta2 * row.v[0] + s.rest2 * square;
  }
}

/// m' / (sqrt(v') + eps).
Numbers direction(const WideRow& row, const RowStep& s) {
  Numbers u(row.m.size());
  for (std::size_t c = 0; c < u.size(); ++c) {
    const double v = has_full_momentum2(s.rule) ? row.v[c] : row.v[0];
    u[c] = row.m[c] * s.correction1 / (std::sqrt(v * s.correction2) + s.eps);
  }
  return u;
}

void step_row(WideRow& row, Numbers g, const RowStep& s) {
  const double rate = s.rate;
  const double decay = s.decay;
  Numbers& w = row.w;
  const bool is_layerwise = s.rule == RowRule::kLamb || s.rule == RowRule::kPartialRowWiseLamb ||
                            s.rule == RowRule::kLarsSgd;
  for (std::size_t c = 0; c < w.size() && !is_layerwise; ++c) {
    if (s.is_decoupled) {
      w[c] -= rate * decay * w[c];
    } else {
      g[c] += decay * w[c];
    }
  }
  switch (s.rule) {
    case RowRule::kSgd:
      for (std::size_t c = 0; c < w.size(); ++c) w[c] -= rate * g[c];
      break;
    case RowRule::kAdagrad:
      for (std::size_t c = 0; c < w.size(); ++c) {
        row.m[c] += g[c] * g[c];
        w[c] -= rate * g[c] / (std::sqrt(row.m[c]) + s.eps);
      }
      break;
    case RowRule::kRowWiseAdagrad:
      row.m[0] += norm_of(g) * norm_of(g) / static_cast<double>(g.size());
      for (std::size_t c = 0; c < w.size(); ++c)
        w[c] -= rate * g[c] / (std::sqrt(row.m[0]) + s.eps);
      break;
    case RowRule::kAdam:
    case RowRule::kPartialRowWiseAdam: {
      moments(row, g, s);
      const Numbers u = direction(row, s);
      for (std::size_t c = 0; c < w.size(); ++c) w[c] -= rate * u[c];
      break;
    }
    case RowRule::kLamb:
    case RowRule::kPartialRowWiseLamb: {
      moments(row, g, s);
      Numbers u = direction(row, s);
      for (std::size_t c = 0; c < w.size(); ++c) u[c] += decay * w[c];
      const double ratio = norm_of(w) > 0 && norm_of(u) > 0 ? norm_of(w) / norm_of(u) : 1.0;
      for (std::size_t c = 0; c < w.size(); ++c) w[c] -= rate * ratio * u[c];
      break;
    }
    case RowRule::kLarsSgd: {
      const double below = norm_of(g) + decay * norm_of(w);
      const double local = norm_of(w) > 0 && below > 0 ? rate * s.eta * norm_of(w) / below : rate;
      for (std::size_t c = 0; c < w.size(); ++c) {
        row.m[c] = s.momentum * row.m[c] + local * (g[c] + decay * w[c]);
        w[c] -= row.m[c];
      }
      break;
    }
  }
}

Numbers numbers(const float* from, std::int64_t count) {
  return from == nullptr ? Numbers() : Numbers(from, from + count);
}

void update(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
            std::int64_t end, const TableRows& rows, const RowState& state, const RowStep& step,
            float* /*buffer*/) {
  const std::int64_t columns = rows.num_columns;
  for (std::int64_t first = begin; first < end;) {
    std::int64_t last = first + 1;
    while (last < end && row_of(entries[last]) == row_of(entries[first])) ++last;
    const std::int64_t row = row_of(entries[first]);
    const std::int64_t width1 = has_full_momentum1(step.rule) ? columns : 1;
    const std::int64_t width2 = has_full_momentum2(step.rule) ? columns : 1;
    WideRow wide;
    for (std::int64_t c = 0; c < columns; ++c) {
      wide.w.push_back(ref::read(rows.element, rows.data, row * columns + c));
    }
    float* m = state.momentum1 == nullptr ? nullptr : state.momentum1 + row * width1;
    float* v = state.momentum2 == nullptr ? nullptr : state.momentum2 + row * width2;
    wide.m = numbers(m, width1);
    wide.v = numbers(v, width2);
    step_row(wide, sum_of(gradients, entries, first, last, columns), step);
    for (std::size_t i = 0; i < wide.m.size(); ++i) m[i] = static_cast<float>(wide.m[i]);
    for (std::size_t i = 0; i < wide.v.size(); ++i) v[i] = static_cast<float>(wide.v[i]);
    const std::uint32_t seed = row_seed(step.key, row);
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t at = row * columns + c;
      if (step.is_stochastic && rows.element != Element::kFloat32) {
        const auto value = static_cast<float>(wide.w[c]);
        const std::uint32_t random = column_bits(seed, static_cast<std::uint32_t>(c));
        static_cast<std::uint16_t*>(rows.data)[at] = rows.element == Element::kBFloat16
                                                         ? stochastic_brain(value, random)
                                                         : stochastic_half(value, random);
      } else {
        ref::write(rows.element, rows.data, at, wide.w[c]);
      }
    }
    first = last;
  }
}

void sum_rows(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
              std::int64_t end, std::int64_t num_columns, bool by_row, float* output,
              float* /*buffer*/) {
  std::int64_t index = 0;
  for (std::int64_t first = begin; first < end; ++index) {
    std::int64_t last = first + 1;
    while (last < end && row_of(entries[last]) == row_of(entries[first])) ++last;
    const Numbers sum = sum_of(gradients, entries, first, last, num_columns);
    float* to = output + (by_row ? row_of(entries[first]) : index) * num_columns;
    for (std::int64_t c = 0; c < num_columns; ++c) to[c] = static_cast<float>(sum[c]);
    first = last;
  }
}

}  // namespace

const TableUpdateKernels& table_update_reference() noexcept {
  static constexpr TableUpdateKernels kKernels{update, sum_rows};
  return kKernels;
}

}  // namespace tessera::kernels
