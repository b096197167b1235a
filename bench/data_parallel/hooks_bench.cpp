// Times what the communication hooks do with the gradients of one model, without the backward that
// would hide a part of it: 12 layers of 1024 (12.6 million parameters), in buckets of 25 MiB, over
// shared memory and over LibTorch's Gloo. `bytes` is what a rank hands to collectives per step.
//
//   ddp/hook/<hook>/<engine>    the peer is all_reduce over gloo: what torch's wrapper does
//
//   hooks_bench [--ranks N] [--layers N] [--width N] [--seconds S] [--hook NAME]

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "kernels/dispatch.h"
#include "support/rank_bench.h"
#include "support/rank_groups.h"
#include "support/row.h"
#include "tessera/data_parallel/deterministic.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/gradient_clipping.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/optimizer_in_backward.h"
#include "tessera/data_parallel/powersgd.h"

namespace tessera::bench {
namespace {

using namespace data_parallel;

constexpr std::int64_t kBucketBytes = 25 << 20;

struct Settings {
  std::int64_t layers = 12;
  std::int64_t width = 1024;
  double seconds = 1.5;
  std::string only = {};  // one hook, by its name; all if empty
};

/// The buckets of one step, last layer first.
std::vector<Bucket> buckets_of(const Settings& settings, const comm::Group& group) {
  std::vector<std::vector<std::pair<std::string, at::Tensor>>> cuts(1);
  std::int64_t bytes = 0;
  for (std::int64_t layer = settings.layers - 1; layer >= 0; --layer) {
    for (const at::Tensor& parameter :
         {at::zeros({settings.width}), at::zeros({settings.width, settings.width})}) {
      cuts.back().emplace_back(
          std::to_string(layer).append(parameter.dim() == 1 ? ".bias" : ".weight"), parameter);
      bytes += static_cast<std::int64_t>(parameter.nbytes());
    }
    if (bytes >= kBucketBytes && layer > 0) {
      cuts.emplace_back();
      bytes = 0;
    }
  }
  std::vector<Bucket> buckets;
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters;
    std::int64_t length = 0;
    for (const auto& [name, parameter] : cuts[i]) {
      names.push_back(name);
      parameters.push_back(parameter);
      length += parameter.numel();
    }
    buckets.emplace_back(i, i + 1 == cuts.size(), at::randn({length}), names, parameters, group,
                         group.size());
  }
  return buckets;
}

class HooksBench {
 public:
  HooksBench(RankBench& bench, const Settings& settings)
      : bench_(bench), settings_(settings), groups_(bench) {}

  void run() {
    const comm::Group shm = groups_.of(comm::Engine::kShm, "shm");
    const comm::Group gloo = groups_.plain_gloo("gloo");
    const std::vector<std::pair<std::string, std::function<HookPtr()>>> hooks = {
        {"all_reduce", &all_reduce_hook},
        {"fp16", &fp16_compress_hook},
        {"bf16", &bf16_compress_hook},
        {"bytes_per_tensor", &quantization_per_tensor_hook},
        {"bytes_per_channel", [] { return quantization_per_channel_hook(); }},
        {"int8_error_feedback", &int8_error_feedback_hook},
        {"power_sgd_1", []() -> HookPtr { return power_sgd_hook({.start_step = 0}); }},
        {"power_sgd_4",
         []() -> HookPtr {
           return power_sgd_hook({.matrix_approximation_rank = 4, .start_step = 0});
         }},
        {"batched_power_sgd_1",
         []() -> HookPtr { return power_sgd_hook({.start_step = 0, .batched = true}); }},
        {"deterministic", &deterministic_hook},
        {"finite_check", []() -> HookPtr { return finite_check_hook(all_reduce_hook()); }},
        {"clipping",
         []() -> HookPtr { return clipping_hook(all_reduce_hook(), {.max_norm = 1e9}); }},
        {"adam_in_backward",
         [] { return hook_then_optimizer(all_reduce_hook(), adam_in_backward({})); }}};
    for (const auto& [engine, group] : {std::pair("shm", shm), std::pair("gloo", gloo)}) {
      for (const auto& [name, make] : hooks) {
        if (settings_.only.empty() || name == settings_.only) time(name, engine, make(), group);
      }
    }
    bench_.meet();
  }

 private:
  void time(const std::string& name, const std::string& engine, const HookPtr& hook,
            const comm::Group& group) {
    std::vector<Bucket> buckets = buckets_of(settings_, group);
    const auto step = [&] {
      std::vector<FuturePtr> futures;
      for (Bucket& bucket : buckets) futures.push_back(hook->reduce(bucket));
      hook->end_step();
      for (const FuturePtr& future : futures) future->waitAndThrow();
    };
    step();
    const std::int64_t before = hook->bytes_sent();
    step();
    const std::int64_t bytes = hook->bytes_sent() - before;
    const Samples samples = bench_.measure(step, 1, settings_.seconds);
    std::vector<double> all = samples.near;
    all.insert(all.end(), samples.far.begin(), samples.far.end());
    if (bench_.rank() != 0) return;
    RowLabel label;
    label.name = "ddp/hook/" + name + "/" + engine + "_l" + std::to_string(settings_.layers) +
                 "_w" + std::to_string(settings_.width) + "_p" + std::to_string(bench_.size());
    label.ranks = bench_.size();
    label.isa = kernels::name_of(kernels::active_isa());
    label.bytes = static_cast<std::size_t>(bytes);
    label.others = samples.others;
    print_row(label, all);
  }

  RankBench& bench_;
  Settings settings_;
  RankGroups groups_;
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--layers") settings.layers = std::atoll(argv[i + 1]);
    if (flag == "--width") settings.width = std::atoll(argv[i + 1]);
    if (flag == "--seconds") settings.seconds = std::atof(argv[i + 1]);
    if (flag == "--hook") settings.only = argv[i + 1];
  }
  return settings;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  const Settings settings = read_settings(argc, argv);
  return run_ranks(argc, argv, {2}, [&](RankBench& bench) {
    at::set_num_threads(1);
    HooksBench(bench, settings).run();
  });
}
