// Gradient of a softmax in one read and one write. Compiled once per instruction set; only the
// pointer at the end is visible outside.

#include "kernels/softmax_gradient.h"

#include "kernels/cpu/logit_vector.h"

namespace tessera::kernels {

namespace {

// Elements: about as many lines as memory has on their way at a time.
constexpr std::int64_t kAhead = 512;

/// The coefficients of one row, in every lane.
struct Row {
  Floats maximum;
  Floats scale;
  Floats softmax;
  Floats weighted;
  Floats uniform;
};

template <bool kWeighted, bool kScaled>
inline Floats gradient_of(Floats x, const Row& row) {
  const Floats d = distance<kScaled>(x, row.maximum, row.scale);
  const Floats e = exponential(d);
  if constexpr (kWeighted) {
    // Where e is 0, d may be -inf; any finite number makes the product 0.
    return e * (row.softmax + row.weighted * larger(d, splat(-200.0F))) + row.uniform;
  } else {
    return e * row.softmax + row.uniform;
  }
}

template <bool kWeighted, bool kScaled>
inline Pair gradient_of(Pair x, const Row& row) {
  return {gradient_of<kWeighted, kScaled>(x.a, row), gradient_of<kWeighted, kScaled>(x.b, row)};
}

template <typename Form, bool kWeighted, bool kScaled>
void write_part(const typename Form::Stored* x, typename Form::Stored* g, std::int64_t count,
                const Row& row) {
  typename Form::Stored buffer[kPair];
  Form::store(buffer, gradient_of<kWeighted, kScaled>(load_part<Form>(x, count), row), false);
  for (std::int64_t i = 0; i < count; ++i) g[i] = buffer[i];
}

template <typename Form, bool kWeighted, bool kScaled>
void write_row(const typename Form::Stored* x, typename Form::Stored* g, std::int64_t count,
               const Row& row, bool streaming) {
  std::int64_t i = 0;
  if (streaming) {
    const auto misaligned =
        static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(g) & (sizeof(Floats) - 1)) /
        static_cast<std::int64_t>(sizeof(*g));
    constexpr auto kPerVector = static_cast<std::int64_t>(sizeof(Floats) / sizeof(*g));
    i = misaligned == 0 ? 0 : kPerVector - misaligned;
    i = i < count ? i : count;
    if (i > 0) write_part<Form, kWeighted, kScaled>(x, g, i, row);
    for (; i + kPair <= count; i += kPair) {
      prefetch_ahead(x + i + kAhead);
      Form::store(g + i, gradient_of<kWeighted, kScaled>(Form::load(x + i), row), true);
    }
  } else {
    for (; i + kPair <= count; i += kPair) {
      prefetch_ahead(x + i + kAhead);
      Form::store(g + i, gradient_of<kWeighted, kScaled>(Form::load(x + i), row), false);
    }
  }
  if (i < count) write_part<Form, kWeighted, kScaled>(x + i, g + i, count - i, row);
}

template <typename Form>
void gradient(const SoftmaxGradientTask& task, std::int64_t first, std::int64_t last) {
  using Stored = typename Form::Stored;
  const SoftmaxCoefficients& from = task.coefficients;
  const std::int64_t num_columns = task.rows.num_columns;
  const bool streaming = task.store == Store::kStreaming;
  for (std::int64_t r = first; r < last; ++r) {
    const Stored* x = static_cast<const Stored*>(task.rows.data) + task.rows.offset(r);
    Stored* g = static_cast<Stored*>(task.gradient) + task.gradient_offset(r);
    const float weighted = from.weighted != nullptr ? from.weighted[r] : 0.0F;
    const float target = from.target[r];
    if (from.softmax[r] == 0.0F && weighted == 0.0F && from.uniform[r] == 0.0F && target == 0.0F) {
      __builtin_memset(g, 0, static_cast<std::size_t>(task.num_written) * sizeof(Stored));
      continue;
    }
    const Row row{splat(from.maximum[r]), splat(task.scale), splat(from.softmax[r]),
                  splat(weighted), splat(from.uniform[r])};
    const std::int64_t column =
        task.labels.ids != nullptr ? task.labels.ids[r] - task.labels.first_column : -1;
    const bool owned = column >= 0 && column < num_columns;
    // Read before the row is written: it may be the same memory.
    const float label_logit = owned ? Form::widen(x[column]) : 0.0F;
    if (from.weighted != nullptr) {
      write_row<Form, true, true>(x, g, num_columns, row, streaming);
    } else if (task.scale != 1.0F) {
      write_row<Form, false, true>(x, g, num_columns, row, streaming);
    } else {
      write_row<Form, false, false>(x, g, num_columns, row, streaming);
    }
    if (owned) {
      // The whole sum is formed before it is rounded.
      const Floats value = gradient_of<true, true>(splat(label_logit), row) + target;
      Stored buffer[kPair];
      Form::store(buffer, Pair{value, value}, false);
      g[column] = buffer[0];
    }
    if (task.num_written > num_columns) {
      __builtin_memset(g + num_columns, 0,
                       static_cast<std::size_t>(task.num_written - num_columns) * sizeof(Stored));
    }
  }
  if (streaming) store_fence();
}

void run(const SoftmaxGradientTask& task, std::int64_t first, std::int64_t last) {
  with_form(task.rows.element, [&](auto form) { gradient<decltype(form)>(task, first, last); });
}

}  // namespace

extern const SoftmaxGradientKernel TESSERA_KERNEL_TABLE(kSoftmaxGradient);
const SoftmaxGradientKernel TESSERA_KERNEL_TABLE(kSoftmaxGradient) = run;

}  // namespace tessera::kernels
