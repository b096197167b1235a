// cli/worker/time_budget.h — how often each of many things is measured, so that all end in time.

#pragma once

#include <algorithm>

namespace tessera::cli {

/// So often a thing is timed, and so many calls each time.
struct Repetitions {
  int times = 0;
  int calls = 0;
};

/// Shares out `seconds` over measurements of `count` things, whose `elapsed` seconds since the
/// beginning the caller knows. No clock is read here.
class TimeBudget {
 public:
  TimeBudget(double seconds, int count) : seconds_(seconds), left_(count) {}

  /// Whether the next thing may be begun: what took longest so far, beside its repetitions, would
  /// end in time. Counts it, in either case.
  bool begins(double elapsed) {
    if (begun_ >= 0) {
      const double fixed = elapsed - begun_ - repeated_;
      longest_ = std::max(longest_, fixed);
      all_ += fixed;
      ++num_begun_;
    }
    left_ = std::max(0, left_ - 1);
    repeated_ = 0;
    const bool fits = elapsed + longest_ < seconds_;
    begun_ = fits ? elapsed : -1;
    if (!fits) ++left_out_;
    return fits;
  }

  /// How the thing that was begun is timed if a call takes `single` seconds: five times, as many
  /// calls each as take a fifth of `wanted`; less where its even share of what is left, beside
  /// what the others need at least, is less. {0, 0}: not at all beside the call that is known.
  Repetitions repetitions(double elapsed, double single, double wanted) {
    constexpr int kTimes = 5;
    constexpr double kMostCalls = 2000;
    single = std::max(single, 1e-7);
    const double needed = num_begun_ > 0 ? left_ * all_ / num_begun_ : 0;
    const double share = std::max(0.0, seconds_ - elapsed - needed) / (left_ + 1);
    Repetitions often{kTimes, 1};
    if (share < kTimes * single) {
      often = {static_cast<int>(share / single), 1};
      if (often.times == 0) often.calls = 0;
    } else {
      const double calls = std::min(wanted, share) / kTimes / single;
      often.calls = static_cast<int>(std::clamp(calls, 1.0, kMostCalls));
    }
    repeated_ += often.times * often.calls * single;
    return often;
  }

  /// Things that were not begun.
  int left_out() const { return left_out_; }

 private:
  double seconds_;
  int left_;
  int left_out_ = 0;
  double begun_ = -1;    // when the last thing was
  double repeated_ = 0;  // seconds of its repetitions
  double longest_ = 0;   // that a thing took beside them
  double all_ = 0;       // that all of them took
  int num_begun_ = 0;
};

}  // namespace tessera::cli
