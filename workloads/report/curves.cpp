#include "report/curves.h"

#include <algorithm>
#include <cmath>

namespace tessera::workloads::report {
namespace {

constexpr std::size_t kStretches = 400;

struct Sum {
  double value = 0;
  double weight = 0;
};

// Of the values up to each one, in the order of `at`.
template <class Next>
std::vector<Sum> sums(const std::vector<double>& values, double keep, Next at) {
  std::vector<Sum> result(values.size());
  Sum sum;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = values[at(i)];
    const bool counts = std::isfinite(value);
    sum = {keep * sum.value + (counts ? value : 0), keep * sum.weight + (counts ? 1 : 0)};
    result[at(i)] = sum;
  }
  return result;
}

}  // namespace

std::vector<double> smooth(const std::vector<double>& values, double reach) {
  const double keep = std::exp(-1 / std::max(reach, 1e-9));
  const std::size_t count = values.size();
  const auto before = sums(values, keep, [](std::size_t i) { return i; });
  const auto after = sums(values, keep, [count](std::size_t i) { return count - 1 - i; });
  std::vector<double> result(values);
  for (std::size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) continue;
    // The value itself is in both.
    result[i] =
        (before[i].value + after[i].value - values[i]) / (before[i].weight + after[i].weight - 1);
  }
  return result;
}

std::vector<std::size_t> shown_steps(const std::vector<StepRow>& steps) {
  std::vector<std::size_t> shown;
  if (steps.size() <= 4 * kStretches) {
    for (std::size_t i = 0; i < steps.size(); ++i) shown.push_back(i);
    return shown;
  }
  shown = {0, steps.size() - 1};
  for (std::size_t i = 0; i < kStretches; ++i) {
    const auto first = steps.begin() + static_cast<long>(i * steps.size() / kStretches);
    const auto last = steps.begin() + static_cast<long>((i + 1) * steps.size() / kStretches);
    for (const auto value : {&StepRow::loss, &StepRow::seconds}) {
      const auto [low, high] = std::minmax_element(
          first, last, [&](const StepRow& a, const StepRow& b) { return a.*value < b.*value; });
      shown.push_back(static_cast<std::size_t>(low - steps.begin()));
      shown.push_back(static_cast<std::size_t>(high - steps.begin()));
    }
  }
  std::sort(shown.begin(), shown.end());
  shown.erase(std::unique(shown.begin(), shown.end()), shown.end());
  return shown;
}

double median(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return kMissing;
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace tessera::workloads::report
