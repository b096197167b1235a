// Processes that end right after the last step of a hook.

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "data_parallel/hook_steps.h"
#include "support/rank_processes.h"
#include "tessera/data_parallel/deterministic.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/gradient_clipping.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/optimizer_in_backward.h"
#include "tessera/data_parallel/powersgd.h"

namespace tessera::data_parallel {
namespace {

using tessera::testing::RankProcesses;
using namespace testing;

class HooksAtExit : public ::testing::TestWithParam<comm::Engine> {};

// Steps run on a thread of the group. What they hold, the group among it, must have gone when the
// result is known: after that the program may end.
TEST_P(HooksAtExit, NothingOfAStepOutlivesItsResult) {
  const std::vector<std::function<HookPtr()>> cases = {
      &all_reduce_hook,
      &fp16_compress_hook,
      &quantization_per_tensor_hook,
      [] { return quantization_per_channel_hook(16); },
      &int8_error_feedback_hook,
      &deterministic_hook,
      []() -> HookPtr { return power_sgd_hook({.start_step = 0, .min_compression_rate = 0}); },
      []() -> HookPtr {
        return clipping_hook(finite_check_hook(all_reduce_hook()), {.max_norm = 1});
      },
      [] { return hook_then_optimizer(all_reduce_hook(), sgd_in_backward({.lr = 0.1})); },
      [] { return hook_then_optimizer(fp16_compress_hook(), adamw_in_backward({.lr = 0.1})); },
      [] { return hook_then_zero_step(all_reduce_hook(), adam_in_backward({.lr = 0.1})); }};
  RankProcesses ranks;
  for (const auto& make : cases) {
    std::optional<c10::weak_intrusive_ptr<c10d::ProcessGroup>> seen;
    std::string name;
    const auto body = [&](const comm::Group& group) {
      seen.emplace(group.process_group());
      const Model model = small_model();
      const HookPtr hook = make();
      name = hook->name();
      for (int step = 0; step < 3; ++step) {
        run_step(*hook, model, gradients_of(model, group.rank(), step), kManyBuckets, group);
      }
    };
    ranks.run(2, body, {.engine = GetParam(), .timeout = std::chrono::seconds(60)});
    EXPECT_TRUE(!seen || seen->expired()) << name << ": a thread still holds the group";
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, HooksAtExit,
                         ::testing::Values(comm::Engine::kShm, comm::Engine::kGloo));

}  // namespace
}  // namespace tessera::data_parallel
