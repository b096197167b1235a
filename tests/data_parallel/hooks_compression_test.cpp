#include <gtest/gtest.h>

#include <limits>

#include "data_parallel/hook_steps.h"
#include "support/error_text.h"
#include "support/ranks.h"
#include "tessera/data_parallel/hooks.h"
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

struct Place {
  int size;
  Engine engine;
};

std::string place_name(const ::testing::TestParamInfo<Place>& info) {
  return std::to_string(info.param.size)
      .append(info.param.engine == Engine::kGloo ? "Gloo" : "Shm");
}

class Hooks : public ::testing::TestWithParam<Place> {
 protected:
  /// Runs two steps in many buckets on every rank and compares with the average.
  void expect_average(HookPtr (*make)(), double tolerance) {
    const Place place = GetParam();
    run_ranks(
        place.size,
        [&](const Group& group) {
          const HookPtr hook = make();
          const Model model = small_model();
          for (int step = 0; step < 2; ++step) {
            const auto results = run_step(*hook, model, gradients_of(model, group.rank(), step),
                                          kManyBuckets, group);
            EXPECT_LE(largest_difference(results, average_of(model, group.size(), step)), tolerance)
                << hook->name();
          }
        },
        test_options(place.engine));
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, Hooks,
                         ::testing::Values(Place{1, Engine::kShm}, Place{2, Engine::kShm},
                                           Place{3, Engine::kShm}, Place{4, Engine::kShm},
                                           Place{2, Engine::kGloo}, Place{3, Engine::kGloo}),
                         place_name);

TEST_P(Hooks, AllReduceAverages) { expect_average(&all_reduce_hook, 1e-6); }
// Values reach 4: a rounding of 2^-11 (2^-8) relative, once per rank and once for the sum.
TEST_P(Hooks, Fp16Averages) { expect_average(&fp16_compress_hook, 8.0 / 2048); }
TEST_P(Hooks, Bf16AveragesAlsoOnGloo) { expect_average(&bf16_compress_hook, 8.0 / 256); }
// Half a level of a range of about 8 in 255.
TEST_P(Hooks, BytesPerTensorAverage) { expect_average(&quantization_per_tensor_hook, 0.02); }
TEST_P(Hooks, BytesPerChannelAverage) {
  expect_average([] { return quantization_per_channel_hook(16); }, 0.02);
}
TEST_P(Hooks, SignedBytesAverage) {
  // The second step also carries the first one's loss: one level instead of half.
  expect_average(&int8_error_feedback_hook, 0.04);
}

TEST_P(Hooks, FullRankPowerSgdIsExactInManyBuckets) {
  expect_average(
      []() -> HookPtr {
        return power_sgd_hook(
            {.matrix_approximation_rank = 64, .start_step = 0, .min_compression_rate = 0});
      },
      1e-4);
}

TEST_P(Hooks, FullRankBatchedPowerSgdIsExact) {
  expect_average(
      []() -> HookPtr {
        return power_sgd_hook({.matrix_approximation_rank = 64, .start_step = 0, .batched = true});
      },
      1e-4);
}

TEST(Hook, NoopKeepsOwnGradients) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto gradients = gradients_of(model, group.rank(), 0);
    const HookPtr hook = noop_hook();
    EXPECT_TRUE(same_bits(run_step(*hook, model, gradients, kManyBuckets, group), gradients));
    EXPECT_EQ(hook->bytes_sent(), 0);
  });
}

TEST(Hook, TheDivisorInForceCounts) {
  run_ranks(3, [](const Group& group) {
    // Rank 2 has run out of batches: zeros, and the sum is divided by two.
    const Model model = small_model();
    for (const HookPtr& hook :
         {all_reduce_hook(), fp16_compress_hook(), quantization_per_channel_hook(),
          int8_error_feedback_hook(),
          HookPtr(power_sgd_hook(
              {.matrix_approximation_rank = 64, .start_step = 0, .min_compression_rate = 0}))}) {
      std::vector<at::Tensor> gradients = gradients_of(model, group.rank(), 0);
      if (group.rank() == 2) {
        for (at::Tensor& gradient : gradients) gradient.zero_();
      }
      const auto results = run_step(*hook, model, gradients, kManyBuckets, group, {.divisor = 2});
      EXPECT_LE(largest_difference(results, average_of(model, 2, 0)), 0.04) << hook->name();
    }
  });
}

TEST(Hook, BytesSentAreThoseOfTheCode) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    std::int64_t elements = 0;
    for (const at::Tensor& parameter : model.parameters) elements += parameter.numel();
    const auto bytes_of = [&](const HookPtr& hook) {
      run_step(*hook, model, gradients_of(model, group.rank(), 0), kOneBucket, group);
      return hook->bytes_sent();
    };
    EXPECT_EQ(bytes_of(all_reduce_hook()), 4 * elements);
    EXPECT_EQ(bytes_of(fp16_compress_hook()), 2 * elements);
    EXPECT_EQ(bytes_of(quantization_per_tensor_hook()), elements + 8);
    EXPECT_EQ(bytes_of(quantization_per_channel_hook(100)), elements + 8 * ((elements + 99) / 100));
    EXPECT_EQ(bytes_of(int8_error_feedback_hook()), elements + 4 * 7);
    // embed 12 x 9, conv 6 x 45 and twice 8 x 20 as vectors of rank 1; bias and scale as they are.
    EXPECT_EQ(bytes_of(power_sgd_hook({.start_step = 0})),
              4 * ((12 + 9) + (6 + 45) + 2 * (8 + 20) + 7 + 1));
  });
}

TEST(Hook, WrappersCompose) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto gradients = gradients_of(model, group.rank(), 0);
    const auto direct = run_step(*fp16_compress_hook(), model, gradients, kManyBuckets, group);
    const HookPtr wrapped = fp16_compress_wrapper(all_reduce_hook());
    EXPECT_TRUE(same_bits(run_step(*wrapped, model, gradients, kManyBuckets, group), direct));
    EXPECT_EQ(wrapped->name(), "Half_compress_wrapper(all_reduce)");
    // PowerSGD in bfloat16: its futures complete at the step's end, and the wrapper's after them.
    const HookPtr low = bf16_compress_wrapper(power_sgd_hook(
        {.matrix_approximation_rank = 64, .start_step = 0, .min_compression_rate = 0}));
    const auto results = run_step(*low, model, gradients, kManyBuckets, group);
    EXPECT_EQ(results[0].scalar_type(), at::kFloat);
    EXPECT_LE(largest_difference(results, average_of(model, 2, 0)), 0.2);
  });
}

TEST(Hook, CustomHooksAreFunctions) {
  run_ranks(2, [](const Group& group) {
    // Largest instead of average.
    const HookPtr hook = custom_hook("largest", [](Bucket& bucket) {
      std::vector<at::Tensor> tensors{bucket.buffer()};
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::MAX;
      return bucket.group().process_group()->allreduce(tensors, options)->getFuture();
    });
    const Model model = small_model();
    const auto results =
        run_step(*hook, model, gradients_of(model, group.rank(), 0), kManyBuckets, group);
    EXPECT_TRUE(at::equal(results[0],
                          at::maximum(gradient_of(model, 0, 0, 0), gradient_of(model, 0, 1, 0))));
  });
}

TEST(Hook, WhatRoundingLosesComesBack) {
  // The same gradients in every step: the mean over the steps approaches their average as 1/steps.
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto gradients = gradients_of(model, group.rank(), 0);
    const auto exact = average_of(model, 2, 0);
    for (const HookPtr& hook :
         {int8_error_feedback_hook(),
          HookPtr(power_sgd_hook({.matrix_approximation_rank = 2, .start_step = 0}))}) {
      std::vector<at::Tensor> sums = run_step(*hook, model, gradients, kManyBuckets, group);
      const double first = largest_difference(sums, exact);
      double after_20 = 0;
      for (int step = 1; step < 80; ++step) {
        const auto results = run_step(*hook, model, gradients, kManyBuckets, group);
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += results[i];
        if (step != 19 && step != 79) continue;
        std::vector<at::Tensor> means;
        for (const at::Tensor& sum : sums) means.push_back(sum / (step + 1));
        if (step == 19) {
          after_20 = largest_difference(means, exact);
          EXPECT_LT(after_20, first / 2) << hook->name();
        } else {
          EXPECT_LT(largest_difference(means, exact), after_20 / 2) << hook->name();
        }
      }
    }
  });
}

TEST(Hook, SignedBytesAreThoseOfTheOperators) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const HookPtr hook = int8_error_feedback_hook();
    std::vector<std::vector<at::Tensor>> losses(2);
    for (int step = 0; step < 3; ++step) {
      std::vector<at::Tensor> sums(model.parameters.size());
      for (int rank = 0; rank < 2; ++rank) {
        const auto gradients = gradients_of(model, rank, step);
        if (step == 0) {
          for (const at::Tensor& gradient : gradients) {
            losses[rank].push_back(at::zeros_like(gradient));
          }
        }
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          const at::Tensor value = gradients[i] + losses[rank][i];
          const at::Tensor scale = value.numel() == 0 ? at::ones({}) : value.abs().max() / 127;
          const at::Tensor kept = at::round(value / scale) * scale;
          losses[rank][i] = value - kept;
          sums[i] = rank == 0 ? kept : sums[i] + kept;
        }
      }
      for (at::Tensor& sum : sums) sum = sum / 2;
      const auto own = gradients_of(model, group.rank(), step);
      const auto state = hook->state();  // of the step before; later steps leave it alone
      const auto results = run_step(*hook, model, own, kManyBuckets, group);
      EXPECT_TRUE(same_bits(results, sums)) << step;
      EXPECT_EQ(state.tensors.empty(), step == 0);
      if (step == 0) continue;
      EXPECT_FALSE(
          at::equal(state.tensors.at("error/embed"), hook->state().tensors.at("error/embed")));
    }
  });
}

TEST(Hook, BytesRoundWithoutErrorFeedbackDoNotComeBack) {
  // What the test above would see if nothing were kept: the mean stays as far off as one step.
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto gradients = gradients_of(model, group.rank(), 0);
    const HookPtr hook = quantization_per_tensor_hook();
    const auto first = run_step(*hook, model, gradients, kOneBucket, group);
    EXPECT_TRUE(same_bits(run_step(*hook, model, gradients, kOneBucket, group), first));
  });
}

TEST(PowerSgd, SeesMatricesInTheirOwnLayout) {
  // The convolution's gradient has rank one as [out, in * height * width] but not in memory order,
  // which is channels_last. Rank one then is exact only through views with the right strides.
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    std::vector<at::Tensor> gradients = gradients_of(model, 0, 0);
    const at::Tensor column = at::arange(1, 7, at::kFloat).view({6, 1});
    const at::Tensor row = at::arange(1, 46, at::kFloat).view({1, 45});
    gradients[1] = ((group.rank() + 1) * column * row).view({6, 5, 3, 3});
    const auto hook = power_sgd_hook({.start_step = 0, .use_error_feedback = false});
    const auto results = run_step(*hook, model, gradients, kManyBuckets, group);
    const at::Tensor exact = (1.5 * column * row).view({6, 5, 3, 3});
    EXPECT_LE((results[1] - exact).abs().max().item<double>(), 1e-3);
    EXPECT_TRUE(results[1].is_contiguous(at::MemoryFormat::ChannelsLast));
  });
}

TEST(PowerSgd, StateOutlivesANewCutOfTheBuckets) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const PowerSgdOptions options{.matrix_approximation_rank = 2, .start_step = 1};
    const auto steady = power_sgd_hook(options);
    const auto rebuilt = power_sgd_hook(options);
    for (int step = 0; step < 4; ++step) {
      const auto gradients = gradients_of(model, group.rank(), step);
      const auto expected = run_step(*steady, model, gradients, kManyBuckets, group);
      const auto results =
          run_step(*rebuilt, model, gradients, step < 2 ? kOneBucket : kManyBuckets, group);
      EXPECT_LE(largest_difference(results, expected), 1e-5) << "step " << step;
    }
    EXPECT_EQ(rebuilt->step(), 4);
  });
}

TEST(PowerSgd, FlushingAfterEachBucketChangesNothing) {
  run_ranks(3, [](const Group& group) {
    const Model model = small_model();
    const PowerSgdOptions options{.matrix_approximation_rank = 2, .start_step = 0};
    const auto one = power_sgd_hook(options);
    const auto other = power_sgd_hook(options);
    for (int step = 0; step < 3; ++step) {
      const auto gradients = gradients_of(model, group.rank(), step);
      EXPECT_TRUE(
          same_bits(run_step(*one, model, gradients, kManyBuckets, group),
                    run_step(*other, model, gradients, kManyBuckets, group, {.flush = true})));
    }
  });
}

TEST(PowerSgd, RanksAgreeBitForBit) {
  run_ranks(4, [](const Group& group) {
    const Model model = small_model();
    const auto hook =
        power_sgd_hook({.matrix_approximation_rank = 3, .start_step = 0, .warm_start = false});
    const auto results =
        run_step(*hook, model, gradients_of(model, group.rank(), 0), kManyBuckets, group);
    for (at::Tensor result : results) {
      at::Tensor first = result.clone();
      std::vector<at::Tensor> tensors{first};
      group.process_group()->broadcast(tensors)->wait();
      EXPECT_TRUE(at::equal(first, result));
    }
  });
}

TEST(PowerSgd, WithoutGradientThereIsNoNaN) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    std::vector<at::Tensor> zeros = gradients_of(model, 0, 0);
    for (at::Tensor& gradient : zeros) gradient.zero_();
    for (const std::int64_t rank : {1, 4}) {
      for (const bool batched : {false, true}) {
        const auto hook = power_sgd_hook(
            {.matrix_approximation_rank = rank, .start_step = 0, .batched = batched});
        for (int step = 0; step < 2; ++step) {
          EXPECT_EQ(largest_difference(run_step(*hook, model, zeros, kManyBuckets, group), zeros),
                    0);
        }
      }
    }
  });
}

TEST(PowerSgd, AfterAFailedStepTheNextOneWorks) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto hook = power_sgd_hook({.matrix_approximation_rank = 64,
                                      .start_step = 0,
                                      .min_compression_rate = 0,
                                      .use_error_feedback = false});
    // Two buckets go in, then backward fails for another reason.
    std::vector<FuturePtr> futures;
    for (const std::size_t i : {4, 3}) {
      Bucket bucket(4 - i, false, gradient_of(model, i, group.rank(), 0).view(-1), {model.names[i]},
                    {model.parameters[i]}, group, 2);
      futures.push_back(hook->reduce(bucket));
    }
    hook->reset();
    EXPECT_TRUE(futures[1]->hasError());
    EXPECT_EQ(text_of(futures[1]->exception_ptr()),
              "ddp.hook: this step was given up; see the first error.");
    const auto results =
        run_step(*hook, model, gradients_of(model, group.rank(), 1), kManyBuckets, group);
    EXPECT_LE(largest_difference(results, average_of(model, 2, 1)), 1e-4);
  });
}

TEST(Hook, SavedStateContinuesBitForBit) {
  run_ranks(2, [](const Group& group) {
    const Model model = small_model();
    const auto makers = std::vector<std::function<HookPtr()>>{
        [] { return int8_error_feedback_hook(); },
        []() -> HookPtr {
          return power_sgd_hook({.matrix_approximation_rank = 2, .start_step = 1});
        },
        []() -> HookPtr { return power_sgd_hook({.start_step = 1, .batched = true}); }};
    for (const auto& make : makers) {
      const HookPtr whole = make();
      HookPtr parts = make();
      for (int step = 0; step < 5; ++step) {
        if (step == 3) {
          // As a checkpoint would: copied out, loaded into a new object.
          HookState saved = parts->state();
          for (auto& [key, tensor] : saved.tensors) tensor = tensor.clone();
          parts = make();
          parts->load_state(saved);
        }
        const auto gradients = gradients_of(model, group.rank(), step);
        EXPECT_TRUE(same_bits(run_step(*whole, model, gradients, kManyBuckets, group),
                              run_step(*parts, model, gradients, kManyBuckets, group)))
            << whole->name() << " step " << step;
      }
    }
  });
}

TEST(Hook, SparseGradientsAreAveragedPlainly) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor indices = at::full({1, 1}, group.rank() + 1, at::kLong);
    for (const HookPtr& hook :
         {fp16_compress_hook(), quantization_per_tensor_hook(), int8_error_feedback_hook(),
          HookPtr(power_sgd_hook({.start_step = 0})), fp16_compress_wrapper(all_reduce_hook())}) {
      at::Tensor sparse =
          at::sparse_coo_tensor(indices, at::full({1, 2}, 3.0F), {4, 2}, at::kFloat).coalesce();
      Bucket bucket(0, true, sparse, {"table"}, {at::zeros({4, 2})}, group, 2);
      const FuturePtr future = hook->reduce(bucket);
      hook->end_step();
      future->waitAndThrow();
      const c10::IValue value = future->value();
      const at::Tensor dense = value.toTensor().to_dense();
      EXPECT_TRUE(at::equal(
          dense, at::tensor(std::vector<float>{0, 0, 1.5, 1.5, 1.5, 1.5, 0, 0}).view({4, 2})))
          << hook->name();
    }
  });
}

TEST(Hook, BytesOfANanAreNanInTheirChannelOnly) {
  run_ranks(2, [](const Group& group) {
    at::Tensor buffer = at::ones({70});
    if (group.rank() == 1) buffer[40] = std::numeric_limits<float>::quiet_NaN();
    Bucket bucket(0, true, buffer, {"w"}, {at::zeros({70})}, group, 2);
    const HookPtr hook = quantization_per_channel_hook(32);
    const FuturePtr future = hook->reduce(bucket);
    hook->end_step();
    future->waitAndThrow();
    EXPECT_TRUE(buffer.slice(0, 32, 64).isnan().all().item<bool>());
    EXPECT_TRUE(at::allclose(buffer.slice(0, 0, 32), at::ones({32})));
    EXPECT_TRUE(at::allclose(buffer.slice(0, 64), at::ones({6})));
  });
}

TEST(Bucket, SaysWhatIsWrong) {
  run_ranks(1, [](const Group& group) {
    const at::Tensor parameter = at::zeros({2, 3});
    EXPECT_EQ(error_text([&] { Bucket(0, true, at::zeros({5}), {"w"}, {parameter}, group, 1); }),
              "ddp.bucket: the buffer has shape [5], but the parameters have 6 elements together.");
    EXPECT_EQ(error_text([&] { Bucket(0, true, at::zeros({6}), {}, {parameter}, group, 1); }),
              "ddp.bucket: 0 names for 1 parameters.");
    EXPECT_EQ(error_text([&] { Bucket(0, true, at::zeros({6}), {"w"}, {parameter}, group, 0); }),
              "ddp.bucket: the divisor is 0. It must be positive.");
    Bucket bucket(0, true, at::zeros({6}), {"w"}, {parameter}, group, 1);
    EXPECT_EQ(error_text([&] { bucket.set_buffer(at::zeros({7})); }),
              "ddp.bucket: a buffer of 7 elements cannot replace one of 6.");
  });
}

TEST(Bucket, ComplexParametersLieInRealBuffersAsPairs) {
  run_ranks(1, [](const Group& group) {
    const at::Tensor parameter = at::zeros({2, 2}, at::kComplexFloat).t();
    Bucket bucket(0, true, at::arange(8, at::kFloat), {"w"}, {parameter}, group, 1);
    const at::Tensor view = bucket.gradients()[0];
    EXPECT_EQ(view.strides(), parameter.strides());
    EXPECT_EQ(at::real(view[1][0]).item<float>(), 2);
    EXPECT_EQ(at::imag(view[0][1]).item<float>(), 5);
  });
}

TEST(Hook, WrongOptionsAreNamed) {
  EXPECT_EQ(error_text([] { compress_hook(at::kInt); }),
            "ddp.compress_hook: Int is not a floating type. Use float16, bfloat16 or float32.");
  EXPECT_EQ(error_text([] { fp16_compress_wrapper(nullptr); }),
            "ddp.hook: 'Half_compress_wrapper' needs a hook to wrap.");
  EXPECT_EQ(error_text([] { quantization_per_channel_hook(0); }),
            "ddp.quantization_per_channel: a channel of 0 elements. It must have at least one.");
  EXPECT_EQ(error_text([] { custom_hook("mine", nullptr); }),
            "ddp.custom_hook: 'mine' has no function.");
  EXPECT_EQ(error_text([] { power_sgd_hook({.matrix_approximation_rank = 0}); }),
            "ddp.power_sgd: a rank of 0. It must be at least 1.");
  EXPECT_EQ(error_text([] { power_sgd_hook({.start_step = -1}); }),
            "ddp.power_sgd: compression cannot start at step -1.");
  EXPECT_EQ(error_text([] { power_sgd_hook({.min_compression_rate = -1}); }),
            "ddp.power_sgd: a compression rate of -1. It cannot be negative.");
  EXPECT_EQ(
      error_text([] { all_reduce_hook()->load_state({.tensors = {}, .numbers = {{"a", 1}}}); }),
      "ddp.hook: 'all_reduce' keeps no state, but was given 1 entries.");
  EXPECT_EQ(error_text([] {
              int8_error_feedback_hook()->load_state({.tensors = {{"w", at::zeros({1})}}});
            }),
            "ddp.int8_error_feedback: 'w' is not a key of its state. Keys are "
            "'error/<parameter>'.");
  EXPECT_EQ(error_text([] { power_sgd_hook()->load_state({.tensors = {{"w", at::zeros({1})}}}); }),
            "ddp.power_sgd: 'w' is not a key of its state. Keys are 'error/<parameter>' and "
            "'q/<parameter>'.");
}

}  // namespace
}  // namespace tessera::data_parallel
