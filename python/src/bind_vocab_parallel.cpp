#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "arguments.h"
#include "bindings.h"
#include "option_fields.h"
#include "tessera/regions/copy_reduce.h"
#include "tessera/vocab_parallel/context_parallel.h"
#include "tessera/vocab_parallel/cross_entropy.h"
#include "tessera/vocab_parallel/linear.h"
#include "tessera/vocab_parallel/log_probabilities.h"
#include "tessera/vocab_parallel/model_utils.h"
#include "tessera/vocab_parallel/sampling.h"
#include "tessera/vocab_parallel/solo_group.h"
#include "tessera/vocab_parallel/te_parallel_ce.h"

namespace tessera::python {
namespace {

using at::Tensor;
using comm::Group;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using MaybeInt = std::optional<std::int64_t>;
using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;
using namespace vocab_parallel;

Group group_of(const MaybeGroup& group) { return group_or_solo(maybe_group(group)); }

Overwrite overwrite_named(const std::string& name) {
  if (name == "never") return Overwrite::kNever;
  if (name == "backward") return Overwrite::kInBackward;
  if (name == "forward") return Overwrite::kInForward;
  throw py::value_error("vocab: overwrite is 'never', 'backward' or 'forward', not '" + name +
                        "'.");
}

const char* name_of(Overwrite overwrite) {
  if (overwrite == Overwrite::kNever) return "never";
  return overwrite == Overwrite::kInBackward ? "backward" : "forward";
}

Reduction reduction_named(const std::string& name) {
  if (name == "none") return Reduction::kNone;
  if (name == "mean") return Reduction::kMean;
  if (name == "sum") return Reduction::kSum;
  throw py::value_error("vocab: reduction is 'none', 'mean' or 'sum', not '" + name + "'.");
}

const char* name_of(Reduction reduction) {
  if (reduction == Reduction::kNone) return "none";
  return reduction == Reduction::kMean ? "mean" : "sum";
}

std::optional<Columns> columns_in(const Range& range) {
  return range ? std::optional(Columns{range->first, range->second}) : std::nullopt;
}

using Scores = std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor>;

MaybeTensor maybe(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

Scores tuple_of(const CrossEntropyScores& scores) {
  return {maybe(scores.loss), maybe(scores.tokens.log_probability),
          maybe(scores.tokens.log_sum_exp), maybe(scores.tokens.entropy),
          maybe(scores.tokens.argmax)};
}

WantedScores wanted_of(const std::vector<bool>& flags) {
  return {flags.at(0), flags.at(1), flags.at(2), flags.at(3)};
}

void bind_token_options(py::module_& m) {
  options_class<TokenOptions>(m, "TokenOptions",
                              "What every function of sharded logits may be told.")
      .def_property(
          "columns",
          [](const TokenOptions& self) -> Range {
            if (!self.columns) return std::nullopt;
            return std::pair(self.columns->start, self.columns->end);
          },
          [](TokenOptions& self, const Range& range) { self.columns = columns_in(range); })
      .def_readwrite("vocab_size", &TokenOptions::vocab_size)
      .def_readwrite("ignore_index", &TokenOptions::ignore_index)
      .def_readwrite("temperature", &TokenOptions::temperature)
      .def_property(
          "overwrite", [](const TokenOptions& self) { return name_of(self.overwrite); },
          [](TokenOptions& self, const std::string& word) {
            self.overwrite = overwrite_named(word);
          })
      .def_readwrite("reproducible_tile", &TokenOptions::reproducible_tile)
      .def_readwrite("check_labels", &TokenOptions::check_labels);
  options_class<CrossEntropyOptions, TokenOptions>(m, "CrossEntropyOptions")
      .def_property(
          "reduction", [](const CrossEntropyOptions& self) { return name_of(self.reduction); },
          [](CrossEntropyOptions& self, const std::string& word) {
            self.reduction = reduction_named(word);
          })
      .def_readwrite("label_smoothing", &CrossEntropyOptions::label_smoothing)
      .def_readwrite("z_loss", &CrossEntropyOptions::z_loss);
  options_class<LinearOptions, CrossEntropyOptions>(m, "LinearOptions")
      .def_readwrite("workspace_bytes", &LinearOptions::workspace_bytes)
      .def_readwrite("local_bias", &LinearOptions::local_bias)
      .def_readwrite("softcap", &LinearOptions::softcap);
  options_class<SamplingOptions, TokenOptions>(m, "SamplingOptions")
      .def_readwrite("top_k", &SamplingOptions::top_k)
      .def_readwrite("top_p", &SamplingOptions::top_p);
}

void bind_engine(py::module_& m) {
  m.def(
      "vocab_token_scores",
      [](const Tensor& logits, const MaybeTensor& labels, const MaybeGroup& group,
         const std::vector<bool>& wanted, const TokenOptions& options) {
        return tuple_of({{},
                         token_scores(logits, labels.value_or(Tensor()), group_of(group),
                                      wanted_of(wanted), options)});
      },
      py::arg("logits"), py::arg("labels"), py::arg("group"), py::arg("wanted"), py::arg("options"),
      Release());
  m.def(
      "vocab_cross_entropy",
      [](const Tensor& logits, const Tensor& labels, const MaybeGroup& group,
         const std::vector<bool>& wanted, const CrossEntropyOptions& options) {
        return tuple_of(
            cross_entropy_with_scores(logits, labels, group_of(group), wanted_of(wanted), options));
      },
      py::arg("logits"), py::arg("labels"), py::arg("group"), py::arg("wanted"), py::arg("options"),
      Release());
  m.def(
      "vocab_linear_cross_entropy",
      [](const Tensor& hidden, const Tensor& weight, const Tensor& labels, const MaybeGroup& group,
         const std::vector<bool>& wanted, const LinearOptions& options) {
        return tuple_of(linear_cross_entropy_with_scores(hidden, weight, labels, group_of(group),
                                                         wanted_of(wanted), options));
      },
      py::arg("hidden"), py::arg("weight"), py::arg("labels"), py::arg("group"), py::arg("wanted"),
      py::arg("options"), Release());
}

void bind_probabilities(py::module_& m) {
  const auto at_ids = [&m](const char* name, auto function) {
    m.def(
        name,
        [function](const Tensor& logits, const Tensor& ids, const MaybeGroup& group,
                   const TokenOptions& options) {
          return function(logits, ids, group_of(group), options);
        },
        py::arg("logits"), py::arg("ids"), py::arg("group"), py::arg("options"), Release());
  };
  at_ids("vocab_log_probabilities_at", &log_probabilities_at);
  at_ids("vocab_logits_at", &logits_at);
  m.def(
      "vocab_columns_of",
      [](std::int64_t vocab_size, const MaybeGroup& group) {
        const Columns columns = columns_of(vocab_size, group_of(group));
        return std::pair(columns.start, columns.end);
      },
      Release());
  m.def(
      "vocab_log_softmax",
      [](const Tensor& logits, const MaybeGroup& group, const TokenOptions& options) {
        return log_softmax(logits, group_of(group), options);
      },
      py::arg("logits"), py::arg("group"), py::arg("options"), Release());
  m.def(
      "vocab_soft_cross_entropy",
      [](const Tensor& logits, const Tensor& target_logits, const MaybeGroup& group,
         const TokenOptions& options) {
        return soft_cross_entropy(logits, target_logits, group_of(group), options);
      },
      py::arg("logits"), py::arg("target_logits"), py::arg("group"), py::arg("options"), Release());
  m.def(
      "vocab_top_k",
      [](const Tensor& logits, std::int64_t k, const MaybeGroup& group,
         const TokenOptions& options) { return top_k(logits, k, group_of(group), options); },
      py::arg("logits"), py::arg("k"), py::arg("group"), py::arg("options"), Release());
}

void bind_sampling(py::module_& m) {
  m.def(
      "vocab_sampled_log_probabilities",
      [](const Tensor& logits, const Tensor& labels, const MaybeGroup& group,
         const SamplingOptions& options) {
        return sampled_log_probabilities(logits, labels, group_of(group), options);
      },
      py::arg("logits"), py::arg("labels"), py::arg("group"), py::arg("options"), Release());
  m.def(
      "vocab_smallest_kept_logit",
      [](const Tensor& logits, const MaybeGroup& group, const SamplingOptions& options) {
        return smallest_kept_logit(logits, group_of(group), options);
      },
      py::arg("logits"), py::arg("group"), py::arg("options"), Release());
  m.def(
      "distributed_logprob_with_sampling",
      [](const Tensor& logits, const Tensor& target, const MaybeGroup& group, MaybeInt top_k,
         double top_p, const Range& columns) {
        return DistributedLogprobWithSampling::apply(logits, target, group_of(group), top_k, top_p,
                                                     /*inference_only=*/false, columns_in(columns));
      },
      py::arg("logits"), py::arg("target"), py::arg("group"), py::arg("top_k"), py::arg("top_p"),
      py::arg("columns"), Release());
  m.def("apply_top_k_top_p", &apply_top_k_top_p, Release());
}

void bind_context(py::module_& m) {
  m.def("part_of_context_rank", &part_of_context_rank, py::arg("x"), py::arg("rank"),
        py::arg("size"), py::arg("dim"), py::arg("starts"), Release());
  m.def(
      "gather_context",
      [](const Tensor& x, const MaybeGroup& group, std::int64_t dim, const MaybeTensor& starts) {
        return gather_context(x, group_of(group), dim, starts);
      },
      Release());
  m.def(
      "context_window",
      [](const Tensor& x, const MaybeGroup& group, std::int64_t dim) {
        return context_window(x, group_of(group), dim);
      },
      Release());
  m.def(
      "shift_next",
      [](const Tensor& x, const MaybeGroup& group, double fill) {
        return shift_next(x, maybe_group(group), fill);
      },
      Release());
  m.def(
      "to_token_shards",
      [](const Tensor& x, const MaybeGroup& group) { return to_token_shards(x, group_of(group)); },
      Release());
  m.def(
      "to_vocabulary_shards",
      [](const Tensor& x, const MaybeGroup& group) {
        return to_vocabulary_shards(x, group_of(group));
      },
      Release());
}

using MaybeSampling = std::optional<std::pair<MaybeInt, double>>;

std::optional<TrainingSamplingParams> params_of(const MaybeSampling& sampling) {
  if (!sampling) return std::nullopt;
  return TrainingSamplingParams{sampling->first, sampling->second};
}

void bind_distillation(py::module_& m) {
  m.def(
      "compute_distributed_log_softmax_with_grad",
      [](const Tensor& logits, const MaybeGroup& group) {
        return _compute_distributed_log_softmax_with_grad(logits, group_of(group));
      },
      Release());
  m.def(
      "compute_distributed_softmax",
      [](const Tensor& logits, const MaybeGroup& group) {
        return _compute_distributed_softmax(logits, group_of(group));
      },
      Release());
  m.def(
      "vocab_parallel_log_softmax",
      [](const Tensor& logits, double temperature, const MaybeGroup& group) {
        return vocab_parallel_log_softmax(logits, temperature, group_of(group));
      },
      Release());
  m.def(
      "vocab_parallel_full_log_softmax",
      [](const Tensor& logits, double temperature, const MaybeGroup& group) {
        return vocab_parallel_full_log_softmax(logits, temperature, group_of(group));
      },
      Release());
  m.def(
      "vocab_parallel_gather_columns",
      [](const Tensor& logits, const Tensor& ids, const MaybeGroup& group) {
        return vocab_parallel_gather_columns(logits, ids, group_of(group));
      },
      Release());
  m.def(
      "vocab_parallel_argmax",
      [](const Tensor& logits, const MaybeGroup& group) {
        return vocab_parallel_argmax(logits, group_of(group));
      },
      Release());
  m.def(
      "group_sum",
      [](const Tensor& x, const MaybeGroup& group) { return regions::reduce(x, group_of(group)); },
      Release());
  m.def(
      "distillation_topk_logprobs",
      [](const Tensor& student, const Tensor& teacher, const Tensor& ids, bool zero_outside_topk,
         bool calculate_entropy, const MaybeGroup& group, const MaybeGroup& cp_group,
         const Range& columns) {
        const DistillationLogprobs result = get_distillation_topk_logprobs_from_logits(
            student, teacher, ids, zero_outside_topk, calculate_entropy, group_of(group),
            maybe_group(cp_group), columns_in(columns));
        return std::tuple<Tensor, Tensor, MaybeTensor>(result.student, result.teacher,
                                                       maybe(result.minus_entropy));
      },
      py::arg("student"), py::arg("teacher"), py::arg("ids"), py::arg("zero_outside_topk"),
      py::arg("calculate_entropy"), py::arg("group"), py::arg("cp_group"), py::arg("columns"),
      Release());
  m.def(
      "distributed_hidden_states_to_logprobs",
      [](const Tensor& hidden, const Tensor& target, const Tensor& weight, std::int64_t start,
         std::int64_t end, std::int64_t chunk_size, const MaybeGroup& group) {
        return ChunkedDistributedHiddenStatesToLogprobs::apply(hidden, target, weight, start, end,
                                                               chunk_size, group_of(group));
      },
      py::arg("hidden"), py::arg("target"), py::arg("weight"), py::arg("start"), py::arg("end"),
      py::arg("chunk_size"), py::arg("group"), Release());
}

void bind_model_utils(py::module_& m) {
  m.def(
      "compute_distributed_log_softmax",
      [](const Tensor& logits, const MaybeGroup& group) {
        return _compute_distributed_log_softmax(logits, group_of(group));
      },
      Release());
  m.def(
      "distributed_logprob",
      [](const Tensor& logits, const Tensor& target, std::int64_t start, std::int64_t end,
         const MaybeGroup& group) {
        return DistributedLogprob::apply(logits, target, start, end, group_of(group));
      },
      py::arg("logits"), py::arg("target"), py::arg("start"), py::arg("end"), py::arg("group"),
      Release());
  m.def(
      "distributed_gather_logprob",
      [](const Tensor& logits, const Tensor& ids, std::int64_t start, std::int64_t end,
         const MaybeGroup& group) {
        return ChunkedDistributedGatherLogprob::apply(logits, ids, start, end, 1, group_of(group));
      },
      py::arg("logits"), py::arg("ids"), py::arg("start"), py::arg("end"), py::arg("group"),
      Release());
  m.def(
      "distributed_entropy",
      [](const Tensor& logits, const MaybeGroup& group, const Range& columns) {
        return ChunkedDistributedEntropy::apply(logits, 1, group_of(group),
                                                /*inference_only=*/false, columns_in(columns));
      },
      Release());
  m.def(
      "distributed_cross_entropy",
      [](const Tensor& student, const Tensor& target, const MaybeGroup& group,
         const Range& columns) {
        return DistributedCrossEntropy::apply(student, target, group_of(group),
                                              /*inference_only=*/false, columns_in(columns));
      },
      Release());
  m.def(
      "from_parallel_logits_to_logprobs",
      [](const Tensor& logits, const Tensor& target, std::int64_t start, std::int64_t end,
         const MaybeGroup& group, bool inference_only, const MaybeGroup& cp_group,
         const MaybeSampling& sampling, bool shift_targets) {
        return from_parallel_logits_to_logprobs(logits, target, start, end, group_of(group),
                                                inference_only, maybe_group(cp_group), std::nullopt,
                                                params_of(sampling), shift_targets);
      },
      py::arg("logits"), py::arg("target"), py::arg("start"), py::arg("end"), py::arg("group"),
      py::arg("inference_only"), py::arg("cp_group"), py::arg("sampling"), py::arg("shift_targets"),
      Release());
  m.def(
      "from_parallel_logits_to_logprobs_packed_sequences",
      [](const Tensor& logits, const Tensor& target, const Tensor& cu_seqlens_padded,
         std::int64_t unpacked_seqlen, std::int64_t start, std::int64_t end,
         const MaybeGroup& group, bool inference_only, const MaybeGroup& cp_group,
         const MaybeSampling& sampling, bool target_is_pre_rolled) {
        return from_parallel_logits_to_logprobs_packed_sequences(
            logits, target, cu_seqlens_padded, unpacked_seqlen, start, end, group_of(group),
            inference_only, maybe_group(cp_group), std::nullopt, params_of(sampling),
            target_is_pre_rolled);
      },
      py::arg("logits"), py::arg("target"), py::arg("cu_seqlens_padded"),
      py::arg("unpacked_seqlen"), py::arg("start"), py::arg("end"), py::arg("group"),
      py::arg("inference_only"), py::arg("cp_group"), py::arg("sampling"),
      py::arg("target_is_pre_rolled"), Release());
  m.def(
      "from_parallel_hidden_states_to_logprobs",
      [](const Tensor& hidden, const Tensor& weight, const Tensor& target, std::int64_t start,
         std::int64_t end, const MaybeGroup& group, bool inference_only, const MaybeGroup& cp_group,
         MaybeInt chunk_size) {
        return from_parallel_hidden_states_to_logprobs(hidden, weight, target, start, end,
                                                       group_of(group), inference_only,
                                                       maybe_group(cp_group), chunk_size);
      },
      py::arg("hidden"), py::arg("weight"), py::arg("target"), py::arg("start"), py::arg("end"),
      py::arg("group"), py::arg("inference_only"), py::arg("cp_group"), py::arg("chunk_size"),
      Release());
  m.def(
      "distributed_vocab_topk",
      [](const Tensor& logits, std::int64_t k, const MaybeGroup& group, std::int64_t start,
         std::int64_t end) {
        return distributed_vocab_topk(logits, k, group_of(group), start, end);
      },
      py::arg("logits"), py::arg("k"), py::arg("group"), py::arg("start"), py::arg("end"),
      Release());
  m.def(
      "gather_logits_at_global_indices",
      [](const Tensor& logits, const Tensor& ids, const MaybeGroup& group,
         const MaybeGroup& cp_group, std::int64_t start, std::int64_t end) {
        return gather_logits_at_global_indices(logits, ids, group_of(group), maybe_group(cp_group),
                                               start, end);
      },
      py::arg("logits"), py::arg("ids"), py::arg("group"), py::arg("cp_group"), py::arg("start"),
      py::arg("end"), Release());
  m.def(
      "gather_vocab_parallel_logprobs_at_indices",
      [](const Tensor& logits, const Tensor& ids, const MaybeGroup& group,
         const MaybeGroup& cp_group, std::int64_t start, std::int64_t end) {
        return gather_vocab_parallel_logprobs_at_indices(logits, ids, group_of(group),
                                                         maybe_group(cp_group), start, end);
      },
      py::arg("logits"), py::arg("ids"), py::arg("group"), py::arg("cp_group"), py::arg("start"),
      py::arg("end"), Release());
}

void bind_te_parallel_ce(py::module_& m) {
  m.def(
      "parallel_cross_entropy",
      [](const Tensor& input, const Tensor& target, double label_smoothing, bool reduce_loss,
         const MaybeGroup& group, std::int64_t ignore_idx, const Range& columns) {
        return parallel_cross_entropy(input, target, label_smoothing, reduce_loss,
                                      maybe_group(group), ignore_idx, columns_in(columns));
      },
      py::arg("input"), py::arg("target"), py::arg("label_smoothing"), py::arg("reduce_loss"),
      py::arg("group"), py::arg("ignore_idx"), py::arg("columns"), Release());
  m.def(
      "te_parallel_cross_entropy",
      [](const Tensor& logits, const Tensor& labels, const MaybeTensor& mask,
         std::int64_t ignore_index, const std::string& reduction, const MaybeGroup& group,
         MaybeInt num_label_tokens, const Range& columns) {
        return TEParallelCrossEntropy(ignore_index, reduction, maybe_group(group))(
            logits, labels, mask.value_or(Tensor()), num_label_tokens, columns_in(columns));
      },
      py::arg("logits"), py::arg("labels"), py::arg("mask"), py::arg("ignore_index"),
      py::arg("reduction"), py::arg("group"), py::arg("num_label_tokens"), py::arg("columns"),
      Release());
}

}  // namespace

void bind_vocab_parallel(py::module_& module) {
  bind_token_options(module);
  bind_engine(module);
  bind_probabilities(module);
  bind_sampling(module);
  bind_context(module);
  bind_distillation(module);
  bind_model_utils(module);
  bind_te_parallel_ce(module);
}

}  // namespace tessera::python
