// What a pipeline refuses, in words, and the same on all ranks.

#include <gtest/gtest.h>

#include <stdexcept>

#include "pipeline/two_module_model.h"
#include "support/error_text.h"
#include "support/ranks.h"

namespace tessera::pipeline {
namespace {

using tessera::testing::error_text;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::text_of;

TEST(TrainPipelineErrors, RefusesWhatCannotBePipelined) {
  run_ranks(1, [](const comm::Group& group) {
    Model model(group);
    const auto message = [&](const std::vector<PipelinedModule<Batch>>& modules) {
      return error_text([&] { TrainPipelineSparseDist<Batch> pipe(model.steps(), modules); });
    };
    const auto modules = model.modules();
    EXPECT_EQ(message({{"x", nullptr, modules[0].features}}),
              "pipeline: 'x' is no sharded module. Modules that are not sharded need not be "
              "registered.");
    EXPECT_EQ(message({{"x", model.first, nullptr}}),
              "pipeline: 'x' has no extractor. Say which features of a batch it takes.");
    EXPECT_EQ(message({modules[0], {"y", model.first, modules[0].features}}),
              "pipeline: 'y' is registered under another name as well. A module that is used twice "
              "in a forward cannot be pipelined.");
    EXPECT_EQ(
        message({modules[0], {"first", model.second, modules[1].features}}),
        "pipeline: the name 'first' is empty or registered twice. Give every module a name of "
        "its own.");
    EXPECT_EQ(error_text([&] { TrainPipelineBase<Batch> pipe(Steps<Batch>{}); }),
              "pipeline: forward is missing.");
  });
}

TEST(TrainPipelineErrors, RefusesInputsThatForwardDoesNotUse) {
  run_ranks(1, [](const comm::Group& group) {
    Model model(group);
    Steps<Batch> steps = model.steps();
    steps.forward = [&](const Batch& batch, const SparseInputs& inputs) {
      const auto rows = model.first->compute_and_output_dist(inputs.of(*model.first)).wait();
      const auto more = model.second->forward(keys(batch.features, {2}));
      const at::Tensor output = model.logits(batch.dense, rows, more);
      return Result{output, output};
    };
    TrainPipelineSparseDist<Batch> pipe(steps, model.modules());
    EXPECT_EQ(error_text([&] { (void)pipe.progress(source_of(0, 3)); }),
              "pipeline: forward did not use the input of 'second'. Take it from the inputs that "
              "forward is given, or do not register the module.");
    TrainPipelineSparseDist<Batch> other(model.steps(), {model.modules()[0]});
    EXPECT_EQ(error_text([&] { (void)other.progress(source_of(0, 3)); }),
              "pipeline: forward asked for the input of a module that was not registered. Register "
              "it with an extractor, or call its forward.");
  });
}

TEST(TrainPipelineErrors, RefusesToGoOnAfterAnException) {
  run_ranks(1, [](const comm::Group& group) {
    Model model(group);
    TrainPipelineSparseDist<Batch> pipe(model.steps(), model.modules());
    const auto good = source_of(0, 6);
    int num_read = 0;
    const Source<Batch> bad = [&]() -> std::optional<Batch> {
      if (++num_read == 4) throw std::runtime_error("the disk is gone");
      return good();
    };
    ASSERT_TRUE(pipe.progress(bad));
    EXPECT_THROW((void)pipe.progress(bad), std::runtime_error);
    EXPECT_EQ(error_text([&] { (void)pipe.progress(good); }),
              "pipeline: an earlier step threw an exception, so the batches in flight are in an "
              "unknown state. Make a new pipeline.");
  });
}

TEST(TrainPipelineErrors, RefusesTrainedFeatureWeights) {
  run_ranks(1, [](const comm::Group& group) {
    Model model(group);
    auto modules = model.modules();
    modules[1].features = [](const Batch& batch) {
      const auto part = keys(batch.features, {2});
      return part.with_weights(at::ones({part.values().numel()}).requires_grad_(true));
    };
    TrainPipelineSparseDist<Batch> pipe(model.steps(), modules);
    EXPECT_EQ(
        error_text([&] { (void)pipe.progress(source_of(0, 3)); }),
        "pipeline: the weights of 'second' need a gradient, so they come from parameters that "
        "earlier batches still change. Run this module outside of the pipeline.");
  });
}

TEST(TrainPipelineErrors, BadIdsAreTheSameErrorOnAllRanks) {
  const auto errors = run_ranks_collecting(2, [](const comm::Group& group) {
    Model model(group);
    auto modules = model.modules();
    modules[1].features = [&](const Batch& batch) {
      const auto part = keys(batch.features, {2});
      const bool is_bad = group.rank() == 1 && batch.number == 2;
      return is_bad ? part.with_values(at::full_like(part.values(), 99)) : part;
    };
    TrainPipelineSparseDist<Batch> pipe(model.steps(), modules);
    run_all(pipe, source_of(group.rank(), 5));
  });
  EXPECT_NE(text_of(errors[0]).find("99"), std::string::npos) << text_of(errors[0]);
  EXPECT_EQ(text_of(errors[0]), text_of(errors[1]));
}

}  // namespace
}  // namespace tessera::pipeline
