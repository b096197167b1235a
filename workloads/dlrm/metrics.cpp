#include "dlrm/metrics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera::workloads::dlrm {
namespace {

constexpr double kFixedPoint = 0x1p32;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void check_sizes(std::size_t predictions, std::size_t labels, const char* operation) {
  if (predictions == labels) return;
  throw std::invalid_argument(std::string(operation) + ": " + std::to_string(predictions) +
                              " predictions and " + std::to_string(labels) + " labels were given.");
}

// The bits of a float as an integer that orders alike; -0 and 0 are one score.
std::uint32_t key_of(float score) {
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

}  // namespace

void ClickSums::add(std::span<const float> logits, std::span<const float> labels) {
  check_sizes(logits.size(), labels.size(), "click sums");
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double x = logits[i];
    const bool is_click = labels[i] > 0.5F;
    // exp of something below 0 cannot overflow.
    const double small = std::exp(-std::abs(x));
    const double loss = std::max(is_click ? -x : x, 0.0) + std::log1p(small);
    const double chance = (x >= 0 ? 1 : small) / (1 + small);
    if (std::isnan(loss)) throw std::invalid_argument("click sums: a logit is not a number.");
    words_[0] += 1;
    words_[1] += is_click ? 1 : 0;
    words_[2] += std::llround(std::min(loss, 100.0) * kFixedPoint);
    words_[3] += std::llround(chance * kFixedPoint);
  }
}

void ClickSums::merge(const ClickSums& other) {
  for (std::size_t i = 0; i < words_.size(); ++i) words_[i] += other.words_[i];
}

double ClickSums::log_loss() const {
  if (words_[0] == 0) return kNaN;
  return static_cast<double>(words_[2]) / kFixedPoint / static_cast<double>(words_[0]);
}

double ClickSums::normalised_entropy() const {
  if (words_[1] == 0 || words_[1] == words_[0]) return kNaN;
  const double rate = static_cast<double>(words_[1]) / static_cast<double>(words_[0]);
  return log_loss() / -(rate * std::log(rate) + (1 - rate) * std::log1p(-rate));
}

double ClickSums::calibration() const {
  if (words_[1] == 0) return kNaN;
  return static_cast<double>(words_[3]) / kFixedPoint / static_cast<double>(words_[1]);
}

double exact_auc(std::span<const float> scores, std::span<const float> labels) {
  check_sizes(scores.size(), labels.size(), "auc");
  // Score above, label in the lowest bit: one sort of plain integers.
  std::vector<std::uint64_t> keys(scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (std::isnan(scores[i])) throw std::invalid_argument("auc: a score is not a number.");
    keys[i] = std::uint64_t{key_of(scores[i])} << 1 | (labels[i] > 0.5F ? 1 : 0);
  }
  std::ranges::sort(keys);
  std::uint64_t others = 0;
  std::uint64_t clicks = 0;
  std::uint64_t twice_ordered = 0;  // at most 2 * 2^31 * 2^31
  for (std::size_t begin = 0; begin < keys.size();) {
    std::size_t end = begin;
    std::uint64_t tied_clicks = 0;
    for (; end < keys.size() && keys[end] >> 1 == keys[begin] >> 1; ++end) {
      tied_clicks += keys[end] & 1;
    }
    const std::uint64_t tied_others = end - begin - tied_clicks;
    twice_ordered += tied_clicks * (2 * others + tied_others);
    others += tied_others;
    clicks += tied_clicks;
    begin = end;
  }
  if (others == 0 || clicks == 0) return kNaN;
  return static_cast<double>(twice_ordered) / 2 / static_cast<double>(clicks) /
         static_cast<double>(others);
}

std::vector<CalibrationPart> calibration_parts(std::span<const float> logits,
                                               std::span<const float> labels,
                                               std::size_t num_parts) {
  check_sizes(logits.size(), labels.size(), "calibration");
  std::vector<std::size_t> order(logits.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, {}, [&](std::size_t i) { return std::pair(key_of(logits[i]), i); });
  num_parts = std::min(num_parts, order.size());
  std::vector<CalibrationPart> parts(num_parts);
  for (std::size_t p = 0; p < num_parts; ++p) {
    const std::size_t begin = p * order.size() / num_parts;
    const std::size_t end = (p + 1) * order.size() / num_parts;
    for (std::size_t i = begin; i < end; ++i) {
      parts[p].predicted += 1 / (1 + std::exp(-static_cast<double>(logits[order[i]])));
      parts[p].observed += labels[order[i]] > 0.5F ? 1 : 0;
    }
    parts[p].num_samples = static_cast<std::int64_t>(end - begin);
    parts[p].predicted /= static_cast<double>(end - begin);
    parts[p].observed /= static_cast<double>(end - begin);
  }
  return parts;
}

void StreamingAuc::add(std::span<const float> logits, std::span<const float> labels) {
  check_sizes(logits.size(), labels.size(), "streaming auc");
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) {
      throw std::invalid_argument("streaming auc: a logit is not a number.");
    }
    const float place = std::clamp((logits[i] + 16) * 128, 0.0F, static_cast<float>(kBins - 1));
    const auto bin = static_cast<std::size_t>(place);
    words_[bin + (labels[i] > 0.5F ? kBins : 0)] += 1;
  }
}

void StreamingAuc::merge(const StreamingAuc& other) {
  for (std::size_t i = 0; i < words_.size(); ++i) words_[i] += other.words_[i];
}

void StreamingAuc::clear() { std::ranges::fill(words_, 0); }

double StreamingAuc::value() const {
  double others = 0;
  double clicks = 0;
  double ordered = 0;
  for (std::size_t i = 0; i < kBins; ++i) {
    const auto tied_others = static_cast<double>(words_[i]);
    const auto tied_clicks = static_cast<double>(words_[i + kBins]);
    ordered += tied_clicks * (others + tied_others / 2);
    others += tied_others;
    clicks += tied_clicks;
  }
  return others > 0 && clicks > 0 ? ordered / clicks / others : kNaN;
}

double StreamingAuc::error() const {
  double others = 0;
  double clicks = 0;
  double tied = 0;
  for (std::size_t i = 0; i < kBins; ++i) {
    const auto tied_others = static_cast<double>(words_[i]);
    const auto tied_clicks = static_cast<double>(words_[i + kBins]);
    tied += tied_others * tied_clicks;
    others += tied_others;
    clicks += tied_clicks;
  }
  return others > 0 && clicks > 0 ? tied / 2 / clicks / others : kNaN;
}

}  // namespace tessera::workloads::dlrm
