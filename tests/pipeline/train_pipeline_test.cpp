// Pipelines against the loop without one: the same bits, in the order they promise, to the last
// batch.

#include "tessera/pipeline/train_pipeline.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "pipeline/two_module_model.h"
#include "support/rank_processes.h"
#include "support/ranks.h"
#include "tessera/sharding/sharded_embedding_collection.h"

namespace tessera::pipeline {
namespace {

using tessera::testing::run_ranks;

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
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
