#include "tessera/vocab_parallel/log_probabilities.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/Functions.h>

#include "core/autograd.h"
#include "core/kept_memory.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "vocab_parallel/row_chunks.h"
#include "vocab_parallel/saved_settings.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel {
namespace {

using detail::chunk_rows;
using detail::flat_rows;
using detail::log_softmax_rows;
using detail::PassResult;
using detail::PassSettings;
using detail::sum_over_group;

constexpr const char* kId = "id";  // what error texts call it

/// Ids as columns of this rank: where they are its own, and a valid column everywhere.
struct OwnIds {
  at::Tensor is_own;   // bool [n, k]
  at::Tensor columns;  // int64 [n, k]
};

OwnIds own_ids(const at::Tensor& ids, const PassSettings& settings) {
  const at::Tensor columns = ids - settings.columns.start;
  const at::Tensor is_own = (columns >= 0).logical_and(columns < settings.num_valid);
  return {is_own, columns.masked_fill(is_own.logical_not(), 0)};
}

/// Logits at `ids`, known to all ranks; 0 where no rank holds the id. Adding zeros keeps the bits.
at::Tensor picked(const at::Tensor& logits, const at::Tensor& ids, const comm::Group& group,
                  const PassSettings& settings) {
  at::Tensor values =
      at::zeros(ids.sizes(), logits.options().dtype(at::kFloat).requires_grad(false));
  if (settings.num_valid > 0 && ids.numel() > 0) {
    const OwnIds own = own_ids(ids, settings);
    values =
        logits.gather(1, own.columns).to(at::kFloat).masked_fill(own.is_own.logical_not(), 0.0);
  }
  return sum_over_group(values, group);
}

void check_ids(const at::Tensor& logits, const at::Tensor& ids, const std::string& operation) {
  TESSERA_CHECK_TYPE(
      ids.defined() && (ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt), operation,
      ": the ids must be int64 or int32.");
  TESSERA_CHECK_VALUE(ids.dim() == logits.dim() && ids.sizes().slice(0, ids.dim() - 1) ==
                                                       logits.sizes().slice(0, logits.dim() - 1),
                      operation, ": the ids have shape ", ids.sizes(), ", the logits ",
                      logits.sizes(), ". All but the last dimension must be equal.");
}

/// Logits [n, columns] without their history, and ids [n, k] as int64.
std::pair<at::Tensor, at::Tensor> flattened(const at::Tensor& logits, const at::Tensor& ids) {
  const at::Tensor rows = flat_rows(logits.detach());
  return {rows, ids.to(at::kLong).reshape({rows.size(0), ids.size(-1)})};
}

/// Sum of the gradients of all equal ids of a row: what one element of the logits gets.
at::Tensor sums_of_equal_ids(const at::Tensor& ids, const at::Tensor& gradient) {
  const std::int64_t k = ids.size(1);
  at::Tensor sums = at::empty_like(gradient);
  const std::int64_t step =
      std::max<std::int64_t>(1, (std::int64_t{4} << 20) / std::max<std::int64_t>(k * k, 1));
  for (std::int64_t first = 0; first < ids.size(0); first += step) {
    const std::int64_t last = std::min(first + step, ids.size(0));
    const at::Tensor some = ids.slice(0, first, last);
    const at::Tensor equal = (some.unsqueeze(2) == some.unsqueeze(1)).to(at::kFloat);
    sums.slice(0, first, last)
        .copy_(at::bmm(equal, gradient.slice(0, first, last).unsqueeze(2)).squeeze(2));
  }
  return sums;
}

/// Writes `values` at the ids this rank holds. An id of another rank repeats what the row's first
/// own id writes, or what is there already, so that no list of own ids is needed.
void put_own(at::Tensor gradient, const at::Tensor& ids, const at::Tensor& values,
             const PassSettings& settings) {
  if (settings.num_valid == 0 || ids.numel() == 0) return;
  const OwnIds own = own_ids(ids, settings);
  const at::Tensor has_own = own.is_own.any(1, /*keepdim=*/true);
  const at::Tensor first_own = own.is_own.to(at::kByte).argmax(1, /*keepdim=*/true);
  const at::Tensor present = gradient.slice(1, 0, 1).to(at::kFloat);
  const at::Tensor column = at::where(has_own, own.columns.gather(1, first_own), 0);
  const at::Tensor value = at::where(has_own, values.gather(1, first_own), present);
  gradient.scatter_(1, at::where(own.is_own, own.columns, column),
                    at::where(own.is_own, values, value).to(gradient.scalar_type()));
}

class LogProbabilitiesAt : public torch::autograd::Function<LogProbabilitiesAt> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& ids, const comm::Group& group,
                            const PassSettings& settings) {
    const auto [rows, flat_ids] = flattened(logits, ids);
    detail::check_labels_before(ids, settings, kId);
    const PassResult result = detail::forward_pass(rows, at::Tensor(), group, settings);
    detail::check_labels_after(ids, result.vocab, settings, kId);
    const at::Tensor distance =
        picked(rows, flat_ids, group, settings) - result.maximum.unsqueeze(1);
    at::Tensor log_p = distance * settings.shape.scale - result.sum.log().unsqueeze(1);
    if (!settings.check_labels) {  // no rank has such an id, and its logit was taken for 0
      log_p.masked_fill_((flat_ids < 0).logical_or(flat_ids >= result.vocab), NAN);
    }
    log_p.masked_fill_(flat_ids == settings.shape.ignored, 0.0);
    context->save_for_backward({logits, flat_ids, result.maximum, result.sum, result.vocab, log_p});
    detail::save_settings(context, settings);
    return log_p.view(ids.sizes());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const PassSettings& settings = detail::settings_for_gradient(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& ids = saved[1];
    const at::Tensor& log_p = saved[5];
    PassResult result;
    result.maximum = saved[2];
    result.sum = saved[3];
    result.vocab = saved[4];
    const at::Tensor upstream = gradients[0]
                                    .to(at::kFloat)
                                    .reshape(ids.sizes())
                                    .masked_fill(ids == settings.shape.ignored, 0.0);
    const at::Tensor of_row = upstream.sum(1);
    at::Tensor gradient = detail::backward_pass(
        saved[0], at::Tensor(), result, {.log_sum_exp = -of_row}, settings, /*in_place=*/false);
    const at::Tensor values =
        (sums_of_equal_ids(ids, upstream) - log_p.exp() * of_row.unsqueeze(1)) *
        settings.shape.scale;
    put_own(gradient.view({ids.size(0), gradient.size(-1)}), ids, values, settings);
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class LogitsAt : public torch::autograd::Function<LogitsAt> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& ids, const comm::Group& group,
                            const PassSettings& settings) {
    const auto [rows, flat_ids] = flattened(logits, ids);
    context->save_for_backward({flat_ids});
    detail::save_settings(context, settings);
    context->saved_data["shape"] = logits.sizes().vec();
    context->saved_data["type"] = static_cast<std::int64_t>(logits.scalar_type());
    return picked(rows, flat_ids, group, settings).view(ids.sizes());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const PassSettings& settings = detail::saved_settings(context);
    const at::Tensor ids = context->get_saved_variables()[0];
    const auto type = static_cast<at::ScalarType>(context->saved_data["type"].toInt());
    const at::Tensor upstream = gradients[0].to(at::kFloat).reshape(ids.sizes());
    at::Tensor gradient =
        at::zeros(context->saved_data["shape"].toIntVector(), upstream.options().dtype(type));
    put_own(gradient.view({ids.size(0), gradient.size(-1)}), ids, sums_of_equal_ids(ids, upstream),
            settings);
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

/// What a log softmax leaves for backward besides tensors.
struct LogSoftmaxState : torch::CustomClassHolder {
  LogSoftmaxState(PassSettings given, comm::Group with)
      : settings(std::move(given)), group(std::move(with)) {}
  PassSettings settings;
  comm::Group group;
};

class LogSoftmax : public torch::autograd::Function<LogSoftmax> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const comm::Group& group, const PassSettings& settings) {
    const PassResult result = detail::forward_pass(logits.detach(), at::Tensor(), group, settings);
    const at::Tensor log_sum = result.sum.log();
    at::Tensor out = core::empty_kept_last(logits.sizes(), logits.options());
    const at::Tensor rows = flat_rows(logits.detach());
    const at::Tensor out_rows = out.view(rows.sizes());
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      out_rows.slice(0, first, last)
          .slice(1, 0, settings.num_valid)
          .copy_(log_softmax_rows(rows, first, last, result.maximum, log_sum, settings));
    });
    out_rows.slice(1, settings.num_valid, rows.size(1)).fill_(-INFINITY);  // padding
    context->save_for_backward({logits, result.maximum, log_sum});
    carry(context, c10::make_intrusive<LogSoftmaxState>(settings, group));
    return out;
  }

  /// g - softmax times the sum of g over the whole vocabulary.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto state = carried<LogSoftmaxState>(context);
    const PassSettings& settings = state->settings;
    detail::check_first_gradient(settings);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor rows = flat_rows(saved[0]);
    const at::Tensor upstream = gradients[0].reshape(rows.sizes());
    const at::Tensor valid = upstream.slice(1, 0, settings.num_valid);
    const at::Tensor sums =
        sum_over_group(valid.sum(1, /*keepdim=*/true, at::kFloat), state->group);
    at::Tensor gradient = core::empty_kept_last(saved[0].sizes(), saved[0].options());
    const at::Tensor gradient_rows = gradient.view(rows.sizes());
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      const at::Tensor p = log_softmax_rows(rows, first, last, saved[1], saved[2], settings).exp_();
      gradient_rows.slice(0, first, last)
          .slice(1, 0, settings.num_valid)
          .copy_((valid.slice(0, first, last) - p * sums.slice(0, first, last)) *
                 settings.shape.scale);
    });
    gradient_rows.slice(1, settings.num_valid, rows.size(1)).zero_();
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor log_probabilities(const at::Tensor& local_logits, const at::Tensor& labels,
                             const comm::Group& group, const TokenOptions& options) {
  TokenOptions named = options;
  named.operation = detail::operation_of(options, "vocab.log_probabilities");
  return token_scores(local_logits, labels, group, {.log_probability = true}, named)
      .log_probability;
}

at::Tensor log_probabilities_at(const at::Tensor& local_logits, const at::Tensor& ids,
                                const comm::Group& group, const TokenOptions& options) {
  PassSettings settings =
      detail::settings_of(local_logits, at::Tensor(), group, options, "vocab.log_probabilities_at");
  check_ids(local_logits, ids, settings.operation);
  settings.overwrite = Overwrite::kNever;
  settings.label_digest = detail::digest_of(ids, group, settings);
  return LogProbabilitiesAt::apply(local_logits, ids, group, settings);
}

at::Tensor logits_at(const at::Tensor& local_logits, const at::Tensor& ids,
                     const comm::Group& group, const TokenOptions& options) {
  const PassSettings settings =
      detail::settings_of(local_logits, at::Tensor(), group, options, "vocab.logits_at");
  check_ids(local_logits, ids, settings.operation);
  detail::check_labels_without_pass(ids, local_logits, group, settings, kId);
  return LogitsAt::apply(local_logits, ids, group, settings);
}

at::Tensor log_softmax(const at::Tensor& local_logits, const comm::Group& group,
                       const TokenOptions& options) {
  PassSettings settings =
      detail::settings_of(local_logits, at::Tensor(), group, options, "vocab.log_softmax");
  settings.overwrite = Overwrite::kNever;
  return LogSoftmax::apply(local_logits, group, settings);
}

std::pair<at::Tensor, at::Tensor> top_k(const at::Tensor& local_logits, std::int64_t k,
                                        const comm::Group& group, const TokenOptions& options) {
  const at::NoGradGuard no_grad;
  const PassSettings settings =
      detail::settings_of(local_logits, at::Tensor(), group, options, "vocab.top_k");
  TESSERA_CHECK_VALUE(k > 0, settings.operation, ": the best ", k, " ids cannot be chosen.");
  if (settings.check_labels) {
    const std::int64_t vocab = detail::vocab_of_ranks(local_logits, group, settings);
    TESSERA_CHECK_VALUE(k <= vocab, settings.operation, ": the best ", k,
                        " ids were asked of a vocabulary of ", vocab, ".");
  }
  const at::Tensor rows = flat_rows(local_logits);
  const std::int64_t num_rows = rows.size(0);
  const std::int64_t own = std::min(k, settings.num_valid);
  const auto floats = local_logits.options().dtype(at::kFloat).requires_grad(false);
  // Ranks with fewer than k columns fill up with what never wins.
  at::Tensor values = at::full({num_rows, k}, -INFINITY, floats);
  at::Tensor ids = at::full({num_rows, k}, -1, floats.dtype(at::kLong));
  if (own > 0) {
    chunk_rows(rows, [&](std::int64_t first, std::int64_t last) {
      const auto [best, columns] =
          rows.slice(0, first, last).slice(1, 0, settings.num_valid).to(at::kFloat).topk(own, 1);
      values.slice(0, first, last).slice(1, 0, own).copy_(best);
      ids.slice(0, first, last).slice(1, 0, own).copy_(columns + settings.columns.start);
    });
  }
  const std::int64_t width = k * group.size();
  const at::Tensor all_values =
      detail::gather_rows(values, group).permute({1, 0, 2}).reshape({num_rows, width});
  const at::Tensor all_ids =
      detail::gather_rows(ids, group).permute({1, 0, 2}).reshape({num_rows, width});
  // An id whose logit is -inf still goes before none.
  const at::Tensor order =
      all_values.to(at::kDouble).clamp_min(-1e300).masked_fill_(all_ids < 0, -INFINITY);
  const at::Tensor places = std::get<1>(order.topk(k, 1));
  auto shape = local_logits.sizes().vec();
  shape.back() = k;
  return {all_values.gather(1, places).view(shape), all_ids.gather(1, places).view(shape)};
}

}  // namespace tessera::vocab_parallel
