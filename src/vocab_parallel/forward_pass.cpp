#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <ATen/Functions.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "vocab_parallel/device.h"
#include "vocab_parallel/logit_pieces.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel::detail {
namespace {

using kernels::kHeader;

/// Which statistics travel, and in which order. See kernels/token_rows.h.
struct Fields {
  int target = -1;
  int total = -1;
  int weighted = -1;
  int best = -1;
  int count = 2;  // maximum and sum always do
};

Fields fields_of(const PassSettings& settings, bool has_labels) {
  Fields fields;
  if (has_labels) fields.target = fields.count++;
  if (settings.shape.label_smoothing != 0.0) fields.total = fields.count++;
  if (settings.wanted.entropy) fields.weighted = fields.count++;
  if (settings.wanted.argmax) fields.best = fields.count++;
  return fields;
}

/// The arrays of one part, from row `first` on.
kernels::SoftmaxStatistics arrays_of(float* part, const Fields& fields, std::int64_t num_rows,
                                     std::int64_t first) {
  const auto at = [&](int field) { return field < 0 ? nullptr : part + field * num_rows + first; };
  return {.maximum = at(0),
          .sum = at(1),
          .target = at(fields.target),
          .total = at(fields.total),
          .weighted = at(fields.weighted),
          .best = reinterpret_cast<std::int32_t*>(at(fields.best))};
}

std::int64_t num_tiles_of(const PassSettings& settings) {
  return settings.tile == 0
             ? 1
             : std::max<std::int64_t>((settings.num_valid + settings.tile - 1) / settings.tile, 1);
}

/// Most tiles of any rank. Ranks with explicit ranges must ask each other.
std::int64_t num_parts_of(const PassSettings& settings, const comm::Group& group,
                          const at::TensorOptions& options) {
  const std::int64_t own = num_tiles_of(settings);
  if (settings.tile == 0 || group.size() == 1) return own;
  return comm::all_reduce(at::full({1}, own, options.dtype(at::kLong)), group,
                          comm::Reduction::kMax)
      .item<std::int64_t>();
}

kernels::SoftmaxStatisticsTask statistics_task(const PassSettings& settings,
                                               const at::Tensor& labels, std::int64_t first_row) {
  kernels::SoftmaxStatisticsTask task;
  task.labels.ids = labels.defined() ? labels.const_data_ptr<std::int64_t>() + first_row : nullptr;
  task.labels.first_column = settings.columns.start;
  task.labels.ignored = settings.shape.ignored;
  task.scale = static_cast<float>(settings.shape.scale);
  task.skip_ignored = labels.defined() && !settings.has_extras();
  return task;
}

/// Writes the parts of this rank behind the header of `packed`.
void local_statistics(const at::Tensor& logits, const at::Tensor& labels,
                      const PassSettings& settings, const Fields& fields, std::int64_t num_rows,
                      const at::Tensor& packed) {
  float* parts = packed.data_ptr<float>() + kHeader;
  const std::int64_t tile = settings.tile == 0 ? settings.num_valid : settings.tile;
  for_each_piece(logits, /*write_back=*/false, [&](const at::Tensor& piece, std::int64_t first) {
    kernels::LogitRows rows;
    TESSERA_INTERNAL_ASSERT(as_rows(piece, rows), "a piece of logits is made of rows");
    const auto* data = static_cast<const char*>(rows.data);
    for (std::int64_t part = 0; part < num_tiles_of(settings); ++part) {
      auto task = statistics_task(settings, labels, first);
      task.rows = rows;
      task.rows.data = data + part * tile * logits.element_size();
      task.rows.num_columns = std::clamp<std::int64_t>(settings.num_valid - part * tile, 0, tile);
      task.labels.first_column += part * tile;
      task.out = arrays_of(parts + part * fields.count * num_rows, fields, num_rows, first);
      run_statistics(logits.device(), task);
    }
  });
}

/// Values that change nothing when merged, for tiles this rank does not have.
void fill_missing_parts(const at::Tensor& packed, const Fields& fields, std::int64_t num_rows,
                        std::int64_t first_part, std::int64_t num_parts) {
  for (std::int64_t part = first_part; part < num_parts; ++part) {
    at::Tensor values =
        packed.narrow(0, kHeader + part * fields.count * num_rows, fields.count * num_rows);
    values.zero_();
    values.narrow(0, 0, num_rows).fill_(-INFINITY);
    if (fields.target >= 0) values.narrow(0, fields.target * num_rows, num_rows).fill_(-INFINITY);
  }
}

/// What a rank tells the others beside its statistics: its first id, the end of those that are not
/// padding, the columns of its logits, the end of its range, and two halves of the labels' digest.
std::array<std::int32_t, kHeader> header_of(const PassSettings& settings, std::int64_t held) {
  const Columns& columns = settings.columns;
  const auto half = [&](int shift) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(settings.label_digest >> shift));
  };
  return {static_cast<std::int32_t>(columns.start),
          static_cast<std::int32_t>(columns.start + settings.num_valid),
          static_cast<std::int32_t>(held),
          static_cast<std::int32_t>(columns.end),
          half(0),
          half(32)};
}

void write_header(const at::Tensor& packed, const PassSettings& settings, std::int64_t held) {
  // As words, not as numbers: not every pattern survives as a float.
  const auto words = header_of(settings, held);
  const at::Tensor header = at::empty({kHeader}, at::kFloat);
  std::memcpy(header.data_ptr(), words.data(), sizeof(words));
  packed.narrow(0, 0, kHeader).copy_(header, /*non_blocking=*/true);
}

/// Refuses ranges that do not join, and labels that differ. `headers` (int64 [ranks, kHeader]) is
/// on the host, and the same on all ranks, so all of them raise the same.
void check_headers(const at::Tensor& headers, const PassSettings& settings) {
  const auto word = headers.accessor<std::int64_t, 2>();
  const std::int64_t last = headers.size(0) - 1;
  for (std::int64_t rank = 1; rank <= last; ++rank) {
    if (!settings.explicit_columns) {
      TESSERA_CHECK_VALUE(word[rank][2] == word[0][2], settings.operation, ": logits have ",
                          word[0][2], " columns on rank 0 and ", word[rank][2], " on rank ", rank,
                          ". Pad the vocabulary, or pass the column ranges.");
    }
    TESSERA_CHECK_VALUE(word[rank][0] == word[rank - 1][3], settings.operation,
                        ": the columns of rank ", rank, " begin at ", word[rank][0],
                        ", those of rank ", rank - 1, " end at ", word[rank - 1][3],
                        ". The ranges must follow each other in rank order.");
    TESSERA_CHECK_VALUE(word[rank][4] == word[0][4] && word[rank][5] == word[0][5],
                        settings.operation, ": the labels of rank ", rank,
                        " are not those of rank 0. All ranks that share a vocabulary need the "
                        "same labels.");
  }
  check_ends(word[0][0], word[last][3], settings);
}

/// Whether the settings allow to turn logits into their gradient while they are read: on one rank,
/// for a reduced loss and nothing else.
bool may_fuse(const PassSettings& settings, const comm::Group& group, const Fields& fields) {
  return settings.overwrite == Overwrite::kInForward && settings.needs_gradient &&
         group.size() == 1 && settings.tile == 0 && fields.count == 3;
}

/// Does that, if the device can, and writes the statistics behind the header of `packed`.
bool fused_statistics(const kernels::LogitRows& rows, const at::Tensor& labels,
                      const PassSettings& settings, const Fields& fields,
                      const at::Tensor& packed) {
  auto task = statistics_task(settings, labels, 0);
  task.rows = rows;
  task.out = arrays_of(packed.data_ptr<float>() + kHeader, fields, rows.num_rows, 0);
  return run_fused(packed.device(), task, settings.shape,
                   settings.want_loss && settings.reduction == Reduction::kMean);
}

/// Results are rows of one allocation.
struct ResultRows {
  at::Tensor storage;
  std::int64_t next = 0;
  at::Tensor take() { return storage[next++]; }
};

PassResult allocate_results(const PassSettings& settings, std::int64_t num_rows,
                            const at::TensorOptions& options) {
  PassResult result;
  ResultRows rows{at::empty({7, num_rows}, options)};
  result.maximum = rows.take();
  result.sum = rows.take();
  if (settings.wanted.entropy) result.weighted = rows.take();
  if (settings.want_loss && settings.reduction == Reduction::kNone) result.loss = rows.take();
  if (settings.wanted.log_probability) result.scores.log_probability = rows.take();
  if (settings.wanted.log_sum_exp) result.scores.log_sum_exp = rows.take();
  if (settings.wanted.entropy) result.scores.entropy = rows.take();
  if (settings.wanted.argmax) {
    result.scores.argmax = at::empty({num_rows}, options.dtype(at::kLong));
  }
  if (settings.want_loss && settings.reduction != Reduction::kNone) {
    const at::Tensor pair = at::empty({2}, options);
    result.loss = pair[0];
    result.inverse = pair[1];
  }
  result.vocab = at::empty({1}, options.dtype(at::kLong));
  return result;
}

/// The statistics of `num_parts` parts per rank, from `gathered`, and nothing of what is wanted.
kernels::MergeTask merge_task(const at::Tensor& gathered, std::int64_t num_ranks,
                              std::int64_t num_parts, std::int64_t num_rows, const Fields& fields,
                              const PassSettings& settings) {
  kernels::MergeTask merge;
  merge.gathered = gathered.const_data_ptr<float>();
  merge.num_ranks = num_ranks;
  merge.num_parts = num_parts;
  merge.num_fields = fields.count;
  merge.num_rows = num_rows;
  merge.target_field = fields.target;
  merge.total_field = fields.total;
  merge.weighted_field = fields.weighted;
  merge.best_field = fields.best;
  merge.shape = settings.shape;
  merge.vocab_size = settings.vocab_size;
  return merge;
}

/// Makes one part, the first, of the first `num_parts` behind the header of `packed`.
void fold(const at::Tensor& packed, std::int64_t num_parts, std::int64_t num_rows,
          const Fields& fields, const PassSettings& settings) {
  if (num_parts == 1) return;
  run_fold(packed.device(), merge_task(packed, 1, num_parts, num_rows, fields, settings),
           packed.data_ptr<float>() + kHeader);
}

template <typename T>
T* pointer_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<T>() : nullptr;
}

/// Exchanges the parts in `packed`, which all ranks have `num_parts` of, and fills `result`.
void exchange_and_merge(const at::Tensor& packed, std::int64_t num_parts, std::int64_t held,
                        std::int64_t num_rows, const Fields& fields, const at::Tensor& labels,
                        const comm::Group& group, const PassSettings& settings,
                        PassResult& result) {
  at::Tensor gathered = packed;
  if (group.size() > 1) {
    write_header(packed, settings, held);
    gathered = gather_rows(packed, group);
    if (packed.is_cpu() || settings.label_digest != 0) {
      check_headers(gathered.slice(1, 0, kHeader).contiguous().view(at::kInt).cpu().to(at::kLong),
                    settings);
    }
  }

  kernels::MergeTask merge =
      merge_task(gathered, group.size(), num_parts, num_rows, fields, settings);
  merge.labels = pointer_of<std::int64_t>(labels);
  merge.maximum = pointer_of<float>(result.maximum);
  merge.sum = pointer_of<float>(result.sum);
  merge.weighted = pointer_of<float>(result.weighted);
  merge.log_probability = pointer_of<float>(result.scores.log_probability);
  merge.log_sum_exp = pointer_of<float>(result.scores.log_sum_exp);
  merge.entropy = pointer_of<float>(result.scores.entropy);
  merge.best = pointer_of<std::int64_t>(result.scores.argmax);
  merge.vocab = pointer_of<std::int64_t>(result.vocab);
  if (settings.want_loss && settings.reduction == Reduction::kNone) {
    merge.loss = pointer_of<float>(result.loss);
  } else if (settings.want_loss) {
    merge.reduced = pointer_of<float>(result.loss);
    merge.inverse = pointer_of<float>(result.inverse);
    merge.divide_by_count = settings.reduction == Reduction::kMean;
  }
  run_merge(packed.device(), merge);
}

}  // namespace

std::int64_t vocab_of_ranks(const at::Tensor& logits, const comm::Group& group,
                            const PassSettings& settings) {
  if (group.size() == 1) return settings.vocab_size;
  const auto words = header_of(settings, logits.size(-1));
  const at::Tensor own =
      at::tensor(std::vector<std::int64_t>(words.begin(), words.end()), at::kLong);
  const at::Tensor headers = gather_rows(own.to(logits.device()), group).cpu();
  check_headers(headers, settings);
  return settings.vocab_size > 0 ? settings.vocab_size
                                 : headers.select(1, 1).max().item<std::int64_t>();
}

at::Tensor gather_rows(const at::Tensor& row, const comm::Group& group) {
  const at::Tensor one = row.unsqueeze(0);
  return group.size() == 1 ? one : comm::all_gather(one, group);
}

PassResult forward_pass(const at::Tensor& logits, const at::Tensor& labels,
                        const comm::Group& group, const PassSettings& settings) {
  const auto options = logits.options().dtype(at::kFloat).requires_grad(false);
  const std::int64_t num_rows = c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1));
  const Fields fields = fields_of(settings, labels.defined());
  const std::int64_t num_parts = num_parts_of(settings, group, options);
  PassResult result = allocate_results(settings, num_rows, options);

  const at::Tensor packed = at::empty({kHeader + num_parts * fields.count * num_rows}, options);
  kernels::LogitRows rows;
  // Padding needs zeros behind the row, and only the gradient kernel writes them.
  if (may_fuse(settings, group, fields) && settings.num_valid == logits.size(-1) &&
      as_rows(logits, rows)) {
    result.gradient_is_written = fused_statistics(rows, labels, settings, fields, packed);
  }
  if (!result.gradient_is_written) {
    local_statistics(logits, labels, settings, fields, num_rows, packed);
  }
  if (num_tiles_of(settings) < num_parts) {
    fill_missing_parts(packed, fields, num_rows, num_tiles_of(settings), num_parts);
  }
  exchange_and_merge(packed, num_parts, logits.size(-1), num_rows, fields, labels, group, settings,
                     result);
  return result;
}

PassResult forward_pass_in_parts(const PartsOfLogits& parts, const at::TensorOptions& logit_options,
                                 const at::Tensor& labels, const comm::Group& group,
                                 const PassSettings& settings) {
  const auto options = logit_options.dtype(at::kFloat).requires_grad(false);
  const Fields fields = fields_of(settings, labels.defined());
  PassResult result = allocate_results(settings, parts.num_rows, options);
  const std::int64_t part_size = fields.count * parts.num_rows;
  // With few columns a part, the statistics of all parts would weigh more than the workspace.
  constexpr std::int64_t kMostParts = 16;
  const at::Tensor packed =
      at::empty({kHeader + std::min(parts.num_parts, kMostParts) * part_size}, options);
  std::int64_t num_held = 0;
  for (std::int64_t first = 0; first == 0 || first < settings.num_valid; first += parts.columns) {
    if (num_held == kMostParts) {
      fold(packed, num_held, parts.num_rows, fields, settings);
      num_held = 1;
    }
    const std::int64_t last = std::min(first + parts.columns, settings.num_valid);
    const at::Tensor logits = parts.logits(first, last);
    auto task = statistics_task(settings, labels, 0);
    TESSERA_INTERNAL_ASSERT(as_rows(logits, task.rows), "a part of the logits is made of rows");
    if (parts.num_parts == 1 && may_fuse(settings, group, fields)) {
      result.gradient_is_written = fused_statistics(task.rows, labels, settings, fields, packed);
    }
    task.rows.num_columns = last - first;
    task.labels.first_column += first;
    task.out = arrays_of(packed.data_ptr<float>() + kHeader + num_held * part_size, fields,
                         parts.num_rows, 0);
    if (!result.gradient_is_written) run_statistics(logits.device(), task);
    ++num_held;
  }
  fold(packed, num_held, parts.num_rows, fields, settings);
  exchange_and_merge(packed.narrow(0, 0, kHeader + part_size), /*num_parts=*/1, parts.held,
                     parts.num_rows, fields, labels, group, settings, result);
  return result;
}

}  // namespace tessera::vocab_parallel::detail
