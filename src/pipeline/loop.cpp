#include "tessera/pipeline/loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tessera/core/check.h"
#include "tessera/core/step_recorder.h"

namespace tessera::pipeline {
namespace {

/// Adds the time until the end of the scope.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Timed() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point begin_;
};

}  // namespace

Flight::~Flight() = default;
Stages::~Stages() = default;

/// For the time of a call that runs stages: they must not change the batches under it.
class Loop::Running {
 public:
  explicit Running(Loop& loop) : loop_(loop) {
    check(loop);
    loop_.is_running_ = true;
  }
  ~Running() { loop_.is_running_ = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  static void check(const Loop& loop) {
    TORCH_CHECK(!loop.is_running_, "pipeline: it was called from within one of its own steps.");
  }

 private:
  Loop& loop_;
};

Loop::Loop(const LoopOptions& options) : options_(options) {}

std::unique_ptr<Flight> Loop::progress(Stages& stages) {
  TORCH_CHECK(!has_failed_,
              "pipeline: an earlier step threw an exception, so the batches in flight are in an "
              "unknown state. Make a new pipeline.");
  const Running running(*this);
  has_failed_ = true;
  std::unique_ptr<Flight> done = advance(stages);
  has_failed_ = false;
  return done;
}

void Loop::fill(Stages& stages) {
  const Running running(*this);
  StepReport nobody_reads;
  has_failed_ = true;
  fill(stages, nobody_reads);
  has_failed_ = false;
}

bool Loop::read_until(Stages& stages, std::size_t num_batches) {
  const Running running(*this);
  StepReport nobody_reads;
  while (slots_.size() < num_batches && !has_ended_) load(stages, nobody_reads);
  return slots_.size() >= num_batches;
}

void Loop::reset() {
  Running::check(*this);
  slots_.clear();
  has_ended_ = false;
  has_failed_ = false;
}

std::unique_ptr<Flight> Loop::advance(Stages& stages) {
  StepReport report;
  std::unique_ptr<Flight> done;
  {
    const Timed total(report.total);
    fill(stages, report);
    while (slots_.size() < options_.needed && !has_ended_) load(stages, report);
    if (slots_.size() < std::max<std::size_t>(options_.needed, 1)) {
      slots_.clear();
      has_ended_ = false;  // the next call begins anew
      return nullptr;
    }
    run(stages, report);
    report.feature_bytes = slots_.front().num_bytes;
    done = std::move(slots_.front().batch);
    slots_.pop_front();
  }
  report_ = report;
  return done;
}

void Loop::fill(Stages& stages, StepReport& report) {
  while (slots_.size() < options_.lead + 1 && !has_ended_) load(stages, report);
  for (std::size_t i = 0; i < std::min(options_.lead, slots_.size()); ++i) {
    if (slots_[i].is_started) continue;
    start(stages, slots_[i], report);
    wait_sizes(stages, slots_[i], report);
  }
}

void Loop::run(Stages& stages, StepReport& report) {
  if (stages.trains()) {
    const Timed timed(report.zero_grad);
    stages.zero_grad();
  }
  if (!slots_[0].is_started) start(stages, slots_[0], report);
  wait_ids(stages, slots_[0], report);
  const bool starts_later = options_.lead > 0 && slots_.size() > options_.lead;
  if (starts_later) start(stages, slots_[options_.lead], report);
  if (!options_.reads_late && slots_.size() < options_.lead + 2) load(stages, report);
  {
    const Timed timed(report.forward);
    stages.forward(*slots_[0].batch);
  }
  const bool sends_next = options_.lead > 1 && slots_.size() > 1;
  const bool is_ahead = num_trained_ >= options_.ahead_from;
  if (sends_next && is_ahead) wait_ids(stages, slots_[1], report);
  if (starts_later) wait_sizes(stages, slots_[options_.lead], report);
  if (stages.trains()) {
    {
      const Timed timed(report.backward);
      const core::Span span(core::Phase::kBackward);
      stages.backward(*slots_[0].batch);
    }
    ++num_trained_;
    const Timed timed(report.step);
    stages.step();
  }
  if (sends_next && !is_ahead) wait_ids(stages, slots_[1], report);
}

void Loop::load(Stages& stages, StepReport& report) {
  if (has_ended_) return;
  const Timed timed(report.read);
  const core::Span span(core::Phase::kData);
  std::unique_ptr<Flight> batch = stages.read();
  has_ended_ = batch == nullptr;
  if (batch != nullptr) slots_.push_back({std::move(batch)});
}

void Loop::start(Stages& stages, Slot& slot, StepReport& report) {
  const Timed timed(report.start_dist);
  slot.num_bytes = stages.start(*slot.batch);
  slot.is_started = true;
}

void Loop::wait_sizes(Stages& stages, Slot& slot, StepReport& report) {
  const Timed timed(report.wait_sizes);
  stages.wait_sizes(*slot.batch);
}

void Loop::wait_ids(Stages& stages, Slot& slot, StepReport& report) const {
  {
    const Timed timed(report.wait_ids);
    stages.wait_ids(*slot.batch);
  }
  if (!options_.prefetches || slot.is_prefetched) return;
  const Timed timed(report.prefetch);
  stages.prefetch(*slot.batch);
  slot.is_prefetched = true;
}

}  // namespace tessera::pipeline
