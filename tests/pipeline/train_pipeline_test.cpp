// Pipelines against the loop without one: the same bits, in the order they promise, to the last
// batch.

#include "tessera/pipeline/train_pipeline.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "sharding/sharded_tables.h"
#include "support/error_text.h"
#include "support/rank_processes.h"
#include "support/ranks.h"
#include "tessera/comm/collectives.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"
#include "tessera/sharding/sharded_embedding_collection.h"

namespace tessera::pipeline {
namespace {

using jagged::KeyedJaggedTensor;
using sharding::ShardedEmbeddingBagCollection;
using tessera::testing::error_text;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::table;
using tessera::testing::text_of;

struct Batch {
  at::Tensor dense;
  KeyedJaggedTensor features;
  std::int64_t number;
};

Batch make_batch(int rank, std::int64_t number) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * number + rank + 1));
  const std::int64_t size = 3 + (number + rank) % 3;  // differs between ranks
  const at::Tensor lengths = at::randint(0, 4, {3 * size}, generator, at::kInt);
  const at::Tensor ids = at::randint(0, 7, {lengths.sum().item<std::int64_t>()}, generator,
                                     at::TensorOptions(at::kLong));
  return {at::randn({size, 2}, generator),
          KeyedJaggedTensor({"f0", "f1", "f2"}, ids, {.lengths = lengths}), number};
}

Source<Batch> source_of(int rank, std::int64_t count, std::int64_t* num_read = nullptr) {
  auto next = std::make_shared<std::int64_t>(0);
  return [=]() -> std::optional<Batch> {
    if (*next == count) return std::nullopt;
    if (num_read != nullptr) ++*num_read;
    return make_batch(rank, (*next)++);
  };
}

KeyedJaggedTensor keys(const KeyedJaggedTensor& all, const std::vector<std::int64_t>& which) {
  return all.permute(which);
}

/// Two sharded modules that share a group, and a layer whose gradients are averaged.
struct Model {
  std::shared_ptr<ShardedEmbeddingBagCollection> first;
  std::shared_ptr<ShardedEmbeddingBagCollection> second;
  torch::nn::Linear layer{nullptr};
  std::shared_ptr<torch::optim::SGD> optimizer;
  comm::Group group;
  std::vector<std::string> events;
  std::vector<at::Tensor> losses;

  explicit Model(const comm::Group& the_group) : group(the_group) {
    const int world = group.size();
    sharding::ShardedOptions options;
    options.optimizer.kind = embedding::OptimizerKind::kAdam;
    options.optimizer.learning_rate = 0.02;
    options.local_size = world;
    const std::vector<embedding::EmbeddingBagConfig> one = {table("a", 7, 4, {"f0"}),
                                                            table("b", 7, 4, {"f1"})};
    const std::vector<embedding::EmbeddingBagConfig> two = {table("c", 7, 4, {"f2"})};
    const sharding::Topology topology{world, world};
    first = std::make_shared<ShardedEmbeddingBagCollection>(
        one,
        sharding::make_module_plan(
            one, {{"a", sharding::table_wise(world - 1)}, {"b", sharding::row_wise()}}, topology),
        group, false, options);
    second = std::make_shared<ShardedEmbeddingBagCollection>(
        two, sharding::make_module_plan(two, {{"c", sharding::table_wise(0)}}, topology), group,
        false, options);
    std::map<std::string, at::Tensor> start;
    for (const char* name : {"a", "b", "c"}) {
      start[name] = at::arange(28, at::kFloat).view({7, 4}).sin() * (name[0] - 'a' + 1);
    }
    first->load_tables({{"a", start["a"]}, {"b", start["b"]}});
    second->load_tables({{"c", start["c"]}});
    layer = torch::nn::Linear(14, 1);
    const at::NoGradGuard no_grad;
    layer->weight.copy_(at::arange(14, at::kFloat).cos().view({1, 14}));
    layer->bias.zero_();
    optimizer = std::make_shared<torch::optim::SGD>(layer->parameters(), 0.002);
  }

  at::Tensor logits(const at::Tensor& dense, const jagged::KeyedTensor& rows,
                    const jagged::KeyedTensor& more) {
    return layer->forward(at::cat({dense, rows["f0"], rows["f1"], more["f2"]}, 1)).squeeze(1);
  }

  void step() {
    for (auto& parameter : layer->parameters()) {
      parameter.mutable_grad().copy_(comm::all_reduce(parameter.grad(), group) / group.size());
    }
    optimizer->step();
  }

  Steps<Batch> steps() {
    Steps<Batch> steps;
    steps.zero_grad = [this] { optimizer->zero_grad(); };
    steps.forward = [this](const Batch& batch, const SparseInputs& inputs) {
      events.push_back("forward " + std::to_string(batch.number));
      const auto rows = first->compute_and_output_dist(inputs.of(*first)).wait();
      const auto more = second->compute_and_output_dist(inputs.of(*second)).wait();
      const at::Tensor output = logits(batch.dense, rows, more);
      return Result{(output - 1).pow(2), output};
    };
    steps.step = [this] { step(); };
    return steps;
  }

  std::vector<PipelinedModule<Batch>> modules() {
    return {{"first", first,
             [this](const Batch& batch) {
               events.push_back("start " + std::to_string(batch.number));
               return keys(batch.features, {0, 1});
             }},
            {"second", second, [](const Batch& batch) { return keys(batch.features, {2}); }}};
  }

  // The plain loop, on forward of the modules.
  std::vector<at::Tensor> train_plainly(std::int64_t count) {
    std::vector<at::Tensor> outputs;
    for (std::int64_t i = 0; i < count; ++i) {
      const Batch batch = make_batch(group.rank(), i);
      optimizer->zero_grad();
      const auto rows = first->forward(keys(batch.features, {0, 1}));
      const auto more = second->forward(keys(batch.features, {2}));
      const at::Tensor output = logits(batch.dense, rows, more);
      (output - 1).pow(2).sum().backward();
      step();
      outputs.push_back(output.detach());
    }
    return outputs;
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& module : {first, second}) {
      for (const auto& [name, weight] : module->gather_tables()) all.push_back(weight);
    }
    for (const auto& parameter : layer->parameters()) all.push_back(parameter.detach());
    return all;
  }
};

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

template <class Pipe>
std::vector<at::Tensor> run_all(Pipe& pipe, const Source<Batch>& source) {
  std::vector<at::Tensor> outputs;
  while (auto output = pipe.progress(source)) outputs.push_back(output->detach());
  return outputs;
}

template <class Pipe>
void check_equal_to_plain(const comm::Group& group, std::int64_t count) {
  Model plain(group);
  const auto expected = plain.train_plainly(count);
  for (const bool reads_late : {false, true}) {
    Model model(group);
    Pipe pipe(model.steps(), model.modules(), {.reads_late = reads_late});
    expect_same(run_all(pipe, source_of(group.rank(), count)), expected);
    expect_same(model.parameters(), plain.parameters());
    EXPECT_EQ(pipe.num_in_flight(), 0);
  }
}

TEST(TrainPipeline, EqualsThePlainLoopBitForBit) {
  for (const int world : {1, 2, 3}) {
    for (const std::int64_t count : {0, 1, 2, 3, 4, 9}) {
      run_ranks(world, [&](const comm::Group& group) {
        check_equal_to_plain<TrainPipelineBase<Batch>>(group, count);
        check_equal_to_plain<TrainPipelineSparseDist<Batch>>(group, count);
        check_equal_to_plain<PrefetchTrainPipelineSparseDist<Batch>>(group, count);
      });
    }
  }
}

/// Rows of single ids, stepped by backward.
struct SequenceModel {
  std::shared_ptr<sharding::ShardedEmbeddingCollection> words;
  std::shared_ptr<ShardedEmbeddingBagCollection> bags;

  explicit SequenceModel(const comm::Group& group) {
    const int world = group.size();
    const sharding::Topology topology{world, world};
    const std::vector<embedding::EmbeddingConfig> rows = {table("w", 7, 3, {"f0", "f1"})};
    sharding::ShardedSequenceOptions options;
    options.use_index_dedup = true;
    options.local_size = world;
    words = std::make_shared<sharding::ShardedEmbeddingCollection>(
        rows, sharding::make_module_plan(rows, {{"w", sharding::row_wise()}}, topology), group,
        options);
    const std::vector<embedding::EmbeddingBagConfig> pooled = {table("c", 7, 3, {"f2"})};
    bags = std::make_shared<ShardedEmbeddingBagCollection>(
        pooled, sharding::make_module_plan(pooled, {{"c", sharding::table_wise(0)}}, topology),
        group, false, options);
    words->load_tables({{"w", at::arange(21, at::kFloat).view({7, 3}).sin()}});
    bags->load_tables({{"c", at::arange(21, at::kFloat).view({7, 3}).cos()}});
  }

  static Result result(const embedding::NamedRows& rows, const jagged::KeyedTensor& pooled) {
    std::vector<at::Tensor> squares;
    for (const auto& [name, row] : rows) squares.push_back(row.values().pow(2).sum(1));
    squares.push_back((pooled["f2"] - 1).pow(2).sum(1));
    const at::Tensor losses = at::cat(squares);
    return {losses, losses};
  }

  std::vector<at::Tensor> parameters() const {
    return {words->gather_tables().at("w"), bags->gather_tables().at("c")};
  }
};

TEST(TrainPipeline, SequencesEqualThePlainLoopBitForBit) {
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [](const comm::Group& group) {
      SequenceModel plain(group);
      std::vector<at::Tensor> expected;
      for (std::int64_t i = 0; i < 5; ++i) {
        const Batch batch = make_batch(group.rank(), i);
        const Result result =
            SequenceModel::result(plain.words->forward(keys(batch.features, {0, 1})),
                                  plain.bags->forward(keys(batch.features, {2})));
        result.losses.sum().backward();
        expected.push_back(result.output.detach());
      }
      SequenceModel model(group);
      Steps<Batch> steps;
      steps.forward = [&](const Batch&, const SparseInputs& inputs) {
        return SequenceModel::result(
            model.words->compute_and_output_dist(inputs.of(*model.words)).wait(),
            model.bags->compute_and_output_dist(inputs.of(*model.bags)).wait());
      };
      PrefetchTrainPipelineSparseDist<Batch> pipe(
          steps,
          {{"words", model.words, [](const Batch& batch) { return keys(batch.features, {0, 1}); }},
           {"bags", model.bags, [](const Batch& batch) { return keys(batch.features, {2}); }}});
      expect_same(run_all(pipe, source_of(group.rank(), 5)), expected);
      expect_same(model.parameters(), plain.parameters());
      EXPECT_FALSE(at::equal(model.parameters()[0], SequenceModel(group).parameters()[0]));
    });
  }
}

TEST(TrainPipeline, EqualsThePlainLoopInProcesses) {
  tessera::testing::RankProcesses processes;
  processes.run(
      2,
      [](const comm::Group& group) {
        check_equal_to_plain<TrainPipelineSparseDist<Batch>>(group, 5);
        check_equal_to_plain<PrefetchTrainPipelineSparseDist<Batch>>(group, 5);
      },
      tessera::testing::test_options());
}

TEST(TrainPipeline, TrainingLearns) {
  run_ranks(2, [](const comm::Group& group) {
    Model model(group);
    TrainPipelineSparseDist<Batch> pipe(model.steps(), model.modules());
    const Source<Batch> same = [&]() -> std::optional<Batch> {
      return make_batch(group.rank(), 3);
    };
    (void)pipe.progress(same);
    const double begin = pipe.losses().sum().item<double>();
    for (int i = 0; i < 60; ++i) (void)pipe.progress(same);
    EXPECT_LT(pipe.losses().sum().item<double>(), 0.1 * begin);
  });
}

TEST(TrainPipeline, OrderOfStartsAndForwards) {
  run_ranks(2, [](const comm::Group& group) {
    Model base(group);
    TrainPipelineBase<Batch> base_pipe(base.steps(), base.modules());
    run_all(base_pipe, source_of(group.rank(), 3));
    EXPECT_EQ(base.events, (std::vector<std::string>{"start 0", "forward 0", "start 1", "forward 1",
                                                     "start 2", "forward 2"}));
    Model sparse(group);
    TrainPipelineSparseDist<Batch> sparse_pipe(sparse.steps(), sparse.modules());
    run_all(sparse_pipe, source_of(group.rank(), 3));
    EXPECT_EQ(sparse.events, (std::vector<std::string>{"start 0", "start 1", "forward 0", "start 2",
                                                       "forward 1", "forward 2"}));
    Model prefetch(group);
    std::vector<std::string>& events = prefetch.events;
    PrefetchTrainPipelineSparseDist<Batch> prefetch_pipe(
        prefetch.steps(), prefetch.modules(), {}, [&](const SparseInputs& inputs) {
          EXPECT_NE(inputs.of(*prefetch.first).context, nullptr);
          events.emplace_back("prefetch");
        });
    run_all(prefetch_pipe, source_of(group.rank(), 4));
    EXPECT_EQ(events, (std::vector<std::string>{"start 0", "start 1", "prefetch", "start 2",
                                                "forward 0", "prefetch", "start 3", "forward 1",
                                                "prefetch", "forward 2", "prefetch", "forward 3"}));
    EXPECT_GE(prefetch_pipe.report().prefetch, 0);
  });
}

TEST(TrainPipeline, BatchesInFlight) {
  run_ranks(1, [](const comm::Group& group) {
    Model model(group);
    std::int64_t num_read = 0;
    TrainPipelineSparseDist<Batch> pipe(model.steps(), model.modules());
    const auto source = source_of(0, 10, &num_read);
    (void)pipe.progress(source);
    EXPECT_EQ(num_read, 3);
    EXPECT_EQ(pipe.num_in_flight(), 2);
    Model late_model(group);
    TrainPipelineSparseDist<Batch> late(late_model.steps(), late_model.modules(),
                                        {.reads_late = true});
    EXPECT_TRUE(late.progress(source_of(group.rank(), 9)));
    EXPECT_EQ(late.num_in_flight(), 1);
    Model other(group);
    num_read = 0;
    PrefetchTrainPipelineSparseDist<Batch> prefetch(other.steps(), other.modules());
    (void)prefetch.progress(source_of(0, 10, &num_read));
    EXPECT_EQ(num_read, 4);
    EXPECT_EQ(prefetch.num_in_flight(), 3);
  });
}

TEST(TrainPipeline, ANewSourceBeginsAnew) {
  run_ranks(2, [](const comm::Group& group) {
    Model model(group);
    TrainPipelineSparseDist<Batch> pipe(model.steps(), model.modules());
    EXPECT_EQ(run_all(pipe, source_of(group.rank(), 3)).size(), 3U);
    EXPECT_EQ(run_all(pipe, source_of(group.rank(), 2)).size(), 2U);
  });
}

TEST(TrainPipeline, MayLeaveBatchesInFlight) {
  run_ranks(2, [](const comm::Group& group) {
    Model model(group);
    TrainPipelineSparseDist<Batch> pipe(model.steps(), model.modules(),
                                        {.execute_all_batches = false});
    // The end is seen when batch 5 is asked for, before the step on batch 3 is over.
    EXPECT_EQ(run_all(pipe, source_of(group.rank(), 5)).size(), 4U);
    EXPECT_EQ(pipe.num_in_flight(), 0);
  });
}

TEST(TrainPipeline, EvaluationChangesNothing) {
  run_ranks(2, [](const comm::Group& group) {
    Model model(group);
    const auto before = model.parameters();
    Model plain(group);
    std::vector<at::Tensor> expected;
    for (std::int64_t i = 0; i < 4; ++i) {
      const Batch batch = make_batch(group.rank(), i);
      const at::NoGradGuard no_grad;
      expected.push_back(plain.logits(batch.dense,
                                      plain.first->forward(keys(batch.features, {0, 1})),
                                      plain.second->forward(keys(batch.features, {2}))));
    }
    EvalPipelineSparseDist<Batch> pipe(model.steps(), model.modules());
    std::vector<at::Tensor> outputs;
    const auto source = source_of(group.rank(), 4);
    while (auto output = pipe.progress(source)) {
      EXPECT_FALSE(output->requires_grad());
      outputs.push_back(*output);
    }
    expect_same(outputs, expected);
    expect_same(model.parameters(), before);
  });
}

TEST(TrainPipeline, ReportsWhereTheTimeWent) {
  run_ranks(2, [](const comm::Group& group) {
    Model model(group);
    TrainPipelineSparseDist<Batch> pipe(model.steps(), model.modules());
    const auto source = source_of(group.rank(), 4);
    for (int i = 0; i < 4; ++i) {
      (void)pipe.progress(source);
      const StepReport& report = pipe.report();
      const double parts = report.read + report.start_dist + report.wait_ids + report.wait_sizes +
                           report.zero_grad + report.forward + report.backward + report.step;
      EXPECT_GT(report.forward, 0);
      EXPECT_GT(report.backward, 0);
      EXPECT_LE(parts, report.total);
      EXPECT_GE(parts, 0.5 * report.total);
      EXPECT_EQ(report.exposed_input_dist(), report.wait_ids + report.wait_sizes);
      const auto features = make_batch(group.rank(), i).features;
      EXPECT_EQ(report.feature_bytes,
                keys(features, {0, 1}).size_in_bytes() + keys(features, {2}).size_in_bytes());
    }
  });
}

TEST(TrainPipeline, RefusesWhatCannotBePipelined) {
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

TEST(TrainPipeline, RefusesInputsThatForwardDoesNotUse) {
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

TEST(TrainPipeline, RefusesToGoOnAfterAnException) {
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

TEST(TrainPipeline, RefusesTrainedFeatureWeights) {
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

TEST(TrainPipeline, BadIdsAreTheSameErrorOnAllRanks) {
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

struct Movable {
  int moves = 0;
  Movable to(at::Device, bool) const { return {moves + 1}; }
};

TEST(TrainPipeline, CopiesBatchesThatCanBeCopied) {
  for (const bool has_device : {false, true}) {
    Steps<Movable> steps;
    int moves = -1;
    steps.forward = [&](const Movable& batch, const SparseInputs&) {
      moves = batch.moves;
      const at::Tensor loss = at::zeros({2}).requires_grad_(true);
      return Result{loss, loss};
    };
    PipelineOptions options;
    if (has_device) options.device = at::Device(at::kCPU);
    TrainPipelineBase<Movable> pipe(steps, {}, options);
    (void)pipe.progress([]() -> std::optional<Movable> { return Movable{}; });
    EXPECT_EQ(moves, has_device ? 1 : 0);
  }
}

}  // namespace
}  // namespace tessera::pipeline
