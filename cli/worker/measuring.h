// cli/worker/measuring.h — times what all ranks do at once, and ends in time.

#pragma once

#include <algorithm>
#include <chrono>
#include <functional>

#include <ATen/ATen.h>

#include "tessera/comm/collectives.h"
#include "time_budget.h"

namespace tessera::cli {

/// Everything is collective over the group: a time is the slowest rank's, and all ranks decide
/// alike.
class Measuring {
 public:
  using Clock = std::chrono::steady_clock;

  /// `count` things until `end`, each for `seconds_each` where there is time.
  Measuring(const comm::Group& group, double seconds_each, Clock::time_point end, int count)
      : group_(group), seconds_each_(seconds_each), budget_(seconds_until(end), count) {}

  /// Whether there is time for the next thing. To be asked once for each.
  bool begins() { return budget_.begins(agreed(0).elapsed); }

  /// How often what takes `single` seconds is timed.
  Repetitions repetitions(double single) {
    const Agreed all = agreed(single);
    return budget_.repetitions(all.elapsed, all.single, seconds_each_);
  }

  /// Seconds of one call: the median.
  double operator()(const std::function<void()>& work) {
    work();
    at::Tensor known = at::full({1}, timed(work, 1), at::kDouble);
    const Repetitions often = repetitions(known.item<double>());
    at::Tensor times = often.times > 0 ? at::empty({often.times}, at::kDouble) : known;
    for (int i = 0; i < often.times; ++i) {
      comm::barrier(group_);
      times[i] = timed(work, often.calls);
    }
    comm::all_reduce_(times, group_, comm::Reduction::kMax);
    const double median = times.median().item<double>();
    spread_ = std::max(spread_, (times.max().item<double>() - times.min().item<double>()) / median);
    return median;
  }

  double spread() const { return spread_; }
  int left_out() const { return budget_.left_out(); }

 private:
  // Of the rank that began last: the same on all.
  double seconds_until(Clock::time_point end) const {
    at::Tensor left =
        at::full({1}, std::chrono::duration<double>(end - begin_).count(), at::kDouble);
    comm::all_reduce_(left, group_, comm::Reduction::kMin);
    return left.item<double>();
  }

  struct Agreed {
    double single;
    double elapsed;
  };

  Agreed agreed(double single) const {
    at::Tensor both = at::empty({2}, at::kDouble);
    both[0] = single;
    both[1] = std::chrono::duration<double>(Clock::now() - begin_).count();
    comm::all_reduce_(both, group_, comm::Reduction::kMax);
    return {both[0].item<double>(), both[1].item<double>()};
  }

  static double timed(const std::function<void()>& work, int calls) {
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) work();
    return std::chrono::duration<double>(Clock::now() - begin).count() / calls;
  }

  comm::Group group_;
  double seconds_each_;
  Clock::time_point begin_ = Clock::now();
  TimeBudget budget_;
  double spread_ = 0;
};

}  // namespace tessera::cli
