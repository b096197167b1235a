#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <torch/nn/modules/linear.h>

#include "data_parallel/hook_steps.h"
#include "support/error_text.h"
#include "support/ranks.h"
#include "tessera/data_parallel/deterministic.h"
#include "tessera/data_parallel/fingerprint.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/gradient_clipping.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/mixed_precision.h"
#include "tessera/data_parallel/model_averaging.h"
#include "tessera/data_parallel/powersgd.h"

namespace tessera::data_parallel {
namespace {

using comm::Engine;
using comm::Group;
using tessera::testing::error_text;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;
using namespace testing;

TEST(PostLocalSgd, AveragesOverAllThenOverTheSubgroup) {
  run_ranks(4, [](const Group& group) {
    const int first = group.rank() / 2 * 2;
    auto low = group.subgroup({0, 1}, "low");
    auto high = group.subgroup({2, 3}, "high");
    const Group mine = low ? *low : *high;
    const HookPtr hook = post_local_sgd_hook({.subgroup = mine, .start_step = 2});
    const Model model = small_model();
    for (int step = 0; step < 4; ++step) {
      const auto results =
          run_step(*hook, model, gradients_of(model, group.rank(), step), kManyBuckets, group);
      const at::Tensor pair =
          (gradient_of(model, 0, first, step) + gradient_of(model, 0, first + 1, step)) / 2;
      const at::Tensor expected = step < 2 ? average_of(model, 4, step)[0] : pair;
      EXPECT_LE((results[0] - expected).abs().max().item<double>(), 1e-6) << "step " << step;
    }
    EXPECT_EQ(hook->state().numbers.at("step"), 4);
  });
}

TEST(PostLocalSgd, MayLeaveGradientsAlone) {
  run_ranks(2, [](const Group& group) {
    const HookPtr hook = post_local_sgd_hook({.start_step = 0, .reduce_in_subgroup = false});
    const Model model = small_model();
    const auto gradients = gradients_of(model, group.rank(), 0);
    EXPECT_TRUE(same_bits(run_step(*hook, model, gradients, kManyBuckets, group), gradients));
    HookState saved{.tensors = {}, .numbers = {{"step", 7}}};
    hook->load_state(saved);
    EXPECT_EQ(hook->state().numbers.at("step"), 7);
  });
}

TEST(ModelAveraging, EveryPeriodAfterTheWarmUp) {
  run_ranks(3, [](const Group& group) {
    PeriodicModelAverager averager(group, 2, 1);
    const std::vector<at::Tensor> parameters = {at::full({2, 3}, group.rank(), at::kFloat).t(),
                                                at::full({}, group.rank(), at::kDouble),
                                                at::zeros({0})};
    std::vector<bool> averaged;
    for (int step = 0; step < 5; ++step) {
      for (std::size_t i = 0; i < 2; ++i) at::Tensor(parameters[i]).fill_(group.rank());
      averager.average_parameters(parameters);
      const bool is_averaged = parameters[0].eq(1).all().item<bool>();
      EXPECT_EQ(parameters[1].item<double>(), is_averaged ? 1 : group.rank());
      averaged.push_back(is_averaged);
    }
    if (group.rank() != 1) {
      EXPECT_EQ(averaged, (std::vector<bool>{false, true, false, true, false}));
    }
    EXPECT_EQ(averager.step(), 5);
  });
}

TEST(ModelAveraging, LargerGroupsMoreRarely) {
  run_ranks(4, [](const Group& group) {
    HierarchicalModelAverager averager(
        HierarchicalModelAverager::blocks_of(group, {{2, 2}, {4, 4}}), 1);
    const at::Tensor parameter = at::zeros({3});
    const double pair = group.rank() / 2 * 2 + 0.5;
    const std::vector<double> expected = {static_cast<double>(group.rank()),
                                          static_cast<double>(group.rank()), pair,
                                          static_cast<double>(group.rank()), 1.5};
    for (int step = 0; step < 5; ++step) {
      at::Tensor(parameter).fill_(group.rank());
      averager.average_parameters({parameter});
      EXPECT_EQ(parameter[0].item<double>(), expected[step]) << "step " << step;
    }
  });
}

TEST(ModelAveraging, WrongOptionsAreNamed) {
  run_ranks(1, [](const Group& group) {
    EXPECT_EQ(error_text([&] { PeriodicModelAverager(group, 0); }),
              "ddp.model_averager: a period of 0 steps. It must be at least 1.");
    EXPECT_EQ(error_text([&] { PeriodicModelAverager(group, 1, -1); }),
              "ddp.model_averager: -1 steps of warm-up. It cannot be negative.");
    EXPECT_EQ(error_text([&] { HierarchicalModelAverager({}); }),
              "ddp.hierarchical_averager: no levels.");
    EXPECT_EQ(error_text([&] { HierarchicalModelAverager({{0, group}}); }),
              "ddp.hierarchical_averager: a period of 0 steps. It must be at least 1.");
    EXPECT_EQ(error_text([&] { HierarchicalModelAverager({{4, group}, {2, group}}); }),
              "ddp.hierarchical_averager: periods must ascend, but 4 comes before 2.");
    EXPECT_EQ(error_text([&] { HierarchicalModelAverager({{4, group}}, -2); }),
              "ddp.hierarchical_averager: -2 steps of warm-up. It cannot be negative.");
    EXPECT_EQ(error_text([&] { HierarchicalModelAverager::blocks_of(group, {{2, 2}}); }),
              "ddp.hierarchical_averager: the last level has 2 ranks, but the group has 1.");
    EXPECT_EQ(error_text([&] { HierarchicalModelAverager::blocks_of(group, {{2, 2}, {4, 1}}); }),
              "ddp.hierarchical_averager: blocks of 2 ranks do not nest: each size must divide the "
              "next.");
    EXPECT_EQ(error_text([&] { post_local_sgd_hook({}); }),
              "ddp.post_local_sgd: no subgroup. Give one, or set reduce_in_subgroup to false.");
    EXPECT_EQ(error_text([&] { post_local_sgd_hook({.subgroup = group, .start_step = -1}); }),
              "ddp.post_local_sgd: local steps cannot start at step -1.");
    EXPECT_EQ(error_text([&] { post_local_sgd_hook({.subgroup = group})->load_state({}); }),
              "ddp.post_local_sgd: the state has no 'step'.");
    EXPECT_EQ(error_text([&] { average_parameters({at::zeros({2}, at::kInt)}, group); }),
              "ddp.average_parameters: Int has no average.");
  });
}

std::vector<at::Tensor> with_a_bad_number(const Model& model, const Group& group, double number) {
  auto gradients = gradients_of(model, group.rank(), 0);
  if (group.rank() == 1) gradients[3][2][5] = number;
  return gradients;
}

TEST(FiniteCheck, RaisesTheSameOnAllRanksAndGoesOn) {
  for (const int size : {2, 3, 4}) {
    const auto errors = run_ranks_collecting(size, [](const Group& group) {
      const Model model = small_model();
      const auto hook = finite_check_hook(all_reduce_hook());
      // A clean step first and after.
      run_step(*hook, model, gradients_of(model, group.rank(), 0), kManyBuckets, group);
      EXPECT_TRUE(hook->found().empty());
      const auto bad = with_a_bad_number(model, group, std::nan(""));
      std::string text;
      try {
        run_step(*hook, model, bad, kManyBuckets, group);
      } catch (const c10::Error& error) {
        text = error.what_without_backtrace();
      }
      hook->reset();
      const auto results =
          run_step(*hook, model, gradients_of(model, group.rank(), 1), kManyBuckets, group);
      EXPECT_LE(largest_difference(results, average_of(model, group.size(), 1)), 1e-6);
      TORCH_CHECK(false, text);
    });
    for (const auto& error : errors) {
      EXPECT_EQ(text_of(error),
                "ddp.finite_check: step 2: rank 1 has NaN in the gradient of 'mix'. It has not "
                "reached the other ranks; this step's gradients are void.");
    }
  }
}

TEST(FiniteCheck, SkipsTheStepOnAllRanks) {
  run_ranks(3, [](const Group& group) {
    const Model model = small_model();
    const auto hook =
        finite_check_hook(power_sgd_hook({.matrix_approximation_rank = 2, .start_step = 0}),
                          NonFinitePolicy::kSkipStep);
    const double infinity = std::numeric_limits<double>::infinity();
    const auto results =
        run_step(*hook, model, with_a_bad_number(model, group, infinity), kManyBuckets, group);
    EXPECT_TRUE(hook->skip_step());
    ASSERT_EQ(hook->found().size(), 1U);
    EXPECT_EQ(hook->found()[0].rank, 1);
    EXPECT_EQ(hook->found()[0].parameter, "mix");
    EXPECT_FALSE(hook->found()[0].is_nan);
    for (const at::Tensor& result : results) EXPECT_TRUE(at::isfinite(result).all().item<bool>());
    run_step(*hook, model, gradients_of(model, group.rank(), 1), kManyBuckets, group);
    EXPECT_FALSE(hook->skip_step());
  });
}

TEST(FiniteCheck, ZeroesTheBucketOfThatRank) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto hook = finite_check_hook(all_reduce_hook(), NonFinitePolicy::kZeroRank);
    const auto results =
        run_step(*hook, model, with_a_bad_number(model, group, std::nan("")), kManyBuckets, group);
    EXPECT_TRUE(at::equal(results[3], gradient_of(model, 3, 0, 0) / 2));
    EXPECT_LE((results[0] - average_of(model, 2, 0)[0]).abs().max().item<double>(), 1e-6);
    EXPECT_FALSE(hook->skip_step());
    EXPECT_EQ(hook->found().size(), 1U);
  });
}

TEST(FiniteCheck, LargeFiniteNumbersPass) {
  run_ranks(1, [](const Group& group) {
    const Model model = small_model();
    auto gradients = gradients_of(model, 0, 0);
    gradients[3].fill_(3e38);  // finite, but their sum is not
    const auto hook = finite_check_hook(noop_hook());
    EXPECT_TRUE(same_bits(run_step(*hook, model, gradients, kManyBuckets, group), gradients));
  });
}

TEST(Deterministic, TheSameBitsWhateverTheBuckets) {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    for (int size = 1; size <= 4; ++size) {
      run_ranks(
          size,
          [](const Group& group) {
            const Model model = small_model();
            const HookPtr hook = deterministic_hook();
            const auto gradients = gradients_of(model, group.rank(), 0);
            const auto one = run_step(*hook, model, gradients, kOneBucket, group);
            const auto many = run_step(*hook, model, gradients, kManyBuckets, group);
            const auto pairs =
                run_step(*hook, model, gradients, {{6, 5, 4}, {3, 0}, {2, 1}}, group);
            EXPECT_TRUE(same_bits(one, many));
            EXPECT_TRUE(same_bits(one, pairs));
            // In rank order, then divided.
            for (std::size_t i = 0; i < one.size(); ++i) {
              at::Tensor sum = gradient_of(model, i, 0, 0);
              for (int rank = 1; rank < group.size(); ++rank) sum += gradient_of(model, i, rank, 0);
              EXPECT_TRUE(at::equal(one[i], sum / group.size()));
            }
          },
          test_options(engine));
    }
  }
}

TEST(Clipping, EqualsClippingTheAverage) {
  for (const double type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    run_ranks(3, [&](const Group& group) {
      const Model model = small_model();
      const auto exact = average_of(model, 3, 0);
      std::vector<at::Tensor> norms;
      for (const at::Tensor& gradient : exact) {
        norms.push_back(gradient.numel() == 0 ? at::zeros({})
                                              : at::linalg_vector_norm(gradient, type));
      }
      const double total = at::linalg_vector_norm(at::stack(norms), type).item<double>();
      for (const double max_norm : {total / 4, total * 4}) {
        const auto hook =
            clipping_hook(all_reduce_hook(), {.max_norm = max_norm, .norm_type = type});
        const auto results =
            run_step(*hook, model, gradients_of(model, group.rank(), 0), kManyBuckets, group);
        EXPECT_NEAR(hook->total_norm(), total, 1e-5 * total);
        const double scale = std::min(1.0, max_norm / (total + 1e-6));
        for (std::size_t i = 0; i < exact.size(); ++i) {
          if (exact[i].numel() == 0) continue;
          EXPECT_LE((results[i] - scale * exact[i]).abs().max().item<double>(), 1e-5);
        }
      }
    });
  }
}

TEST(Clipping, WorksOnHooksThatCompleteAtTheEnd) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const PowerSgdOptions options{.matrix_approximation_rank = 2, .start_step = 0};
    const auto plain = run_step(*power_sgd_hook(options), model,
                                gradients_of(model, group.rank(), 0), kManyBuckets, group);
    const auto hook = clipping_hook(power_sgd_hook(options), {.max_norm = 0.5});
    const auto clipped =
        run_step(*hook, model, gradients_of(model, group.rank(), 0), kManyBuckets, group);
    const double scale = 0.5 / (hook->total_norm() + 1e-6);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      if (plain[i].numel() == 0) continue;
      EXPECT_LE((clipped[i] - scale * plain[i]).abs().max().item<double>(), 1e-6);
    }
  });
}

TEST(Clipping, SaysWhatIsWrong) {
  EXPECT_EQ(error_text([] { clipping_hook(all_reduce_hook(), {.max_norm = 0}); }),
            "ddp.clipping: a largest norm of 0. It must be positive.");
  EXPECT_EQ(error_text([] { clipping_hook(all_reduce_hook(), {.norm_type = -1}); }),
            "ddp.clipping: norm type -1. It must be positive.");
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto hook = clipping_hook(all_reduce_hook(), {.error_if_nonfinite = true});
    EXPECT_EQ(error_text([&] {
                run_step(*hook, model, with_a_bad_number(model, group, std::nan("")), kManyBuckets,
                         group);
              }),
              "ddp.clipping: the norm of the gradients is nan. They cannot be clipped.");
    run_step(*hook, model, gradients_of(model, group.rank(), 0), kManyBuckets, group);
    EXPECT_LT(hook->total_norm(), 100);
  });
}

TEST(Fingerprint, ComparesEverySoOften) {
  run_ranks(3, [](const Group& group) {
    ReplicaFingerprint check(group, 2);
    const Model model = model_with_values();
    EXPECT_FALSE(check.check(model.names, model.parameters));
    EXPECT_TRUE(check.check(model.names, model.parameters));
    EXPECT_EQ(check.step(), 2);
  });
}

TEST(Fingerprint, NamesTheParameterAndTheRanks) {
  const auto errors = run_ranks_collecting(4, [](const Group& group) {
    ReplicaFingerprint check(group, 1);
    const Model model = model_with_values();
    check.check(model.names, model.parameters);
    if (group.rank() == 2) at::Tensor(model.parameters[3])[1][1].add_(1e-6);
    check.check(model.names, model.parameters);
  });
  for (const auto& error : errors) {
    const std::string text = text_of(error);
    EXPECT_EQ(text, text_of(errors[0]));
    EXPECT_EQ(text.rfind("ddp.fingerprint: the replicas differ in step 2: 'mix' (ranks 0, 1, 3 "
                         "hold ",
                         0),
              0U)
        << text;
    EXPECT_NE(text.find(", ranks 2 hold "), std::string::npos) << text;
  }
}

TEST(Fingerprint, DependsOnValuesNotOnLayout) {
  const at::Tensor values = at::randn({3, 5, 2, 7});
  EXPECT_EQ(fingerprint(values), fingerprint(values.contiguous(at::MemoryFormat::ChannelsLast)));
  EXPECT_NE(fingerprint(values), fingerprint(values.view({5, 3, 2, 7})));
  at::Tensor other = values.clone();
  other.view(-1)[209] += 1;
  EXPECT_NE(fingerprint(values), fingerprint(other));
  EXPECT_NE(fingerprint(at::zeros({0})), fingerprint(at::zeros({1})));
  EXPECT_NE(fingerprint(at::zeros({1})), fingerprint(at::zeros({1}, at::kInt)));
  run_ranks(1, [](const Group& group) {
    EXPECT_EQ(error_text([&] { ReplicaFingerprint(group, 0); }),
              "ddp.fingerprint: every 0 steps. It must be at least 1.");
    EXPECT_EQ(error_text([&] { ReplicaFingerprint(group, 1).check({"w"}, {}); }),
              "ddp.fingerprint: 1 names for 0 parameters.");
  });
}

ModelParts parts_of_linear(torch::nn::Linear& linear) {
  return {.name = "linear",
          .parameters = {{"weight", linear->weight}, {"bias", linear->bias}},
          .buffers = {}};
}

TEST(MixedPrecision, GradientsArriveInFullPrecision) {
  torch::nn::Linear linear(6, 3);
  const at::Tensor weight = linear->weight.detach().clone();
  {
    MixedPrecision precision(parts_of_linear(linear), {.param_dtype = at::kBFloat16});
    ASSERT_EQ(precision.parameters().size(), 2U);
    EXPECT_TRUE(at::equal(precision.parameters()[0], weight));
    const at::Tensor input = at::randn({4, 6});
    precision.before_forward();
    EXPECT_EQ(linear->weight.scalar_type(), at::kBFloat16);
    const at::Tensor output = linear->forward(precision.cast_input(input));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.to(at::kFloat).sum().backward();
    const at::Tensor gradient = precision.parameters()[0].grad();
    EXPECT_EQ(gradient.scalar_type(), at::kFloat);
    const at::Tensor exact = input.to(at::kBFloat16).to(at::kFloat).sum(0).expand({3, 6});
    EXPECT_LE((gradient - exact).abs().max().item<double>(), 0.05);
    // A step on the master shows in the next forward.
    {
      const at::NoGradGuard no_grad;
      precision.parameters()[0].add_(1);
    }
    precision.before_forward();
    EXPECT_TRUE(at::equal(linear->weight.detach(), (weight + 1).to(at::kBFloat16)));
    // Integers are not touched.
    EXPECT_EQ(precision.cast_input(at::ones({1}, at::kLong)).scalar_type(), at::kLong);
  }
  EXPECT_EQ(linear->weight.scalar_type(), at::kFloat);
  EXPECT_TRUE(linear->weight.is_leaf() && linear->weight.requires_grad());
  EXPECT_TRUE(at::equal(linear->weight.detach(), weight + 1));
}

TEST(MixedPrecision, SeveralForwardsMayPrecedeABackward) {
  torch::nn::Linear linear(2, 1);
  MixedPrecision precision(parts_of_linear(linear), {.param_dtype = at::kHalf});
  const at::Tensor input = at::ones({1, 2}).requires_grad_();
  precision.before_forward();
  const at::Tensor one = linear->forward(precision.cast_input(input)).sum();
  precision.before_forward();
  const at::Tensor two = linear->forward(precision.cast_input(input)).sum();
  (one + 2 * two).backward();
  EXPECT_TRUE(at::equal(precision.parameters()[0].grad(), at::full({1, 2}, 3.0F)));
}

TEST(MixedPrecision, ReducesAndKeepsBuffersInOtherTypes) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear linear(2, 1);
    const at::Tensor running = at::ones({3});
    const at::Tensor count = at::ones({1}, at::kLong);
    ModelParts parts = parts_of_linear(linear);
    parts.buffers = [&] {
      return std::vector<NamedTensor>{{"running", running}, {"count", count}};
    };
    MixedPrecision precision(parts, {.reduce_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16});
    EXPECT_EQ(running.scalar_type(), at::kBFloat16);
    EXPECT_EQ(count.scalar_type(), at::kLong);
    EXPECT_TRUE(precision.parameters()[0].is_same(linear->weight));
    EXPECT_EQ(precision.hook()->name(), "BFloat16_compress");
    const Model model = small_model();
    const auto results = run_step(*precision.hook(), model, gradients_of(model, group.rank(), 0),
                                  kManyBuckets, group);
    EXPECT_LE(largest_difference(results, average_of(model, 2, 0)), 8.0 / 256);
  });
  torch::nn::Linear linear(2, 1);
  EXPECT_EQ(error_text([&] { MixedPrecision(parts_of_linear(linear), {.param_dtype = at::kInt}); }),
            "ddp.mixed_precision: param_dtype is Int, which is not a floating type. Use float16, "
            "bfloat16 or float32.");
}

}  // namespace
}  // namespace tessera::data_parallel
