// tessera/vocab_parallel/token_scores.h — everything a row of sharded logits can tell, in one pass.
//
// Each rank holds some columns of the logits. One read of them gives a few numbers per token, one
// small all-gather makes them known, and every rank merges them in rank order: the results are the
// same bits on all ranks. The gradient is one more read and one write.
//
// Logits are float32, bfloat16 or float16, of any leading shape and any strides; the last dimension
// is the vocabulary. Arithmetic is float32 or better and rounded once.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/vocab_parallel/columns.h"

namespace tessera::vocab_parallel {

/// Who may be overwritten by the gradient of the logits. Logits that share memory (expanded ones)
/// cannot be.
enum class Overwrite : std::uint8_t {
  kNever,       // the gradient is a new tensor
  kInBackward,  // the logits become their gradient in backward; a second backward is refused
  kInForward,   // already in forward: fastest, and for reduced losses only
};

enum class Reduction : std::uint8_t { kNone, kMean, kSum };

struct TokenOptions {
  /// This rank's part of the vocabulary. Without it all ranks must hold equally many columns.
  std::optional<Columns> columns = std::nullopt;
  /// Columns from here on are padding: no probability, no gradient. Without it, the last end.
  std::optional<std::int64_t> vocab_size = std::nullopt;
  /// Labels with this value stand for no token: value 0, gradient 0.
  std::int64_t ignore_index = -100;
  /// Logits are divided by it first. Greater than 0.
  double temperature = 1.0;
  Overwrite overwrite = Overwrite::kNever;
  /// If not 0, log-probabilities have the same bits for every number of ranks whose ranges begin at
  /// multiples of it. One more pair of numbers is exchanged for every so many columns. On CUDA,
  /// rows and tiles must begin at multiples of 16 bytes.
  std::int64_t reproducible_tile = 0;
  /// Look for labels outside the vocabulary and name the first: before anything is communicated if
  /// vocab_size is given, else after the exchange, which tells how many ids there are. On CUDA this
  /// waits for the device, so the default there is not to look; such a token then gets NaN.
  std::optional<bool> check_labels = std::nullopt;
  /// Stands in front of error texts. Empty: the name of the function.
  std::string operation = {};
};

/// Which scores to compute; the others stay undefined.
struct WantedScores {
  bool log_probability = false;
  bool log_sum_exp = false;
  bool entropy = false;
  bool argmax = false;
};

/// Scores per token, shaped as the logits without their last dimension; float32, argmax int64.
struct TokenScores {
  at::Tensor log_probability;  // of the label
  at::Tensor log_sum_exp;
  at::Tensor entropy;  // +H, in nats; ids of probability 0 count 0
  at::Tensor argmax;   // the smallest of the best ids
};

/// Returns the wanted scores of every token.
///
/// `labels` (int64 or int32, the leading shape) are global ids and the same on all ranks; they may
/// be undefined unless log_probability is wanted. Collective: one all-gather of 8 to 24 bytes per
/// token and rank. Differentiable once with respect to `local_logits`; backward does not
/// communicate. Throws ValueError or TypeError for wrong shapes and types, IndexError naming the
/// position of a label outside the vocabulary. Labels are never written, logits only as
/// `options.overwrite` says.
TESSERA_API TokenScores token_scores(const at::Tensor& local_logits, const at::Tensor& labels,
                                     const comm::Group& group, const WantedScores& wanted,
                                     const TokenOptions& options = {});

}  // namespace tessera::vocab_parallel
