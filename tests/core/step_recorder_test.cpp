// Spans of a step: what is whose time, on which thread, and what is kept.

#include "tessera/core/step_recorder.h"

#include <chrono>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"

namespace tessera::core {
namespace {

constexpr auto kNap = std::chrono::milliseconds(4);
constexpr double kNapSeconds = 0.004;

double of(const std::array<double, kNumPhases>& seconds, Phase phase) {
  return seconds[static_cast<std::size_t>(phase)];
}

TEST(StepRecorder, AnInnerSpanIsNotTheOuterOnesTime) {
  StepRecorder recorder;
  const UseRecorder use(recorder);
  recorder.begin_step(0);
  {
    const Span backward(Phase::kBackward);
    std::this_thread::sleep_for(kNap);
    const Span lookup(Phase::kLookup);
    std::this_thread::sleep_for(2 * kNap);
  }
  std::this_thread::sleep_for(kNap);
  const StepTotals step = recorder.end_step();
  EXPECT_GE(of(step.phase_seconds, Phase::kBackward), kNapSeconds);
  EXPECT_GE(of(step.phase_seconds, Phase::kLookup), 2 * kNapSeconds);
  EXPECT_GE(step.idle_seconds(), kNapSeconds);
  const double covered = std::accumulate(step.phase_seconds.begin(), step.phase_seconds.end(), 0.0);
  EXPECT_NEAR(covered + step.idle_seconds(), step.seconds, 1e-9);  // nothing is counted twice
  EXPECT_EQ(step.exposed_comm_seconds(), 0);
}

TEST(StepRecorder, EveryOneOfTheLastStepsIsThere) {
  StepRecorder recorder;
  const UseRecorder use(recorder);
  for (std::int64_t step = 0; step < 3; ++step) {
    recorder.begin_step(step);
    if (step == 1) {
      const Span wait(Span::Wait{"all_to_all"});
      std::this_thread::sleep_for(kNap);
    }
    recorder.end_step();
  }
  const std::vector<StepTotals> steps = recorder.last_steps();
  ASSERT_EQ(steps.size(), 3);
  EXPECT_EQ(steps[0].exposed_comm_seconds(), 0);
  EXPECT_GE(steps[1].exposed_comm_seconds(), kNapSeconds);
  EXPECT_EQ(steps[2].exposed_comm_seconds(), 0);
  for (std::size_t i = 0; i < StepRecorder::kMaxSteps; ++i) {
    recorder.begin_step(3);
    recorder.end_step();
  }
  EXPECT_EQ(recorder.last_steps().size(), StepRecorder::kMaxSteps);
  EXPECT_EQ(recorder.last_steps()[0].exposed_comm_seconds(), 0);
}

TEST(StepRecorder, WaitingBelongsToThePhaseAroundIt) {
  StepRecorder recorder;
  const UseRecorder use(recorder);
  recorder.begin_step(0);
  {
    const Span dist(Phase::kInputDist);
    const Span wait(Span::Wait{"all_to_all"});
    std::this_thread::sleep_for(kNap);
  }
  {
    const Span backward(Phase::kBackward);
    const Span wait(Span::Wait{"all_reduce"});
    std::this_thread::sleep_for(kNap);
  }
  const StepTotals step = recorder.end_step();
  EXPECT_GE(of(step.waited_seconds, Phase::kInputDist), kNapSeconds);
  EXPECT_GE(of(step.waited_seconds, Phase::kAllReduce), kNapSeconds);  // of gradients
  EXPECT_EQ(of(step.waited_seconds, Phase::kBackward), 0);
  EXPECT_LE(of(step.waited_seconds, Phase::kInputDist), of(step.phase_seconds, Phase::kInputDist));
  EXPECT_GE(step.exposed_comm_seconds(), 2 * kNapSeconds);
}

TEST(StepRecorder, KeepsTheSpansOfSomeStepsAndTheSumsOfAll) {
  StepRecorder recorder({.first_kept = 2, .num_kept = 2});
  const UseRecorder use(recorder);
  for (int step = 0; step < 6; ++step) {
    recorder.begin_step(step);
    {
      const Span dense(Phase::kDense, "bottom");
    }
    recorder.end_step();
  }
  {
    const Span between_steps(Phase::kOther);
  }
  EXPECT_EQ(recorder.totals().num_steps, 6);
  const auto spans = recorder.spans();
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].step, 2);
  EXPECT_EQ(spans[1].step, 3);
  EXPECT_STREQ(spans[0].name, "bottom");
  EXPECT_LE(spans[0].begin_ns, spans[0].end_ns);
  EXPECT_LE(spans[0].end_ns, spans[1].begin_ns);
}

TEST(StepRecorder, OtherThreadsAreSeenButNotSummed) {
  StepRecorder recorder;
  const UseRecorder use(recorder);
  recorder.begin_step(0);
  std::thread([&] {
    {
      const Span unseen(Phase::kData);
    }  // this thread has no recorder yet
    const UseRecorder own(recorder);
    const Span copy(Phase::kData);
  }).join();
  const StepTotals step = recorder.end_step();
  EXPECT_EQ(of(step.phase_seconds, Phase::kData), 0);
  ASSERT_EQ(recorder.spans().size(), 1U);
  EXPECT_EQ(recorder.spans()[0].thread, 1);
}

/// A device that is done with what it got at mark i at 10 i.
class TenApart : public DeviceClock {
 public:
  std::size_t mark() override { return num_marks++; }
  std::int64_t time_ns(std::size_t mark) override { return static_cast<std::int64_t>(10 * mark); }
  std::size_t num_marks = 0;
};

TEST(StepRecorder, ADeviceHasALaneOfItsOwnForTheKeptSteps) {
  StepRecorder recorder({.first_kept = 1, .num_kept = 1});
  const auto clock = std::make_shared<TenApart>();
  recorder.use_clock(clock);
  const UseRecorder use(recorder);
  for (int step = 0; step < 3; ++step) {
    recorder.begin_step(step);
    {
      const Span outer(Phase::kDense);
      const Span inner(Phase::kLookup);
      const Span wait(Span::Wait{"all_reduce"});  // the host's alone
    }
    recorder.end_step();
  }
  EXPECT_EQ(clock->num_marks, 4U);
  std::vector<SpanRecord> device;
  for (const SpanRecord& span : recorder.spans()) {
    if (span.thread == SpanRecord::kDeviceThread) device.push_back(span);
  }
  ASSERT_EQ(device.size(), 2U);
  EXPECT_STREQ(device[0].name, "lookup");
  EXPECT_EQ(device[0].begin_ns, 10);
  EXPECT_EQ(device[0].end_ns, 20);
  EXPECT_STREQ(device[1].name, "dense");
  EXPECT_EQ(device[1].begin_ns, 0);
  EXPECT_EQ(device[1].end_ns, 30);
  EXPECT_EQ(device[1].step, 1);
  EXPECT_EQ(recorder.totals().num_steps, 3);
}

TEST(StepRecorder, WithoutOneASpanIsNothing) {
  const Span span(Phase::kDense);
  const Span wait(Span::Wait{"barrier"});
}

TEST(StepRecorder, ARankThatComesEarlyWaits) {
  tessera::testing::run_ranks(2, [](const comm::Group& group) {
    StepRecorder recorder;
    const UseRecorder use(recorder);
    comm::barrier(group);
    recorder.begin_step(0);
    if (group.rank() == 1) std::this_thread::sleep_for(25 * kNap);
    at::Tensor tensor = at::ones({8});
    {
      const Span dist(Phase::kOutputDist);
      comm::all_reduce_(tensor, group);
    }
    const StepTotals step = recorder.end_step();
    EXPECT_EQ(step.exposed_comm_seconds(), of(step.waited_seconds, Phase::kOutputDist));
    if (group.rank() == 0) {
      EXPECT_GE(step.exposed_comm_seconds(), 2 * kNapSeconds);
    }
    ASSERT_EQ(recorder.spans().size(), 2U);
    EXPECT_STREQ(recorder.spans()[0].name, "all_reduce");
    EXPECT_TRUE(recorder.spans()[0].is_wait);
  });
}

}  // namespace
}  // namespace tessera::core
