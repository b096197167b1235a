// The loop alone, with stages that only write down that they were called.

#include "tessera/pipeline/loop.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "support/error_text.h"

namespace tessera::pipeline {
namespace {

using tessera::testing::error_text;

struct Numbered final : Flight {
  explicit Numbered(int given) : number(given) {}
  int number;
};

class Script final : public Stages {
 public:
  explicit Script(int count) : count_(count) {}

  std::unique_ptr<Flight> read() override {
    if (next_ == count_) return nullptr;
    return std::make_unique<Numbered>(next_++);
  }
  std::int64_t start(Flight& batch) override {
    write("start", batch);
    return 100 + static_cast<Numbered&>(batch).number;
  }
  void wait_sizes(Flight& batch) override { write("sizes", batch); }
  void wait_ids(Flight& batch) override { write("ids", batch); }
  void prefetch(Flight& batch) override { write("prefetch", batch); }
  void forward(Flight& batch) override {
    if (in_forward) in_forward();
    write("forward", batch);
  }
  bool trains() override { return is_training; }
  void zero_grad() override { text += "zero "; }
  void backward(Flight& batch) override { write("backward", batch); }
  void step() override { text += "step "; }

  std::string take() { return std::exchange(text, ""); }

  std::string text;
  bool is_training = true;
  std::function<void()> in_forward;

 private:
  void write(const char* stage, Flight& batch) {
    text += stage + std::to_string(static_cast<Numbered&>(batch).number) + " ";
  }
  int count_;
  int next_ = 0;
};

TEST(Loop, AStepOfEveryLead) {
  for (const auto& [lead, first, second] :
       {std::tuple(0, "zero start0 ids0 forward0 backward0 step ",
                   "zero start1 ids1 forward1 backward1 step "),
        std::tuple(1, "start0 sizes0 zero ids0 start1 forward0 sizes1 backward0 step ",
                   "zero ids1 start2 forward1 sizes2 backward1 step "),
        std::tuple(2,
                   "start0 sizes0 start1 sizes1 zero ids0 start2 forward0 ids1 sizes2 backward0 "
                   "step ",
                   "zero ids1 start3 forward1 ids2 sizes3 backward1 step ")}) {
    Script script(9);
    Loop loop({.lead = static_cast<std::size_t>(lead)});
    ASSERT_NE(loop.progress(script), nullptr);
    EXPECT_EQ(script.take(), first);
    EXPECT_EQ(loop.num_in_flight(), lead + 1);
    EXPECT_EQ(loop.report().feature_bytes, 100);
    ASSERT_NE(loop.progress(script), nullptr);
    EXPECT_EQ(script.take(), second);
    EXPECT_EQ(loop.report().feature_bytes, 101);
    EXPECT_EQ(loop.num_trained(), 2);
  }
}

TEST(Loop, TheNextBatchArrivesBeforeBackwardOnlyFromABatchOn) {
  Script script(9);
  Loop loop({.lead = 2, .prefetches = true, .ahead_from = 1});
  (void)loop.progress(script);
  EXPECT_EQ(script.take(),
            "start0 sizes0 start1 sizes1 zero ids0 prefetch0 start2 forward0 sizes2 backward0 step "
            "ids1 prefetch1 ");
  (void)loop.progress(script);
  EXPECT_EQ(script.take(), "zero ids1 start3 forward1 ids2 prefetch2 sizes3 backward1 step ");
}

TEST(Loop, ABatchIsTakenOnlyIfAsManyAreThereAsAreNeeded) {
  for (const std::size_t needed : {1, 2, 3}) {
    Script script(5);
    Loop loop({.lead = 1, .needed = needed});
    std::size_t count = 0;
    while (loop.progress(script) != nullptr) ++count;
    EXPECT_EQ(count, 6 - needed);
    EXPECT_EQ(loop.num_in_flight(), 0);
  }
}

TEST(Loop, AModelThatDoesNotTrainIsCalledAlone) {
  Script script(9);
  script.is_training = false;
  Loop loop({.lead = 0});
  (void)loop.progress(script);
  EXPECT_EQ(script.take(), "start0 ids0 forward0 ");
  EXPECT_EQ(loop.num_trained(), 0);
}

TEST(Loop, ReadsOnAndFills) {
  Script script(4);
  Loop loop({.lead = 1});
  loop.fill(script);
  EXPECT_EQ(script.take(), "start0 sizes0 ");
  EXPECT_EQ(loop.num_in_flight(), 2);
  EXPECT_TRUE(loop.read_until(script, 4));
  EXPECT_FALSE(loop.read_until(script, 5));
  EXPECT_EQ(loop.num_in_flight(), 4);
  EXPECT_EQ(script.take(), "");
}

TEST(Loop, AfterAnExceptionOnlyResetHelps) {
  Script script(9);
  Loop loop({.lead = 1});
  script.in_forward = [] { throw std::runtime_error("the disk is gone"); };
  EXPECT_THROW((void)loop.progress(script), std::runtime_error);
  script.in_forward = nullptr;
  EXPECT_TRUE(loop.has_failed());
  EXPECT_EQ(error_text([&] { (void)loop.progress(script); }),
            "pipeline: an earlier step threw an exception, so the batches in flight are in an "
            "unknown state. Make a new pipeline.");
  loop.reset();
  EXPECT_EQ(loop.num_in_flight(), 0);
  EXPECT_NE(loop.progress(script), nullptr);
}

TEST(Loop, RefusesToBeChangedByItsOwnStages) {
  const std::string refusal = "pipeline: it was called from within one of its own steps.";
  Script script(9);
  Loop loop({.lead = 1});
  script.in_forward = [&] {
    EXPECT_EQ(error_text([&] { loop.reset(); }), refusal);
    EXPECT_EQ(error_text([&] { loop.fill(script); }), refusal);
    EXPECT_EQ(error_text([&] { (void)loop.read_until(script, 9); }), refusal);
  };
  EXPECT_NE(loop.progress(script), nullptr);
}

}  // namespace
}  // namespace tessera::pipeline
