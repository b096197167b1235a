#include "tessera/core/step_recorder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

namespace tessera::core {
namespace {

constexpr double kSecond = 1e-9;

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What to add to now_ns() for the system's clock.
std::int64_t system_offset_ns() noexcept {
  const auto system = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  return system - now_ns();
}

struct ThreadState {
  std::shared_ptr<StepRecorder::State> recorder;
  Span* innermost = nullptr;
};

thread_local ThreadState this_thread;

}  // namespace

DeviceClock::~DeviceClock() = default;

struct StepRecorder::State {
  /// A span as the device did it, its times not known yet.
  struct DeviceSpan {
    SpanRecord span;
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  mutable std::mutex mutex;
  std::shared_ptr<DeviceClock> clock;
  std::atomic<DeviceClock*> clock_in_use{nullptr};  // while a kept step runs
  std::vector<DeviceSpan> device_spans;
  RecorderOptions options;
  std::int64_t offset_ns = system_offset_ns();
  std::vector<std::thread::id> threads;  // by number; the first runs the steps
  std::vector<SpanRecord> spans;
  StepTotals totals;
  std::deque<StepTotals> last_steps;
  StepTotals step;
  std::int64_t step_number = -1;
  std::int64_t step_begin_ns = 0;

  // The mutex is held.
  int thread_number() {
    const auto id = std::this_thread::get_id();
    const auto found = std::find(threads.begin(), threads.end(), id);
    if (found != threads.end()) return static_cast<int>(found - threads.begin());
    threads.push_back(id);
    return static_cast<int>(threads.size()) - 1;
  }

  bool is_kept(std::int64_t number) const {
    return number >= options.first_kept && number < options.first_kept + options.num_kept;
  }

  void note_device(const SpanRecord& span, std::size_t begin, std::size_t end) {
    std::lock_guard lock(mutex);
    if (step_number < 0) return;
    DeviceSpan& kept = device_spans.emplace_back(DeviceSpan{span, begin, end});
    kept.span.thread = SpanRecord::kDeviceThread;
    kept.span.step = step_number;
  }

  void note(const SpanRecord& span, std::int64_t own_ns) {
    std::lock_guard lock(mutex);
    if (step_number < 0) return;
    const int thread = thread_number();
    if (thread == 0) {
      const auto phase = static_cast<std::size_t>(span.phase);
      const double seconds = kSecond * static_cast<double>(own_ns);
      step.phase_seconds[phase] += seconds;
      if (span.is_wait) step.waited_seconds[phase] += seconds;
    }
    if (!is_kept(step_number)) return;
    SpanRecord kept = span;
    kept.thread = thread;
    kept.step = step_number;
    kept.begin_ns += offset_ns;
    kept.end_ns += offset_ns;
    spans.push_back(kept);
  }
};

std::string_view name_of(Phase phase) noexcept {
  constexpr std::array<std::string_view, kNumPhases> kNames{"data",        "input_dist", "lookup",
                                                            "output_dist", "dense",      "backward",
                                                            "all_reduce",  "optimizer",  "other"};
  return kNames[static_cast<std::size_t>(phase)];
}

double StepTotals::exposed_comm_seconds() const {
  return std::accumulate(waited_seconds.begin(), waited_seconds.end(), 0.0);
}

double StepTotals::idle_seconds() const {
  return std::max(0.0, seconds - std::accumulate(phase_seconds.begin(), phase_seconds.end(), 0.0));
}

StepRecorder::StepRecorder(RecorderOptions options) : state_(std::make_shared<State>()) {
  state_->options = options;
}

StepRecorder::~StepRecorder() = default;

void StepRecorder::begin_step(std::int64_t step) {
  std::lock_guard lock(state_->mutex);
  if (state_->threads.empty()) state_->threads.push_back(std::this_thread::get_id());
  state_->step_number = step;
  state_->step = {};
  state_->clock_in_use = state_->is_kept(step) ? state_->clock.get() : nullptr;
  state_->step_begin_ns = now_ns();
}

StepTotals StepRecorder::end_step() {
  std::lock_guard lock(state_->mutex);
  StepTotals& step = state_->step;
  step.num_steps = 1;
  step.seconds = kSecond * static_cast<double>(now_ns() - state_->step_begin_ns);
  state_->step_number = -1;
  state_->clock_in_use = nullptr;
  StepTotals& totals = state_->totals;
  totals.num_steps += 1;
  totals.seconds += step.seconds;
  for (std::size_t i = 0; i < kNumPhases; ++i) {
    totals.phase_seconds[i] += step.phase_seconds[i];
    totals.waited_seconds[i] += step.waited_seconds[i];
  }
  state_->last_steps.push_back(step);
  if (state_->last_steps.size() > kMaxSteps) state_->last_steps.pop_front();
  return step;
}

std::vector<StepTotals> StepRecorder::last_steps() const {
  std::lock_guard lock(state_->mutex);
  return {state_->last_steps.begin(), state_->last_steps.end()};
}

StepTotals StepRecorder::totals() const {
  std::lock_guard lock(state_->mutex);
  return state_->totals;
}

std::vector<SpanRecord> StepRecorder::spans() const {
  std::lock_guard lock(state_->mutex);
  std::vector<SpanRecord> all = state_->spans;
  for (const State::DeviceSpan& each : state_->device_spans) {
    SpanRecord span = each.span;
    span.begin_ns = state_->clock->time_ns(each.begin);
    span.end_ns = state_->clock->time_ns(each.end);
    all.push_back(span);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const SpanRecord& a, const SpanRecord& b) { return a.end_ns < b.end_ns; });
  return all;
}

void StepRecorder::use_clock(std::shared_ptr<DeviceClock> clock) {
  std::lock_guard lock(state_->mutex);
  state_->clock = std::move(clock);
}

void StepRecorder::keep(RecorderOptions options) {
  std::lock_guard lock(state_->mutex);
  state_->options = options;
}

UseRecorder::UseRecorder(const StepRecorder& recorder)
    : before_(std::exchange(this_thread.recorder, recorder.state_)) {}

UseRecorder::~UseRecorder() { this_thread.recorder = std::move(before_); }

Span::Span(Phase phase, const char* name) noexcept
    : name_(name == nullptr ? name_of(phase).data() : name), phase_(phase) {
  begin();
}

Span::Span(Wait wait) noexcept : name_(wait.name), is_wait_(true) {
  const Span* around = this_thread.innermost;
  if (around != nullptr) phase_ = around->phase_;
  if (phase_ == Phase::kBackward && std::strcmp(name_, "all_reduce") == 0) {
    phase_ = Phase::kAllReduce;
  }
  begin();
}

void Span::begin() noexcept {
  state_ = this_thread.recorder.get();
  if (state_ == nullptr) return;
  around_ = std::exchange(this_thread.innermost, this);
  // Waiting is the host's.
  if (!is_wait_) clock_ = state_->clock_in_use;
  if (clock_ != nullptr) begin_mark_ = clock_->mark();
  begin_ns_ = now_ns();
}

Span::~Span() {
  if (state_ == nullptr) return;
  const std::int64_t end_ns = now_ns();
  this_thread.innermost = around_;
  if (around_ != nullptr) around_->inside_ns_ += end_ns - begin_ns_;
  SpanRecord record{.name = name_, .phase = phase_, .is_wait = is_wait_};
  record.begin_ns = begin_ns_;
  record.end_ns = end_ns;
  state_->note(record, end_ns - begin_ns_ - inside_ns_);
  if (clock_ != nullptr) state_->note_device(record, begin_mark_, clock_->mark());
}

}  // namespace tessera::core
