// Times cross entropy through the public function and autograd beside LibTorch's own, in one run.
//
//   cross_entropy_bench [--repetitions N]
//
// One rank, LibTorch's threads. The floor is the bytes that must move at the speed of a streaming
// copy measured in the same run: two reads and one write of the logits, one of each where a row is
// treated at once. Before a row is timed its loss and gradient are compared with LibTorch's in
// float32.
//
// With THP_MEM_ALLOC_ENABLE=1 in the environment LibTorch's allocator asks for huge pages; then
// only its own rows are measured, as torch_huge_pages/...

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "doctor/memory_speed.h"
#include "kernels/dispatch.h"
#include "support/row.h"
#include "tessera/vocab_parallel/cross_entropy.h"
#include "tessera/vocab_parallel/solo_group.h"

namespace tessera::bench {
namespace {

using namespace vocab_parallel;
using Clock = std::chrono::steady_clock;

struct Input {
  at::Tensor source;
  at::Tensor logits;  // what is given to the functions; restored before each repetition
  at::Tensor labels;
};

struct Case {
  std::string name;
  int passes = 0;  // over the logits, of which memory makes the floor
  bool restores = false;
  std::function<void(const Input&)> run;
};

CrossEntropyOptions options_with(Overwrite overwrite) {
  CrossEntropyOptions options;
  options.overwrite = overwrite;
  return options;
}

void forward_and_backward(const Input& input, Overwrite overwrite) {
  const at::Tensor loss = cross_entropy(input.logits, input.labels, group_or_solo(std::nullopt),
                                        options_with(overwrite));
  torch::autograd::grad({loss}, {input.logits});
}

bool with_huge_pages() {
  const char* value = std::getenv("THP_MEM_ALLOC_ENABLE");
  return value != nullptr && std::string(value) == "1";
}

std::vector<Case> cases() {
  const std::string torch = with_huge_pages() ? "torch_huge_pages" : "torch";
  std::vector<Case> all{
      {"vocab/cross_entropy/forward", 1, false,
       [](const Input& input) {
         const at::NoGradGuard no_grad;
         cross_entropy(input.logits, input.labels, group_or_solo(std::nullopt));
       }},
      {"vocab/cross_entropy/forward_scores", 1, false,
       [](const Input& input) {
         const at::NoGradGuard no_grad;
         auto options = options_with(Overwrite::kNever);
         options.label_smoothing = 0.1;
         cross_entropy_with_scores(input.logits, input.labels, group_or_solo(std::nullopt),
                                   {false, true, true, false}, options);
       }},
      {"vocab/cross_entropy/overwrite_in_forward", 2, true,
       [](const Input& input) { forward_and_backward(input, Overwrite::kInForward); }},
      {"vocab/cross_entropy/overwrite_in_backward", 3, true,
       [](const Input& input) { forward_and_backward(input, Overwrite::kInBackward); }},
      {"vocab/cross_entropy/new_gradient", 3, false,
       [](const Input& input) { forward_and_backward(input, Overwrite::kNever); }},
      {torch + "/cross_entropy/forward", 1, false,
       [](const Input& input) {
         const at::NoGradGuard no_grad;
         at::cross_entropy_loss(input.logits, input.labels);
       }},
      {torch + "/cross_entropy/new_gradient", 3, false,
       [](const Input& input) {
         torch::autograd::grad({at::cross_entropy_loss(input.logits, input.labels)},
                               {input.logits});
       }},
  };
  if (with_huge_pages()) all.erase(all.begin(), all.end() - 2);
  return all;
}

/// Compares every way of writing the gradient with LibTorch's in float32.
bool is_right(const Input& input) {
  const at::Tensor some = input.labels.slice(0, 0, 16);
  const at::Tensor expected_input =
      input.source.slice(0, 0, 16).to(at::kFloat).requires_grad_(true);
  const at::Tensor expected = at::cross_entropy_loss(expected_input, some);
  const at::Tensor gradient = torch::autograd::grad({expected}, {expected_input})[0];
  for (const auto overwrite : {Overwrite::kNever, Overwrite::kInBackward, Overwrite::kInForward}) {
    const at::Tensor logits = input.source.slice(0, 0, 16).clone().requires_grad_(true);
    const at::Tensor loss =
        cross_entropy(logits, some, group_or_solo(std::nullopt), options_with(overwrite));
    const at::Tensor ours = torch::autograd::grad({loss}, {logits})[0].to(at::kFloat);
    if (std::fabs(loss.item<double>() - expected.item<double>()) > 1e-5 ||
        !at::allclose(gradient, ours, 1e-2, 1e-8)) {
      return false;
    }
  }
  return true;
}

void measure(const Case& row, const Input& input, const std::string& shape, int repetitions,
             double copy_gbps) {
  std::vector<double> times;
  for (int i = 0; i < repetitions + 3; ++i) {
    if (row.restores) {
      const at::NoGradGuard no_grad;
      input.logits.detach().copy_(input.source);
    }
    const auto begin = Clock::now();
    row.run(input);
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    if (i >= 3) times.push_back(us);
  }
  RowLabel label;
  label.name = row.name + "/" + shape;
  label.threads = at::get_num_threads();
  label.isa = kernels::name_of(kernels::active_isa());
  label.bytes = input.logits.nbytes();
  label.copy_gbps = copy_gbps;
  label.floor_us = row.passes * static_cast<double>(input.logits.nbytes()) / (copy_gbps * 1e3);
  print_row(label, times);
}

int run(int repetitions) {
  const cli::MemorySpeed speed =
      cli::measure_memory(at::get_num_threads(), std::size_t{128} << 20, 7);
  for (const auto& [rows, vocab] :
       {std::pair<std::int64_t, std::int64_t>{2048, 32000}, {512, 128256}}) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      at::manual_seed(1);
      Input input;
      input.source = (at::randn({rows, vocab}) * 2).to(type);
      input.logits = input.source.clone().requires_grad_(true);
      input.labels = at::randint(vocab, {rows}, at::kLong);
      if (!is_right(input)) {
        std::fprintf(stderr, "error: cross entropy is wrong; a wrong kernel has no speed\n");
        return 1;
      }
      const std::string shape = std::string(type == at::kFloat ? "f32" : "bf16") + "_n" +
                                std::to_string(rows) + "_v" + std::to_string(vocab);
      for (const Case& row : cases()) {
        measure(row, input, shape, repetitions, speed.copy / 1e9);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  int repetitions = 15;
  if (argc == 3 && std::string(argv[1]) == "--repetitions") repetitions = std::atoi(argv[2]);
  return tessera::bench::run(repetitions);
}
