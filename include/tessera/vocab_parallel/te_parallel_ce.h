// tessera/vocab_parallel/te_parallel_ce.h — the names of the reference page loss.te_parallel_ce.
//
// Thin forms of cross_entropy.h for code that knows the reference. docs/deviations.md lists where
// the numbers differ because the reference's are wrong.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/vocab_parallel/columns.h"

namespace tessera::vocab_parallel {

/// The engine is part of the library, so it is always there and nothing is missing.
// NOLINTBEGIN(readability-identifier-naming): names of the reference
inline constexpr bool HAVE_TE_PARALLEL_CE = true;
inline constexpr const char* MISSING_TE_PARALLEL_CE_MSG = "";
// NOLINTEND(readability-identifier-naming)

/// Returns the loss of every token, shaped as `target`, or with `reduce_loss` their mean over the
/// tokens that are not ignored.
///
/// `input` is this rank's share of the vocabulary, [..., columns]: the ids `columns`, or an equal
/// share; no group means that it is the whole. Collective over the group. Differentiable; neither
/// tensor is written.
TESSERA_API at::Tensor parallel_cross_entropy(
    const at::Tensor& input, const at::Tensor& target, double label_smoothing = 0.0,
    bool reduce_loss = false, const std::optional<comm::Group>& dist_process_group = std::nullopt,
    std::int64_t ignore_idx = -100, const std::optional<Columns>& columns = std::nullopt);

/// The reference's autograd function; `apply` is parallel_cross_entropy.
struct TESSERA_API CrossEntropyFunction {
  static at::Tensor apply(const at::Tensor& input, const at::Tensor& target,
                          double label_smoothing = 0.0, bool reduce_loss = false,
                          const std::optional<comm::Group>& dist_process_group = std::nullopt,
                          std::int64_t ignore_idx = -100);
};

/// Cross entropy over a group of ranks that share the vocabulary, evenly unless `columns` are
/// given.
class TESSERA_API TEParallelCrossEntropy {
 public:
  /// `reduction` is "none", "mean" or "sum"; anything else throws ValueError when called, before
  /// anything is computed.
  explicit TEParallelCrossEntropy(std::int64_t ignore_index = -100, std::string reduction = "sum",
                                  std::optional<comm::Group> tp_group = std::nullopt);

  /// Tokens where `mask` is 0 are ignored; the caller's labels stay as they are. With
  /// `num_label_tokens`, a sum is divided by it (by 1 if it is 0).
  at::Tensor operator()(const at::Tensor& logits, const at::Tensor& labels,
                        const at::Tensor& mask = {},
                        std::optional<std::int64_t> num_label_tokens = std::nullopt,
                        const std::optional<Columns>& columns = std::nullopt) const;

  std::int64_t ignore_index;
  std::string reduction;
  std::optional<comm::Group> tp_group;
};

}  // namespace tessera::vocab_parallel
