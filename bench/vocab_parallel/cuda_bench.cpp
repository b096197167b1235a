// Cross entropy on a GPU through the public functions and autograd, beside LibTorch's own.
//
// Prints one line of JSON per row: name, median, p10 and p90 in ms, extra memory in MiB. Every row
// is checked against LibTorch before it is timed. Before each repetition 256 MiB are zeroed, so
// that nothing is found in the second-level cache, and overwritten logits are restored; neither is
// timed. Products of matrices at full speed take a GPU to the limit of its power, and its clock
// goes down; rows whose names end in "rested" let it rest before every repetition.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/group.h"
#include "tessera/vocab_parallel/cross_entropy.h"
#include "tessera/vocab_parallel/linear.h"

namespace {

using namespace tessera::vocab_parallel;

constexpr int kRepetitions = 31;
constexpr int kWarmUps = 5;

struct Row {
  std::string name;
  std::function<void()> prepare;
  std::function<void()> run;
  double gradient_mib = 0;  // allocated by the run, but not counted as extra
  std::chrono::milliseconds rest{0};
};

class Timer {
 public:
  Timer() {
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
    flush_ = at::empty({256 << 20}, at::TensorOptions().device(at::kCUDA).dtype(at::kByte));
  }

  void measure(const Row& row) {
    std::vector<float> times;
    double extra = 0;
    for (int i = 0; i < kWarmUps + kRepetitions; ++i) {
      std::this_thread::sleep_for(row.rest);
      row.prepare();
      flush_.zero_();
      const auto before = allocated();
      c10::cuda::CUDACachingAllocator::resetPeakStats(0);
      const auto stream = c10::cuda::getCurrentCUDAStream().stream();
      cudaEventRecord(begin_, stream);
      row.run();
      cudaEventRecord(end_, stream);
      cudaEventSynchronize(end_);
      float ms = 0;
      cudaEventElapsedTime(&ms, begin_, end_);
      if (i >= kWarmUps) times.push_back(ms);
      extra = static_cast<double>(peak() - before) / (1 << 20) - row.gradient_mib;
    }
    std::sort(times.begin(), times.end());
    std::printf(
        "{\"name\": \"%s\", \"median_ms\": %.4f, \"p10_ms\": %.4f, \"p90_ms\": %.4f, "
        "\"extra_mib\": %.1f, \"device\": \"cuda\"}\n",
        row.name.c_str(), times[times.size() / 2], times[times.size() / 10],
        times[times.size() * 9 / 10], extra);
    std::fflush(stdout);
  }

 private:
  static std::int64_t allocated() {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
  }
  static std::int64_t peak() {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].peak;
  }

  cudaEvent_t begin_{};
  cudaEvent_t end_{};
  at::Tensor flush_;
};

struct Shape {
  std::int64_t rows;
  std::int64_t vocab;
};

bool is_right(const at::Tensor& logits, const at::Tensor& labels, const tessera::comm::Group& group,
              Overwrite overwrite) {
  const at::Tensor a = logits.slice(0, 0, 64).detach().clone().requires_grad_(true);
  const at::Tensor b = a.detach().to(at::kFloat).requires_grad_(true);
  const at::Tensor some = labels.slice(0, 0, 64);
  CrossEntropyOptions options;
  options.overwrite = overwrite;
  const at::Tensor ours = cross_entropy(a, some, group, options);
  const at::Tensor theirs = at::cross_entropy_loss(b, some);
  ours.backward();
  theirs.backward();
  const bool loss_is_right = std::fabs(ours.item<double>() - theirs.item<double>()) < 1e-5;
  const bool gradient_is_right = at::allclose(a.grad().to(at::kFloat), b.grad(), 1.0 / 100, 1e-9);
  if (!loss_is_right || !gradient_is_right) {
    std::printf("wrong: loss %.7f, expected %.7f, gradient %s\n", ours.item<double>(),
                theirs.item<double>(), gradient_is_right ? "right" : "wrong");
  }
  return loss_is_right && gradient_is_right;
}

void measure_shape(Timer& timer, const Shape& shape, const tessera::comm::Group& group) {
  const auto device = at::TensorOptions().device(at::kCUDA);
  const at::Tensor source =
      (at::randn({shape.rows, shape.vocab}, device.dtype(at::kBFloat16)) * 2.0).to(at::kBFloat16);
  const at::Tensor labels = at::randint(shape.vocab, {shape.rows}, device.dtype(at::kLong));
  at::Tensor logits = source.clone().requires_grad_(true);
  const std::string suffix =
      "/bf16/n" + std::to_string(shape.rows) + "_v" + std::to_string(shape.vocab);
  for (const auto overwrite : {Overwrite::kNever, Overwrite::kInBackward, Overwrite::kInForward}) {
    if (!is_right(source, labels, group, overwrite)) std::exit(1);
  }
  const auto nothing = [] {};
  const auto restore = [&] {
    const at::NoGradGuard no_grad;
    logits.mutable_grad() = at::Tensor();
    logits.detach().copy_(source);
  };
  const auto with = [](Overwrite overwrite, Reduction reduction) {
    CrossEntropyOptions options;
    options.overwrite = overwrite;
    options.reduction = reduction;
    return options;
  };
  timer.measure({"vocab/cross_entropy/forward" + suffix, nothing, [&] {
                   const at::NoGradGuard no_grad;
                   cross_entropy(logits, labels, group, with(Overwrite::kNever, Reduction::kMean));
                 }});
  timer.measure({"vocab/cross_entropy/forward_scores" + suffix, nothing, [&] {
                   const at::NoGradGuard no_grad;
                   auto options = with(Overwrite::kNever, Reduction::kMean);
                   options.label_smoothing = 0.1;
                   cross_entropy_with_scores(logits, labels, group, {false, true, true, false},
                                             options);
                 }});
  timer.measure({"vocab/cross_entropy/separate" + suffix, restore, [&] {
                   const at::Tensor loss = cross_entropy(
                       logits, labels, group, with(Overwrite::kInBackward, Reduction::kMean));
                   torch::autograd::grad({loss}, {logits});
                 }});
  timer.measure({"vocab/cross_entropy/two_pass" + suffix, restore, [&] {
                   const at::Tensor loss = cross_entropy(
                       logits, labels, group, with(Overwrite::kInForward, Reduction::kMean));
                   torch::autograd::grad({loss}, {logits});
                 }});
  timer.measure({"vocab/cross_entropy/new_gradient" + suffix, restore, [&] {
                   const at::Tensor loss = cross_entropy(logits, labels, group,
                                                         with(Overwrite::kNever, Reduction::kMean));
                   torch::autograd::grad({loss}, {logits});
                 }});
  timer.measure({"torch/cross_entropy/forward" + suffix, nothing, [&] {
                   const at::NoGradGuard no_grad;
                   at::cross_entropy_loss(logits, labels);
                 }});
  timer.measure({"torch/cross_entropy/forward_backward" + suffix, nothing, [&] {
                   const at::Tensor loss = at::cross_entropy_loss(logits, labels);
                   torch::autograd::grad({loss}, {logits});
                 }});
}

/// The last layer and its loss: as it comes, which keeps the logits (1.05 GB), and in parts of 256
/// MB.
void measure_linear(Timer& timer, const tessera::comm::Group& group) {
  constexpr std::int64_t kRows = 4096;
  constexpr std::int64_t kFeatures = 4096;
  constexpr std::int64_t kVocab = 128256;
  const auto options = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor hidden = at::randn({kRows, kFeatures}, options).requires_grad_(true);
  const at::Tensor weight =
      (at::randn({kVocab, kFeatures}, options) * 0.02).detach().requires_grad_(true);
  const at::Tensor labels = at::randint(kVocab, {kRows}, options.dtype(at::kLong));
  const double gradient_mib = static_cast<double>(hidden.nbytes() + weight.nbytes()) / (1 << 20);
  const auto torch_loss = [&] {
    return at::cross_entropy_loss(at::linear(hidden, weight).to(at::kFloat), labels);
  };
  const auto measure = [&](const std::string& name, const std::function<void()>& run,
                           double gradients = 0) {
    const auto nothing = [] {};
    const std::string full = name + "/bf16/n4096_h4096_v128256";
    timer.measure({full, nothing, run, gradients});
    timer.measure({full + "/rested", nothing, run, gradients, std::chrono::milliseconds(60)});
  };
  measure("torch/linear/forward", [&] {
    const at::NoGradGuard no_grad;
    at::linear(hidden, weight);
  });
  for (const bool in_parts : {false, true}) {
    LinearOptions linear;
    if (in_parts) linear.workspace_bytes = std::int64_t{256} << 20;
    const auto loss = [&] { return linear_cross_entropy(hidden, weight, labels, group, linear); };
    {
      const at::NoGradGuard no_grad;
      const double ours = loss().item<double>();
      const double theirs = torch_loss().item<double>();
      if (std::fabs(ours - theirs) > 1e-3 * theirs) {
        std::printf("wrong: linear loss %.6f, expected %.6f\n", ours, theirs);
        std::exit(1);
      }
    }
    const std::string kind = in_parts ? "chunks" : "whole";
    measure("vocab/linear_cross_entropy/forward_" + kind, [&] {
      const at::NoGradGuard no_grad;
      loss();
    });
    measure(
        "vocab/linear_cross_entropy/forward_backward_" + kind,
        [&] { torch::autograd::grad({loss()}, {hidden, weight}); }, gradient_mib);
  }
  measure("torch/linear_cross_entropy/forward", [&] {
    const at::NoGradGuard no_grad;
    torch_loss();
  });
  measure(
      "torch/linear_cross_entropy/forward_backward",
      [&] { torch::autograd::grad({torch_loss()}, {hidden, weight}); }, gradient_mib);
}

}  // namespace

int main() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = tessera::comm::make_group(store, 0, 1);
  at::manual_seed(1);
  Timer timer;
  for (const Shape& shape : {Shape{4096, 128256}, Shape{8192, 32000}, Shape{2048, 262144},
                             Shape{4096, 128257}, Shape{8192, 50257}}) {
    measure_shape(timer, shape, group);
  }
  measure_linear(timer, group);
  return 0;
}
