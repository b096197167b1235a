// The loop itself, on a workload whose losses are known. With a device of its own, even if that is
// the CPU, the loop learns the loss of a step one step late; what it tells must be the same.

#include "trainer/train.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "support/error_text.h"
#include "support/ranks.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/state.h"
#include "trainer/device.h"
#include "trainer/host_copy.h"
#include "trainer/progress_line.h"

namespace tessera::trainer {
namespace {

using comm::Group;
using tessera::testing::error_text;
using tessera::testing::run_ranks;

struct FallSettings : Settings {
  settings::Table table() override { return settings::Table(); }
};

/// One number that falls: w is stepped by `rate` times 1, so the loss of step s is start - rate * s
/// plus the rank, and its mean over two ranks half more.
class Fall final : public Workload<at::Tensor> {
 public:
  Fall(const FallSettings& settings, const Group& world, bool is_late)
      : settings_(settings),
        world_(world),
        is_late_(is_late),
        w_(at::full({1}, 100.0, at::kDouble).requires_grad_(true)),
        optimizer_({w_}, torch::optim::SGDOptions(settings.learning_rate)) {}

  std::string name() const override { return "fall"; }
  const Settings& settings() const override { return settings_; }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  void add_state(checkpoint::State& state) override {
    checkpoint::PlacedTensor placed;
    placed.name = "w";
    placed.shape = {1};
    placed.is_replicated = true;
    placed.pieces.push_back({{0}, w_.detach(), {}});
    state.add(std::move(placed));
  }
  std::vector<at::Tensor> parameters() const override { return {w_}; }
  std::optional<at::Device> device() const override {
    if (!is_late_) return std::nullopt;
    return at::Device(at::kCPU);
  }
  at::Tensor read(std::int64_t step) override {
    return at::full({1}, step == broken_at ? std::nan("") : 1.0, at::kDouble);
  }
  Result forward(const at::Tensor& batch, const Inputs& /*inputs*/) override {
    return {(w_ * batch).sum() + world_.rank(), w_.detach()};
  }
  void follow() override { ++num_followed; }
  Figures evaluate() override { return {{"w", w_.item<double>()}}; }
  double units_per_step() const override { return 1; }

  std::int64_t broken_at = -1;
  std::int64_t num_followed = 0;

 private:
  const FallSettings& settings_;
  Group world_;
  bool is_late_;
  at::Tensor w_;
  torch::optim::SGD optimizer_;
};

FallSettings ten_steps() {
  FallSettings settings;
  settings.num_steps = 10;
  settings.learning_rate = 0.5;
  return settings;
}

/// What is told: "step:loss" of steps, "judged step:w" of evaluations.
struct Told {
  std::vector<std::string> words;
  Listener listener() {
    Listener listener;
    listener.stepped = [this](const Progress& progress) {
      words.push_back(std::to_string(progress.step) + ":" + std::to_string(progress.loss));
    };
    listener.evaluated = [this](std::int64_t step, const Figures& figures) {
      words.push_back("judged " + std::to_string(step) + ":" + std::to_string(figures[0].second));
    };
    return listener;
  }
};

class TrainerTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tessera-trainer-" + std::to_string(getpid()) + (GetParam() ? "l" : "e"));
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string folder() const { return folder_.string(); }

 private:
  std::filesystem::path folder_;
};

INSTANTIATE_TEST_SUITE_P(Losses, TrainerTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "late" : "at_once"; });

TEST_P(TrainerTest, EveryStepIsToldWithItsOwnLossBeforeItIsJudged) {
  FallSettings settings = ten_steps();
  settings.eval_every = 4;
  std::vector<std::string> wanted;
  for (int step = 1; step <= 10; ++step) {
    wanted.push_back(std::to_string(step) + ":" + std::to_string(100.0 - 0.5 * (step - 1) + 0.5));
    if (step % 4 == 0 || step == 10) {
      wanted.push_back("judged " + std::to_string(step) + ":" + std::to_string(100.0 - 0.5 * step));
    }
  }
  run_ranks(2, [&](const Group& world) {
    Fall workload(settings, world, GetParam());
    core::StepRecorder recorder;
    Told told;
    const Summary summary = train(workload, world, "", recorder, told.listener());
    EXPECT_EQ(told.words, wanted);
    EXPECT_EQ(summary.last_step, 10);
    EXPECT_DOUBLE_EQ(summary.loss, 96.0);
    EXPECT_EQ(workload.num_followed, 10);
  });
}

TEST_P(TrainerTest, ALossThatIsNoNumberEndsItWithoutACheckpoint) {
  FallSettings settings = ten_steps();
  settings.checkpoint_every = 3;
  run_ranks(2, [&](const Group& world) {
    Fall workload(settings, world, GetParam());
    workload.broken_at = 5;  // the sixth step
    core::StepRecorder recorder;
    Told told;
    const Summary summary = train(workload, world, folder(), recorder, told.listener());
    EXPECT_TRUE(summary.has_diverged);
    EXPECT_EQ(summary.last_step, 6);
    EXPECT_EQ(told.words.size(), 6U);
  });
  EXPECT_EQ(checkpoint::list_steps(folder()), std::vector<std::int64_t>{3});
}

TEST_P(TrainerTest, ToldToStopItSavesAndGoesOn) {
  FallSettings settings = ten_steps();
  run_ranks(2, [&](const Group& world) {
    Fall workload(settings, world, GetParam());
    core::StepRecorder recorder;
    Told told;
    bool is_told = false;
    Listener listener = told.listener();
    const auto tell = listener.stepped;
    listener.stepped = [&](const Progress& progress) {
      tell(progress);
      is_told = is_told || (progress.step == 3 && world.rank() == 1);  // one of them
    };
    const Summary first =
        train(workload, world, folder(), recorder, listener, [&] { return is_told; });
    EXPECT_TRUE(first.was_stopped);
    EXPECT_LT(first.last_step, 7);
    EXPECT_EQ(told.words.size(), static_cast<std::size_t>(first.last_step));
    EXPECT_DOUBLE_EQ(first.loss, 100.5 - 0.5 * static_cast<double>(first.last_step - 1));

    FallSettings going_on = settings;
    going_on.resume = folder();
    Fall again(going_on, world, !GetParam());  // the device is no part of a checkpoint
    const Summary second = train(again, world, folder(), recorder);
    EXPECT_EQ(second.first_step, first.last_step);
    EXPECT_EQ(second.last_step, 10);
    EXPECT_DOUBLE_EQ(second.loss, 96.0);
  });
}

TEST(TrainerDevice, WhatCannotBeHadIsTheSameErrorOnAllRanks) {
  if (at::Context::hasCUDA()) GTEST_SKIP() << "there is a GPU here";
  run_ranks(2, [](const Group& world) {
    FallSettings settings;
    EXPECT_TRUE(device_of(settings).is_cpu());
    use_device(settings, world);
    settings.device = "cuda";
    const std::string text = error_text([&] { use_device(settings, world); });
    EXPECT_EQ(text.find("train: --device cuda is not possible on rank 0: "), 0U) << text;
  });
}

TEST(TrainerDevice, AFaultOfTheDeviceIsFoundInLibTorchsText) {
  EXPECT_EQ(device_fault("CUDA error: an illegal memory access was encountered\nSearch for it"),
            "an illegal memory access was encountered");
  EXPECT_EQ(device_fault("in step: CUDA driver error: device not available"),
            "device not available");
  EXPECT_EQ(device_fault("CUDA error: "), "unknown error");
  EXPECT_EQ(device_fault("CUDA out of memory. Tried to allocate 2.00 GiB"), "");
  EXPECT_EQ(device_fault(""), "");
}

TEST(TrainerDevice, ACopyIsOfTheTimeItWasAskedFor) {
  HostCopy copy;
  EXPECT_FALSE(copy.is_started());
  at::Tensor numbers = at::arange(4, at::kDouble);
  copy.start(numbers);
  numbers.zero_();
  EXPECT_TRUE(at::equal(copy.wait(), at::arange(4, at::kDouble)));
}

TEST(ProgressLine, LeavesOutWhatMattersLeast) {
  const std::string text =
      "step  12/400 | loss 0.4417 | train auc 0.781 | 812k samples/s | 40.3 ms (exposed comm 2.1) "
      "| "
      "mem 11.2 GB | eta 5m54s";
  EXPECT_EQ(fitted(text, text.size()), text);
  EXPECT_EQ(fitted(text, 103),
            "step  12/400 | loss 0.4417 | train auc 0.781 | 812k samples/s | 40.3 ms (exposed comm "
            "2.1) | eta 5m54s");
  EXPECT_EQ(fitted(text, 84),
            "step  12/400 | loss 0.4417 | train auc 0.781 | 812k samples/s | 40.3 ms | eta 5m54s");
  EXPECT_EQ(fitted(text, 79),
            "step  12/400 | loss 0.4417 | train auc 0.781 | 812k samples/s | eta 5m54s");
  EXPECT_EQ(fitted(text, 50), "step  12/400 | loss 0.4417 | train auc 0.781");
  EXPECT_EQ(fitted(text, 9), "step  12/");
}

TEST(ProgressLine, CutsWhatIsSaidBetweenItsParts) {
  const std::string said =
      "judged   step 4: one 1.5, was 2 | two 2.5 | three 3.5\nsample   a | b\n";
  EXPECT_EQ(wrapped(said, 53), said);
  EXPECT_EQ(wrapped(said, 52),
            "judged   step 4: one 1.5, was 2 | two 2.5\n         three 3.5\nsample   a | b\n");
  EXPECT_EQ(
      wrapped(said, 20),
      "judged   step 4: one 1.5, was 2\n         two 2.5\n         three 3.5\nsample   a | b\n");
  EXPECT_EQ(wrapped("", 20), "");
  EXPECT_EQ(wrapped("no end", 2), "no end");
}

}  // namespace
}  // namespace tessera::trainer
