// dlrm/synthetic.h — a click log with planted structure, whose best possible AUC is known. No
// LibTorch.
//
// Ids are Zipf-distributed: popularity rank k (from 0) has probability proportional to the integral
// of x^-exponent over [k+1, k+2]; ranks are scattered over the rows. Every id has a hidden effect
// and hidden factors. The chance of a click is
//   p = sigmoid(bias + dense part + sum of effects + products of factors of different features),
// and the label is drawn with it. Dense numbers are log(1 + count), counts from 0 to 1022. Sample n
// is a function of (options, n) alone.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dlrm/click_log.h"

namespace tessera::workloads::dlrm {

struct SyntheticOptions {
  std::uint64_t seed = 1;
  ClickSchema schema = {13, equal_features(26, 100000)};
  /// How steep the popularity is; 0 is uniform.
  double zipf_exponent = 1.05;
  /// Bags of features whose size varies hold 0 to this many ids, all sizes equally likely.
  std::int64_t largest_bag = 10;
  /// Standard deviations of the three parts of the logit. Together they set the ceiling.
  double dense_scale = 0.6;
  double effect_scale = 1.2;
  double factor_scale = 0.8;
  double bias = -1.0;
  /// Samples in the log; -1 for a log without end.
  std::int64_t num_samples = -1;
};

/// What the best possible model reaches: one that knows every sample's true chance.
struct Ceiling {
  double auc = 0;
  double log_loss = 0;
  double normalised_entropy = 0;
  double click_rate = 0;
  std::int64_t num_samples = 0;
};

class SyntheticLog : public ClickLog {
 public:
  /// Throws DataError for options that make no sense (no rows, scales below 0, …).
  explicit SyntheticLog(const SyntheticOptions& options);
  ~SyntheticLog() override;

  const ClickSchema& schema() const noexcept override;
  std::int64_t num_samples() const noexcept override;
  void read(std::int64_t first, std::int64_t count, SampleBlock& block) const override;

  /// The integers that the dense numbers of a sample are log(1 + x) of, for a Criteo file.
  void counts(std::int64_t sample, std::span<std::int32_t> counts) const;

  /// The true chance of a click for the samples [first, first + chances.size()).
  void chances(std::int64_t first, std::span<float> chances) const;

  /// Expected values over the labels, given the true chances of the samples [first, first + count).
  Ceiling ceiling(std::int64_t count, std::int64_t first = 0) const;

 private:
  struct Plan;
  std::unique_ptr<const Plan> plan_;
};

}  // namespace tessera::workloads::dlrm
