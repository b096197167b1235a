#include <algorithm>
#include <cstdint>
#include <limits>

#include <ATen/Functions.h>

#include "tessera/core/check.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel::detail {
namespace {

void check_logits(const std::string& operation, const at::Tensor& logits) {
  TESSERA_CHECK_VALUE(logits.defined(), operation, ": the logits are undefined.");
  TESSERA_CHECK_VALUE(logits.dim() >= 1, operation,
                      ": the logits have no dimension. The last one is the vocabulary.");
  const auto type = logits.scalar_type();
  TESSERA_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, operation,
                     ": logits of type ", type,
                     " are not supported. Use float32, bfloat16 or float16.");
}

/// CUDA kernels cut rows at 16-byte boundaries: equal bits need equal cuts.
void check_alignment(const std::string& operation, const at::Tensor& logits, std::int64_t tile) {
  const auto bytes = static_cast<std::int64_t>(logits.element_size());
  bool is_aligned =
      tile * bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(logits.const_data_ptr()) % 16 == 0;
  for (std::int64_t d = 0; d + 1 < logits.dim(); ++d) {
    is_aligned = is_aligned && (logits.size(d) == 1 || logits.stride(d) * bytes % 16 == 0);
  }
  TESSERA_CHECK_VALUE(
      is_aligned, operation, ": with a tile of ", tile,
      " columns, rows and tiles of CUDA logits must begin at multiples of 16 bytes.");
}

void check_labels(const std::string& operation, const at::Tensor& logits,
                  const at::Tensor& labels) {
  if (!labels.defined()) return;
  TESSERA_CHECK_TYPE(labels.scalar_type() == at::kLong || labels.scalar_type() == at::kInt,
                     operation, ": labels of type ", labels.scalar_type(),
                     " are not ids. Use int64 or int32.");
  const auto leading = logits.sizes().slice(0, logits.dim() - 1);
  TESSERA_CHECK_VALUE(labels.sizes() == leading, operation, ": the labels have shape ",
                      labels.sizes(), ", the logits ", logits.sizes(), ". The labels need ",
                      leading, ".");
  TESSERA_CHECK_VALUE(labels.device() == logits.device(), operation, ": the labels are on ",
                      labels.device().str(), ", the logits on ", logits.device().str(), ".");
}

/// "[1, 4]": where the flat `index` lies in a tensor of `shape`.
std::string position_text(std::int64_t index, at::IntArrayRef shape) {
  std::string text;
  for (std::int64_t d = static_cast<std::int64_t>(shape.size()) - 1; d >= 0; --d) {
    text = std::to_string(index % shape[d]) + (text.empty() ? "" : ", ") + text;
    index /= shape[d];
  }
  return "[" + text + "]";
}

/// Throws IndexError naming the first label outside the vocabulary. Waits for the device.
void check_label_range(const at::Tensor& labels, std::int64_t vocab, const PassSettings& settings,
                       const char* noun) {
  const at::Tensor on_host = flat_labels(labels).cpu();
  const auto* ids = on_host.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < on_host.numel(); ++i) {
    if (ids[i] == settings.shape.ignored) continue;
    TESSERA_CHECK_INDEX(ids[i] >= 0 && ids[i] < vocab, settings.operation, ": ", noun, " ", ids[i],
                        " at position ", position_text(i, labels.sizes()),
                        " is outside the vocabulary of ", vocab, " ids. Use ",
                        settings.shape.ignored, " where there is no ", noun, ".");
  }
}

}  // namespace

PassSettings settings_of(const at::Tensor& logits, const at::Tensor& labels,
                         const comm::Group& group, const TokenOptions& options,
                         const char* function) {
  const std::string operation = operation_of(options, function);
  check_logits(operation, logits);
  check_labels(operation, logits, labels);
  TESSERA_CHECK_VALUE(options.temperature > 0.0, operation, ": a temperature of ",
                      options.temperature, " is not possible. It must be greater than 0.");
  TESSERA_CHECK_VALUE(options.reproducible_tile >= 0, operation, ": a tile of ",
                      options.reproducible_tile, " columns is not possible.");
  const std::int64_t held = logits.size(-1);
  PassSettings settings;
  settings.operation = operation;
  settings.explicit_columns = options.columns.has_value();
  settings.columns = options.columns.value_or(
      Columns{group.rank() * held, (group.rank() + std::int64_t{1}) * held});
  const Columns& columns = settings.columns;
  TESSERA_CHECK_VALUE(columns.start >= 0 && columns.size() >= 0 && columns.size() <= held,
                      operation, ": the column range [", columns.start, ", ", columns.end,
                      ") does not fit logits with ", held, " columns.");
  TESSERA_CHECK_VALUE(columns.end <= std::numeric_limits<std::int32_t>::max(), operation,
                      ": vocabulary ids up to ", columns.end, " do not fit 31 bits.");
  settings.num_valid = columns.size();
  if (options.vocab_size) {
    TESSERA_CHECK_VALUE(*options.vocab_size > 0, operation, ": a vocabulary of ",
                        *options.vocab_size, " ids is not possible.");
    settings.vocab_size = *options.vocab_size;
    settings.num_valid =
        std::clamp<std::int64_t>(settings.vocab_size - columns.start, 0, columns.size());
  } else if (group.size() == 1) {
    settings.vocab_size = columns.end;
  }
  if (options.reproducible_tile > 0) {
    TESSERA_CHECK_VALUE(columns.start % options.reproducible_tile == 0, operation,
                        ": the columns of rank ", group.rank(), " begin at ", columns.start,
                        ", which is not a multiple of the tile of ", options.reproducible_tile,
                        ". Choose a tile that divides every rank's first column.");
    if (logits.is_cuda()) check_alignment(operation, logits, options.reproducible_tile);
    settings.tile = options.reproducible_tile;
  }
  settings.shape.scale = 1.0 / options.temperature;
  settings.shape.ignored = options.ignore_index;
  settings.overwrite = options.overwrite;
  settings.has_labels = labels.defined();
  settings.check_labels = options.check_labels.value_or(!logits.is_cuda());
  if (group.size() == 1) check_ends(columns.start, columns.end, settings);
  return settings;
}

void check_ends(std::int64_t start, std::int64_t end, const PassSettings& settings) {
  TESSERA_CHECK_VALUE(start == 0, settings.operation, ": the columns of rank 0 begin at ", start,
                      ". The first id of a vocabulary is 0.");
  TESSERA_CHECK_VALUE(settings.vocab_size <= end, settings.operation, ": a vocabulary of ",
                      settings.vocab_size, " ids does not fit ranks that hold ", end, ".");
}

void set_loss(PassSettings& settings, const CrossEntropyOptions& options) {
  TESSERA_CHECK_VALUE(options.label_smoothing >= 0.0 && options.label_smoothing <= 1.0,
                      settings.operation, ": a label smoothing of ", options.label_smoothing,
                      " is not possible. It lies between 0 and 1.");
  settings.want_loss = true;
  settings.reduction = options.reduction;
  settings.shape.label_smoothing = options.label_smoothing;
  settings.shape.z_loss = options.z_loss;
}

at::Tensor flat_labels(const at::Tensor& labels) {
  if (!labels.defined()) return labels;
  return labels.to(at::kLong).reshape(-1).contiguous();
}

std::uint64_t digest_of(const at::Tensor& labels, const comm::Group& group,
                        const PassSettings& settings) {
  if (!labels.defined() || !settings.check_labels || group.size() == 1) return 0;
  const at::Tensor on_host = flat_labels(labels).cpu();
  const auto* ids = on_host.const_data_ptr<std::int64_t>();
  std::uint64_t digest = 0;
  for (std::int64_t i = 0; i < on_host.numel(); ++i) {
    digest = (digest ^ static_cast<std::uint64_t>(ids[i])) * 0x9E3779B97F4A7C15U;
    digest ^= digest >> 32;
  }
  return digest | 1U;
}

void check_labels_before(const at::Tensor& labels, const PassSettings& settings, const char* noun) {
  if (labels.defined() && settings.check_labels && settings.vocab_size > 0) {
    check_label_range(labels, settings.vocab_size, settings, noun);
  }
}

void check_labels_after(const at::Tensor& labels, const at::Tensor& vocab,
                        const PassSettings& settings, const char* noun) {
  if (labels.defined() && settings.check_labels && settings.vocab_size == 0) {
    check_label_range(labels, vocab.item<std::int64_t>(), settings, noun);
  }
}

void check_labels_without_pass(const at::Tensor& labels, const at::Tensor& logits,
                               const comm::Group& group, const PassSettings& settings,
                               const char* noun) {
  if (!settings.check_labels) return;
  check_labels_before(labels, settings, noun);
  PassSettings compared = settings;
  compared.label_digest = digest_of(labels, group, settings);
  const std::int64_t vocab = vocab_of_ranks(logits, group, compared);
  if (settings.vocab_size == 0) check_label_range(labels, vocab, settings, noun);
}

}  // namespace tessera::vocab_parallel::detail
