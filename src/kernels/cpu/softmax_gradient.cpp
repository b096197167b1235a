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
struct Exactly {
  Row row;

  Floats operator()(Floats x) const {
    const Floats d = distance<kScaled>(x, row.maximum, row.scale);
    const Floats e = exponential(d);
    if constexpr (kWeighted) {
      // Where e is 0, d may be -inf; any finite number makes the product 0.
      return e * (row.softmax + row.weighted * larger(d, splat(-200.0F))) + row.uniform;
    } else {
      return e * row.softmax + row.uniform;
    }
  }
  template <typename Form>
  static void store(typename Form::Stored* to, Pair pair, bool streaming) {
    Form::store(to, pair, streaming);
  }
};

/// softmax exp(scale (x - maximum)) as a power of two, for results of 8 bits: the relative error is
/// below 1.5e-4 before they are rounded. What is less than 2^-126 may be wrong by as much, and is 0
/// where x = -inf.
class Roughly {
 public:
  /// Beyond these the power's own error or range would not do.
  static bool serves(float maximum, float scale, float softmax) {
#if defined(__FMA__)
    const float product = __builtin_fabsf(maximum * scale);
    const float size = __builtin_fabsf(softmax);
    return product < 300.0F && scale < 300.0F && size > 0x1p-80F && size < 0x1p40F;
#else
    (void)maximum, (void)scale, (void)softmax;
    return false;  // x * factor would be rounded
#endif
  }

  /// t = x factor - less is the logarithm of the result, less 1/2: the fraction then lies between 1
  /// and 2, where half a unit in the last place is 2^-8. Added here, it makes cutting rounding.
  Roughly(float maximum, float scale, float softmax) {
    constexpr double kLog2OfE = 1.4426950408889634;
    const auto rate = static_cast<float>(kLog2OfE * static_cast<double>(scale));
    const double at_zero = __builtin_log2(static_cast<double>(__builtin_fabsf(softmax))) -
                           static_cast<double>(maximum) * static_cast<double>(rate);
    factor_ = splat(rate);
    less_ = splat(static_cast<float>(0.5 - at_zero));
    const float sign = softmax < 0.0F ? -1.0F : 1.0F;
    coefficients_[0] = splat(sign * (1.41411173F + 0x1p-8F));
    coefficients_[1] = splat(sign * 0.980419219F);
    coefficients_[2] = splat(sign * 0.343105286F);
    coefficients_[3] = splat(sign * 0.0780243352F);
  }

  Floats operator()(Floats x) const {
    constexpr float kRounder = 0x1.8p23F;
    const Floats t = larger(x * factor_ - less_, splat(-127.5F));
    const Floats shifted = t + kRounder;
    const Floats rest = t - (shifted - kRounder);
    Floats value = rest * coefficients_[3] + coefficients_[2];
    value = value * rest + coefficients_[1];
    value = value * rest + coefficients_[0];
    // A NaN stays one: those that come of 16 bits end in zeros, so that nothing is added.
    return bits_as<Floats>(bits_as<Words>(value) + (bits_as<Words>(shifted) << 23));
  }
  template <typename Form>
  static void store(typename Form::Stored* to, Pair pair, bool streaming) {
    Form::store_cut(to, pair, streaming);
  }

 private:
  Floats factor_;
  Floats less_;
  Floats coefficients_[4];
};

template <typename Form, typename Function>
inline void write_pair(typename Form::Stored* g, Pair x, const Function& function, bool streaming) {
  Function::template store<Form>(g, Pair{function(x.a), function(x.b)}, streaming);
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
    for (; i + kPair <= count; i += kPair) {
      prefetch_ahead(x + i + kAhead);
      write_pair<Form>(g + i, Form::load(x + i), function, true);
    }
  } else {
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
    const auto write_exactly = [&] {
      if (from.weighted != nullptr) {
        write(Exactly<true, true>{row});
      } else if (task.scale != 1.0F) {
        write(Exactly<false, true>{row});
      } else {
        write(Exactly<false, false>{row});
      }
    };
    if constexpr (Form::kIsRough) {
      if (from.weighted == nullptr && from.uniform[r] == 0.0F &&
          Roughly::serves(from.maximum[r], task.scale, from.softmax[r])) {
        write(Roughly(from.maximum[r], task.scale, from.softmax[r]));
      } else {
        write_exactly();
      }
    } else {
      write_exactly();
    }
    if (owned) {
      // The whole sum is formed before it is rounded.
      const Floats value = Exactly<true, true>{row}(splat(label_logit)) + target;
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
