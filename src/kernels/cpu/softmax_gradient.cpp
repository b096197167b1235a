// Gradient of a softmax in one read and one write. Compiled once per instruction set; only the
// pointer at the end is visible outside.

#include "kernels/softmax_gradient.h"

#include "kernels/cpu/logit_axis.h"

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

template <bool kWeighted>
struct Exactly {
  Row row;

  Pair operator()(Pair x) const { return {of(x.a), of(x.b)}; }
  Floats of(Floats x) const {
    const Floats d = (x - row.maximum) * row.scale;
    const Floats e = exponential(d);
    if constexpr (kWeighted) {
      // Where e is 0, d may be -inf; any finite number makes the product 0.
      return e * (row.softmax + row.weighted * larger(d, splat(-200.0F))) + row.uniform;
    } else {
      return e * row.softmax + row.uniform;
    }
  }
};

#if TESSERA_FUSED_POWERS

/// softmax exp(scale (x - maximum)) + uniform as a power of two, the logarithm of |softmax| being
/// part of the exponent.
template <bool kFar>
class Closely {
 public:
  Closely(const Axis<8>& axis, double by, float uniform)
      : powers_(axis, by), uniform_(splat(uniform)) {}

  Pair operator()(Pair x) const {
    return {powers_.plus(powers_.limited(x.a), uniform_),
            powers_.plus(powers_.limited(x.b), uniform_)};
  }

 private:
  Powers<kFar> powers_;
  Floats uniform_;
};

/// Calls `write` with the function of a row without weighted terms; false if none of the above
/// serves, because an exponent has no room for the logarithm of the coefficient.
template <typename Write>
bool write_powers(float maximum, float scale, float softmax, float uniform, const Write& write) {
  const float size = __builtin_fabsf(softmax);
  const bool serves =
      __builtin_fabsf(maximum) < -kMinusInfinity && size > 0x1p-80F && size < 0x1p40F;
  if (!serves) return false;
  const double logarithm = __builtin_log2(static_cast<double>(size));
  double above = 0.0;
  const auto factor = [&] { return __builtin_copysign(__builtin_exp2(above), softmax); };
  const auto axis = Axis<8>::about(maximum, rate_of(scale, 8), logarithm, &above);
  if (axis.starts_at_zero()) {
    write(Closely<false>(axis, factor(), uniform));
  } else {
    write(Closely<true>(axis, factor(), uniform));
  }
  return true;
}

#else

template <typename Write>
bool write_powers(float, float, float, float, const Write&) {
  return false;
}

#endif

template <typename Form, typename Function>
inline void write_pair(typename Form::Stored* g, Pair x, const Function& function, bool streaming) {
  Form::store(g, function(x), streaming);
}

template <typename Form, typename Function>
void write_part(const typename Form::Stored* x, typename Form::Stored* g, std::int64_t count,
                const Function& function) {
  typename Form::Stored buffer[kPair];
  write_pair<Form>(buffer, load_part<Form>(x, count), function, false);
  for (std::int64_t i = 0; i < count; ++i) g[i] = buffer[i];
}

template <typename Form, typename Function>
void write_row(const typename Form::Stored* x, typename Form::Stored* g, std::int64_t count,
               const Function& function, bool streaming) {
  std::int64_t i = 0;
  if (streaming) {
    const auto misaligned =
        static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(g) & (sizeof(Floats) - 1)) /
        static_cast<std::int64_t>(sizeof(*g));
    constexpr auto kPerVector = static_cast<std::int64_t>(sizeof(Floats) / sizeof(*g));
    i = misaligned == 0 ? 0 : kPerVector - misaligned;
    i = i < count ? i : count;
    if (i > 0) write_part<Form>(x, g, i, function);
#pragma GCC unroll 4
    for (; i + kPair <= count; i += kPair) {
      prefetch_ahead(x + i + kAhead);
      write_pair<Form>(g + i, Form::load(x + i), function, true);
    }
  } else {
#pragma GCC unroll 4
    for (; i + kPair <= count; i += kPair) {
      prefetch_ahead(x + i + kAhead);
      write_pair<Form>(g + i, Form::load(x + i), function, false);
    }
  }
  if (i < count) write_part<Form>(x + i, g + i, count - i, function);
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
    const auto write = [&](const auto& function) {
      write_row<Form>(x, g, num_columns, function, streaming);
    };
    if (from.weighted != nullptr) {
      write(Exactly<true>{row});
    } else if (!write_powers(from.maximum[r], task.scale, from.softmax[r], from.uniform[r],
                             write)) {
      write(Exactly<false>{row});
    }
    if (owned) {
      // The whole sum is formed before it is rounded.
      const Floats value = Exactly<true>{row}.of(splat(label_logit)) + target;
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
