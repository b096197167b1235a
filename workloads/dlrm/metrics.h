// dlrm/metrics.h — how good predictions of clicks are. No LibTorch.
//
// What is summed over batches is kept in integers (fixed point, 2^-32), so that sums over any split
// of the samples into batches and ranks are equal to the last bit.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera::workloads::dlrm {

/// Sums over samples: log loss, calibration, normalised entropy. Adding `words()` of several ranks
/// (an all-reduce of int64) is the same as having seen all their samples.
class ClickSums {
 public:
  /// Adds predictions given as logits; labels are 0 or 1. The loss of a sample is that of
  /// binary_cross_entropy_with_logits in double, cut off at 100.
  void add(std::span<const float> logits, std::span<const float> labels);
  void merge(const ClickSums& other);

  std::span<std::int64_t> words() noexcept { return words_; }
  std::span<const std::int64_t> words() const noexcept { return words_; }

  std::int64_t num_samples() const noexcept { return words_[0]; }
  std::int64_t num_clicks() const noexcept { return words_[1]; }
  /// Mean loss; NaN without samples.
  double log_loss() const;
  /// Log loss over the entropy of the click rate: 1 for a model that knows the rate alone, below 1
  /// for a better one. NaN if all labels are alike.
  double normalised_entropy() const;
  /// Mean prediction over the click rate. NaN without clicks.
  double calibration() const;

 private:
  std::array<std::int64_t, 4> words_{};  // samples, clicks, loss, predictions
};

/// Returns the chance that a click is scored above a non-click, ties counting half. Exact for up to
/// 2^31 clicks and as many non-clicks. Any increasing function of the logits gives the same. NaN if
/// all labels are alike. For several ranks: over all their scores together, in any order.
double exact_auc(std::span<const float> scores, std::span<const float> labels);

/// Predictions and clicks of one part of the samples.
struct CalibrationPart {
  double predicted = 0;  // mean chance
  double observed = 0;   // share of clicks
  std::int64_t num_samples = 0;
};

/// Sorts the samples by prediction and cuts them into `num_parts` of nearly as many samples: where
/// a model is sure of itself too much or too little. Equal predictions may fall into two parts.
/// Fewer parts than asked if there are fewer samples. `logits` as for ClickSums.
std::vector<CalibrationPart> calibration_parts(std::span<const float> logits,
                                               std::span<const float> labels,
                                               std::size_t num_parts);

/// AUC while training: logits in bins of 1/128 in [-16, 16], what lies outside in the outermost.
/// Pairs in one bin count half, so the value is off by at most `error()`, which is known exactly
/// from the counts (about 1e-3 or less for a spread of logits near 1).
class StreamingAuc {
 public:
  static constexpr std::int64_t kBins = 4096;
  StreamingAuc() : words_(2 * kBins) {}

  void add(std::span<const float> logits, std::span<const float> labels);
  void merge(const StreamingAuc& other);
  void clear();

  /// Counts per bin, of non-clicks and then of clicks; summing them over ranks merges.
  std::span<std::int64_t> words() noexcept { return words_; }
  std::span<const std::int64_t> words() const noexcept { return words_; }

  /// NaN if all labels are alike.
  double value() const;
  double error() const;

 private:
  std::vector<std::int64_t> words_;
};

}  // namespace tessera::workloads::dlrm
