#include "gnn/training.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"
#include "trainer/train.h"

namespace tessera::workloads::gnn {
namespace {

using comm::Group;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::text_of;

Settings twenty_steps() {
  Settings settings;
  settings.num_features = 8;
  settings.cutoff = 1.7;
  settings.precision = "float64";
  settings.num_atoms = 24;
  settings.num_structures = 4;
  settings.num_steps = 20;
  settings.batch = 2;
  settings.learning_rate = 1e-3;
  settings.optimizer = "sgd";
  return settings;
}

double figure(const trainer::Figures& figures, const std::string& name) {
  for (const auto& [key, value] : figures) {
    if (key == name) return value;
  }
  ADD_FAILURE() << "no " << name;
  return 0;
}

at::Tensor parameters_after(Settings settings, int data, int graph) {
  at::Tensor parameters;
  settings.graph_parallel = graph;
  run_ranks(data * graph, [&](const Group& world) {
    const auto workload = make_workload(settings, world);
    core::StepRecorder recorder;
    trainer::train(*workload, world, /*checkpoints=*/"", recorder);
    const at::Tensor own = workload->parameters()[0].detach();
    const at::Tensor all = comm::all_gather(own.unsqueeze(0), world);
    EXPECT_TRUE(at::equal(all, own.unsqueeze(0).expand_as(all)));
    if (world.rank() == 0) parameters = own.clone();
  });
  return parameters;
}

TEST(GnnTraining, TwentyStepsAreTheSameHoweverTheGraphIsSplit) {
  Settings options = twenty_steps();
  const at::Tensor alone = parameters_after(options, 1, 1);
  const double scale = alone.abs().max().item<double>();
  for (const int graph : {2, 3, 4}) {
    const at::Tensor split = parameters_after(options, 1, graph);
    EXPECT_LE((split - alone).abs().max().item<double>(), 1e-10 * scale) << graph;
  }
}

// Two data-parallel ranks with one structure each make the batch of two of one process.
TEST(GnnTraining, DataParallelRanksAverage) {
  Settings options = twenty_steps();
  options.num_structures = 2;
  const at::Tensor alone = parameters_after(options, 1, 1);
  options.batch = 1;
  const double scale = alone.abs().max().item<double>();
  for (const int graph : {1, 2}) {
    const at::Tensor split = parameters_after(options, 2, graph);
    EXPECT_LE((split - alone).abs().max().item<double>(), 1e-10 * scale) << graph;
  }
}

TEST(GnnTraining, LearnsForces) {
  Settings options = twenty_steps();
  options.precision = "float32";
  options.optimizer = "adam";
  options.learning_rate = 0.01;
  options.num_steps = 120;
  run_ranks(2, [&](const Group& world) {
    const auto workload = make_workload(options, world);
    core::StepRecorder recorder;
    std::int64_t num_reports = 0;
    trainer::Listener listener;
    listener.stepped = [&](const trainer::Progress& progress) {
      ++num_reports;
      EXPECT_EQ(progress.step, num_reports);
    };
    const trainer::Summary summary = trainer::train(*workload, world, "", recorder, listener);
    EXPECT_EQ(num_reports, 120);
    const trainer::Figures results = workload->results();
    EXPECT_LT(figure(summary.evaluation, "force_error"),
              0.7 * figure(results, "force_error_before"));
    EXPECT_LT(figure(summary.evaluation, "energy_error"), 0.1);
    EXPECT_GT(figure(results, "halo_rows"), 0);
  });
}

TEST(GnnTraining, OptionsThatMakeNoSenseAreNamed) {
  const auto text_with = [](auto change, int size = 1) {
    Settings options = twenty_steps();
    change(options);
    options.graph_parallel = 1;
    const auto errors =
        run_ranks_collecting(size, [&](const Group& world) { make_workload(options, world); });
    return text_of(errors[0]);
  };
  EXPECT_EQ(text_with([](Settings& o) { o.optimizer = "magic"; }),
            "gnn.train: there is no optimizer 'magic'. There are adam and sgd.");
  EXPECT_EQ(text_with([](Settings& o) { o.batch = 0; }),
            "gnn.train: 20 steps of 0 structures out of 4 make no sense.");
  EXPECT_EQ(text_with([](Settings& o) { o.num_structures = 1; }, 2),
            "gnn.train: 1 structures are not enough for 2 data-parallel ranks.");
  EXPECT_EQ(text_with([](Settings& o) { o.num_atoms = 0; }),
            "gnn.structure: 0 atoms were asked for. Ask for at least one.");
  const std::string text = text_with([](Settings& o) { o.partition = "random"; });
  EXPECT_EQ(text.find("gnn.partition: there is no partitioner 'random'. There are contiguous"), 0U)
      << text;
}

}  // namespace
}  // namespace tessera::workloads::gnn
