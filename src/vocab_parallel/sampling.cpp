#include "tessera/vocab_parallel/sampling.h"

#include <cmath>

#include <ATen/Functions.h>

#include "core/autograd.h"
#include "core/kept_memory.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "vocab_parallel/row_chunks.h"
#include "vocab_parallel/saved_settings.h"
#include "vocab_parallel/token_pass.h"

// Note [A threshold from histograms]
//
// Both filters keep the ids x for which w{y > x} < limit: with w = 1 and limit = k the best k, with
// w = probability and limit = p the nucleus. The smallest such value is found eight bits at a time
// on integers that are ordered as the floats are: each rank sums the weights of its ids per digit,
// the sums are exchanged, and all ranks choose the same digit.

namespace tessera::vocab_parallel {
namespace {

using detail::chunk_rows;
using detail::flat_rows;
using detail::PassSettings;

constexpr int kDigitBits = 8;
constexpr std::int64_t kDigits = 1 << kDigitBits;
constexpr std::int64_t kSignBit = std::int64_t{1} << 31;
// Keys of -inf and +inf; beyond them are only NaNs.
constexpr std::int64_t kLowestKey = 0x007FFFFF;
constexpr std::int64_t kHighestKey = 0xFF800000;

/// Integers in [0, 2^32) with the order of the float32 values; both zeros are the same.
at::Tensor keys_of(const at::Tensor& values) {
  const at::Tensor bits = values.add(0.0).contiguous().view(at::kInt);
  return at::where(bits < 0, bits.bitwise_xor(0x7FFFFFFF), bits).to(at::kLong) + kSignBit;
}

at::Tensor values_of(const at::Tensor& keys) {
  const at::Tensor bits = (keys.clamp(kLowestKey, kHighestKey) - kSignBit).to(at::kInt);
  return at::where(bits < 0, bits.bitwise_xor(0x7FFFFFFF), bits).contiguous().view(at::kFloat);
}

/// Digits that can differ: the float32 form of a 16-bit number ends in equal bits.
int num_digits_of(at::ScalarType type) {
  return type == at::kBFloat16 ? 2 : type == at::kHalf ? 3 : 4;
}

/// This rank's columns that are not padding, as float32 rows [first, last).
at::Tensor some_rows(const at::Tensor& rows, std::int64_t first, std::int64_t last,
                     const PassSettings& settings) {
  return rows.slice(0, first, last).slice(1, 0, settings.num_valid).to(at::kFloat);
}

at::Tensor sum_in_rank_order(const at::Tensor& of_rank, const comm::Group& group) {
  return group.size() == 1 ? of_rank : detail::gather_rows(of_rank, group).sum(0);
}

/// Per row the smallest key whose greater ids weigh less than `limit`. `weigh(first, x)` gives the
/// weights of some rows, in double. See Note [A threshold from histograms].
template <typename Weigh>
at::Tensor smallest_key(const at::Tensor& rows, const at::Tensor& limit, const comm::Group& group,
                        const PassSettings& settings, const Weigh& weigh) {
  const std::int64_t num_rows = rows.size(0);
  const auto doubles = rows.options().dtype(at::kDouble);
  at::Tensor prefix = at::zeros({num_rows, 1}, doubles.dtype(at::kLong));
  at::Tensor above = at::zeros({num_rows, 1}, doubles);
  const int num_digits = num_digits_of(rows.scalar_type());
  int shift = 32;
  for (int digit = 0; digit < num_digits; ++digit) {
    shift -= kDigitBits;
    const at::Tensor sums = at::zeros({num_rows, kDigits}, doubles);
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      const at::Tensor x = some_rows(rows, first, last, settings);
      const at::Tensor lead = keys_of(x).bitwise_right_shift(shift);
      const at::Tensor matches =
          lead.bitwise_right_shift(kDigitBits) == prefix.slice(0, first, last);
      at::Tensor some = sums.slice(0, first, last);
      some.scatter_add_(1, lead.bitwise_and(kDigits - 1), weigh(first, x).mul(matches));
    });
    const at::Tensor all = sum_in_rank_order(sums, group);
    // What lies above each digit: the sum of the higher ones.
    const at::Tensor higher =
        at::cat({all.flip(1).cumsum(1).flip(1).slice(1, 1), at::zeros({num_rows, 1}, doubles)}, 1);
    const at::Tensor chosen =
        ((above + higher) >= limit.unsqueeze(1)).sum(1, /*keepdim=*/true).clamp_max(kDigits - 1);
    above = above + higher.gather(1, chosen);
    prefix = prefix * kDigits + chosen;
  }
  // The bits that were left out are 0, which is 1 in the keys of negative numbers.
  const std::int64_t rest = std::int64_t{1} << shift;
  const at::Tensor key = prefix.squeeze(1) * rest;
  return at::where(key < kSignBit, key + (rest - 1), key);
}

/// The smallest kept logit of every row. Collective.
at::Tensor threshold_of(const at::Tensor& rows, const comm::Group& group,
                        const PassSettings& settings, std::int64_t top_k, double top_p) {
  const auto doubles = rows.options().dtype(at::kDouble).requires_grad(false);
  const std::int64_t num_rows = rows.size(0);
  at::Tensor threshold = at::full({num_rows}, -INFINITY, doubles.dtype(at::kFloat));
  if (top_k > 0) {
    const at::Tensor key =
        smallest_key(rows, at::full({num_rows}, static_cast<double>(top_k), doubles), group,
                     settings, [](std::int64_t, const at::Tensor& x) {
                       return at::ones(x.sizes(), x.options().dtype(at::kDouble));
                     });
    threshold = values_of(key);
  }
  if (top_p < 1.0) {
    PassSettings plain = settings;
    plain.wanted = {};
    plain.wanted.log_sum_exp = true;
    plain.want_loss = false;
    plain.tile = 0;
    plain.overwrite = Overwrite::kNever;
    const at::Tensor lse = detail::forward_pass(rows, at::Tensor(), group, plain)
                               .scores.log_sum_exp.to(at::kDouble)
                               .unsqueeze(1);
    const auto probability = [&](std::int64_t first, const at::Tensor& x) {
      return (x.to(at::kDouble) * settings.shape.scale - lse.slice(0, first, first + x.size(0)))
          .exp();
    };
    const at::Tensor kept = at::zeros({num_rows}, doubles);
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      const at::Tensor x = some_rows(rows, first, last, settings);
      at::Tensor some = kept.slice(0, first, last);
      some.copy_(
          probability(first, x).mul(x >= threshold.slice(0, first, last).unsqueeze(1)).sum(1));
    });
    const at::Tensor limit = sum_in_rank_order(kept, group) * top_p;
    threshold =
        at::maximum(threshold, values_of(smallest_key(rows, limit, group, settings, probability)));
  }
  return threshold;
}

class Sampled : public torch::autograd::Function<Sampled> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& labels, const comm::Group& group,
                            const PassSettings& settings, std::int64_t top_k, double top_p) {
    const at::Tensor rows = flat_rows(logits.detach());
    const std::int64_t num_rows = rows.size(0);
    const at::Tensor threshold = threshold_of(rows, group, settings, top_k, top_p);
    const at::Tensor column = labels - settings.columns.start;
    const at::Tensor is_own = (column >= 0).logical_and(column < settings.num_valid);
    // Largest logit, sum of exponentials and the label's logit, of this rank's kept ids.
    const at::Tensor own =
        at::full({3, num_rows}, -INFINITY, rows.options().dtype(at::kDouble).requires_grad(false));
    own[1].zero_();
    if (settings.num_valid > 0) {
      chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
        at::Tensor x = some_rows(rows, first, last, settings);
        const at::Tensor place = column.slice(0, first, last).clamp(0, settings.num_valid - 1);
        own[2].slice(0, first, last).copy_(x.gather(1, place.unsqueeze(1)).squeeze(1));
        x = x.masked_fill(x < threshold.slice(0, first, last).unsqueeze(1), -INFINITY);
        const at::Tensor top = x.amax(1);
        const at::Tensor center = top.masked_fill(top == -INFINITY, 0.0).unsqueeze(1);
        own[0].slice(0, first, last).copy_(top);
        own[1]
            .slice(0, first, last)
            .copy_(((x - center) * settings.shape.scale).exp().sum(1, false, at::kDouble));
      });
      own[2].masked_fill_(is_own.logical_not(), -INFINITY);
    }
    const at::Tensor all = detail::gather_rows(own, group);  // [ranks, 3, rows]
    const at::Tensor maximum = all.select(1, 0).amax(0);
    const at::Tensor center = maximum.masked_fill(maximum == -INFINITY, 0.0);
    const at::Tensor factors =
        ((all.select(1, 0) - center.unsqueeze(0)) * settings.shape.scale).exp();
    const at::Tensor sum = (all.select(1, 1) * factors).sum(0);
    const at::Tensor log_sum_exp = center * settings.shape.scale + sum.log();
    const at::Tensor label_logit = all.select(1, 2).amax(0);
    const at::Tensor is_ignored = labels == settings.shape.ignored;
    const at::Tensor is_kept = (label_logit >= threshold).logical_and(label_logit != -INFINITY);
    const at::Tensor value = label_logit * settings.shape.scale - log_sum_exp;
    const at::Tensor log_p = at::where(is_kept.logical_or(value.isnan()), value, -INFINITY)
                                 .masked_fill(is_ignored, 0.0)
                                 .to(at::kFloat);
    // A label that was dropped still pushes down what was kept, as it does in torch.
    const at::Tensor gets_one = is_own.logical_and(label_logit >= threshold);
    context->save_for_backward({logits, column.masked_fill(gets_one.logical_not(), -1), threshold,
                                center.to(at::kFloat), sum.log().to(at::kFloat),
                                is_ignored.logical_not()});
    detail::save_settings(context, settings);
    return log_p.view(logits.sizes().slice(0, logits.dim() - 1));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const PassSettings& settings = detail::settings_for_gradient(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor rows = flat_rows(saved[0]);
    const at::Tensor& column = saved[1];
    const at::Tensor upstream =
        at::where(saved[5], gradients[0].to(at::kFloat).reshape(-1) * settings.shape.scale, 0.0);
    at::Tensor gradient = core::empty_kept_last(saved[0].sizes(), saved[0].options());
    const at::Tensor gradient_rows = gradient.view(rows.sizes());
    const auto of = [](const at::Tensor& tensor, std::int64_t first, std::int64_t last) {
      return tensor.slice(0, first, last).unsqueeze(1);
    };
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      const at::Tensor x = some_rows(rows, first, last, settings);
      const at::Tensor p =
          ((x - of(saved[3], first, last)) * settings.shape.scale - of(saved[4], first, last))
              .exp_()
              .masked_fill_((x < of(saved[2], first, last)).logical_or(x == -INFINITY), 0.0);
      const at::Tensor g = of(upstream, first, last);
      at::Tensor piece = p.neg().mul(g);
      if (settings.num_valid > 0) {
        const at::Tensor place = of(column, first, last);
        piece.scatter_add_(1, place.clamp_min(0), at::where(place >= 0, g, 0.0));
      }
      // A row without a gradient stays exactly 0, whatever its logits are.
      piece = at::where(g == 0, 0.0, piece);
      gradient_rows.slice(0, first, last).slice(1, 0, settings.num_valid).copy_(piece);
    });
    gradient_rows.slice(1, settings.num_valid, rows.size(1)).zero_();
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

void check_filters(const SamplingOptions& options, const std::string& operation) {
  TESSERA_CHECK_VALUE(options.top_k >= 0, operation, ": a top_k of ", options.top_k,
                      " is not possible. Use 0 to keep all ids.");
  TESSERA_CHECK_VALUE(options.top_p > 0.0 && options.top_p <= 1.0, operation, ": a top_p of ",
                      options.top_p, " is not possible. It lies in (0, 1].");
}

}  // namespace

at::Tensor smallest_kept_logit(const at::Tensor& local_logits, const comm::Group& group,
                               const SamplingOptions& options) {
  const at::NoGradGuard no_grad;
  const PassSettings settings =
      detail::settings_of(local_logits, at::Tensor(), group, options, "vocab.smallest_kept_logit");
  check_filters(options, settings.operation);
  return threshold_of(flat_rows(local_logits), group, settings, options.top_k, options.top_p)
      .view(local_logits.sizes().slice(0, local_logits.dim() - 1));
}

at::Tensor sampled_log_probabilities(const at::Tensor& local_logits, const at::Tensor& labels,
                                     const comm::Group& group, const SamplingOptions& options) {
  PassSettings settings =
      detail::settings_of(local_logits, labels, group, options, "vocab.sampled_log_probabilities");
  check_filters(options, settings.operation);
  TESSERA_CHECK_VALUE(labels.defined(), settings.operation, ": the labels are undefined.");
  detail::check_labels_without_pass(labels, local_logits, group, settings);
  return Sampled::apply(local_logits, detail::flat_labels(labels), group, settings, options.top_k,
                        options.top_p);
}

}  // namespace tessera::vocab_parallel
