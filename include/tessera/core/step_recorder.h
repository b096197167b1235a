// tessera/core/step_recorder.h — where the time of a training step goes, phase by phase.
//
// A training loop holds a StepRecorder and says when a step begins and ends. Anything below it, in
// any module, opens a Span where a phase of the step begins; the thread's recorder, if there is
// one, notes it. Without a recorder a Span is one look at a thread-local pointer. Needs no
// LibTorch.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/core/export.h"

namespace tessera::core {

/// What a span of a step is for. kOther is the rest that has a name; time that no span covers is
/// idle.
enum class Phase : std::uint8_t {
  kData,        // reading and making the batch
  kInputDist,   // ids to the ranks that own their rows
  kLookup,      // reading rows
  kOutputDist,  // rows to the ranks that own the samples
  kDense,       // forward of what every rank holds, and the loss
  kBackward,    // all of backward that is not one of the others
  kAllReduce,   // gradients
  kOptimizer,
  kOther,
};
inline constexpr std::size_t kNumPhases = 9;

/// "data", "input_dist", "lookup", "output_dist", "dense", "backward", "all_reduce", "optimizer",
/// "other".
TESSERA_API std::string_view name_of(Phase phase) noexcept;

/// What a device beside the host, such as a GPU, has come to, for a lane of its own.
class TESSERA_API DeviceClock {
 public:
  DeviceClock() = default;
  virtual ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;
  /// Notes the end of what this thread has given the device to do; returns a number for it. Any
  /// thread; waits for nothing.
  virtual std::size_t mark() = 0;
  /// When the device was there, by the system's clock. Waits for it.
  virtual std::int64_t time_ns(std::size_t mark) = 0;
};

/// One finished span.
struct SpanRecord {
  /// The lane of the device: what it did between what it was given before and in the span.
  static constexpr int kDeviceThread = 1000;
  const char* name = "";  // lives as long as the program
  Phase phase = Phase::kOther;
  bool is_wait = false;       // waiting for communication
  int thread = 0;             // 0 is the thread that runs the steps
  std::int64_t step = 0;      // the one that was running when the span ended
  std::int64_t begin_ns = 0;  // of the system's clock, so that ranks can be compared
  std::int64_t end_ns = 0;
};

/// Sums over steps, of the thread that runs them.
struct TESSERA_API StepTotals {
  std::int64_t num_steps = 0;
  double seconds = 0;  // of all steps
  /// Per phase, without the spans inside it; waiting included.
  std::array<double, kNumPhases> phase_seconds{};
  /// Of these, waiting for communication: what the step would not have taken on one rank.
  std::array<double, kNumPhases> waited_seconds{};

  /// Sum of all waiting.
  double exposed_comm_seconds() const;
  /// What no span covered.
  double idle_seconds() const;
};

/// Which steps are kept span by span; sums are kept of all.
struct RecorderOptions {
  std::int64_t first_kept = 0;
  std::int64_t num_kept = 3;
};

/// Notes the spans of one rank. Spans may end on any thread; begin_step and end_step are for one.
class TESSERA_API StepRecorder {
 public:
  explicit StepRecorder(RecorderOptions options = {});
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  void begin_step(std::int64_t step);
  /// Returns the sums of this step alone.
  StepTotals end_step();

  StepTotals totals() const;
  /// Each of the last steps, at most kMaxSteps of them, oldest first.
  std::vector<StepTotals> last_steps() const;
  static constexpr std::size_t kMaxSteps = 10000;
  /// The spans of the kept steps, by the time they ended. Waits for the device, if it has a clock.
  std::vector<SpanRecord> spans() const;
  /// From now on, keep these. What was kept stays.
  void keep(RecorderOptions options);
  /// Spans of the kept steps are also told as the device did them. Before the first step.
  void use_clock(std::shared_ptr<DeviceClock> clock);

  struct State;

 private:
  friend class Span;
  friend class UseRecorder;
  std::shared_ptr<State> state_;
};

/// Makes a recorder the thread's own until the end of the scope. Threads that work for a step, such
/// as a pipeline's, have their own.
class TESSERA_API UseRecorder {
 public:
  explicit UseRecorder(const StepRecorder& recorder);
  ~UseRecorder();
  UseRecorder(const UseRecorder&) = delete;
  UseRecorder& operator=(const UseRecorder&) = delete;

 private:
  std::shared_ptr<StepRecorder::State> before_;
};

/// A phase of the step, from here to the end of the scope. Spans may be inside one another; the
/// inner one's time is not the outer one's.
class TESSERA_API Span {
 public:
  explicit Span(Phase phase, const char* name = nullptr) noexcept;
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  /// Waiting for communication, in the phase of the span around it; `name` is the operation's. In
  /// backward, an "all_reduce" is the gradients'.
  struct Wait {
    const char* name;
  };
  explicit Span(Wait wait) noexcept;

 private:
  void begin() noexcept;

  StepRecorder::State* state_ = nullptr;
  Span* around_ = nullptr;
  const char* name_ = "";
  Phase phase_ = Phase::kOther;
  bool is_wait_ = false;
  std::int64_t begin_ns_ = 0;
  std::int64_t inside_ns_ = 0;  // spans inside this one
  DeviceClock* clock_ = nullptr;
  std::size_t begin_mark_ = 0;
};

}  // namespace tessera::core
