#include "gnn/training.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"

namespace tessera::workloads::gnn {
namespace {

using comm::Group;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::text_of;

TrainingOptions twenty_steps() {
  TrainingOptions options;
  options.model = {
      .num_features = 8, .num_layers = 2, .num_basis = 5, .cutoff = 1.7, .dtype = at::kDouble};
  options.structure.num_atoms = 24;
  options.num_structures = 4;
  options.num_steps = 20;
  options.batch = 2;
  options.learning_rate = 1e-3;
  options.optimizer = "sgd";
  return options;
}

at::Tensor parameters_after(const TrainingOptions& options, int data, int graph) {
  at::Tensor parameters;
  run_ranks(data * graph, [&](const Group& world) {
    const comm::Mesh mesh(world, {{"data", data}, {"graph", graph}});
    const Summary summary = train(options, mesh);
    const at::Tensor all = comm::all_gather(summary.parameters.unsqueeze(0), world);
    EXPECT_TRUE(at::equal(all, summary.parameters.unsqueeze(0).expand_as(all)));
    if (world.rank() == 0) parameters = summary.parameters;
  });
  return parameters;
}

TEST(GnnTraining, TwentyStepsAreTheSameHoweverTheGraphIsSplit) {
  TrainingOptions options = twenty_steps();
  const at::Tensor alone = parameters_after(options, 1, 1);
  const double scale = alone.abs().max().item<double>();
  for (const int graph : {2, 3, 4}) {
    const at::Tensor split = parameters_after(options, 1, graph);
    EXPECT_LE((split - alone).abs().max().item<double>(), 1e-10 * scale) << graph;
  }
}

// Two data-parallel ranks with one structure each make the batch of two of one process.
TEST(GnnTraining, DataParallelRanksAverage) {
  TrainingOptions options = twenty_steps();
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
  TrainingOptions options = twenty_steps();
  options.model.dtype = at::kFloat;
  options.optimizer = "adam";
  options.learning_rate = 0.01;
  options.num_steps = 120;
  run_ranks(2, [&](const Group& world) {
    std::int64_t num_reports = 0;
    const Summary summary = train(options, comm::Mesh(world, {{"data", 1}, {"graph", 2}}),
                                  [&](const Progress& progress) {
                                    ++num_reports;
                                    EXPECT_EQ(progress.step, num_reports);
                                  });
    EXPECT_EQ(num_reports, 120);
    EXPECT_LT(summary.after.force, 0.7 * summary.before.force);
    EXPECT_LT(summary.after.energy_per_atom, 0.1);
    EXPECT_GT(summary.halo_rows, 0);
  });
}

TEST(GnnTraining, OptionsThatMakeNoSenseAreNamed) {
  const auto text_with = [](auto change, int size = 1) {
    TrainingOptions options = twenty_steps();
    change(options);
    const auto errors = run_ranks_collecting(size, [&](const Group& world) {
      train(options, comm::Mesh(world, {{"data", size}, {"graph", 1}}));
    });
    return text_of(errors[0]);
  };
  EXPECT_EQ(text_with([](TrainingOptions& o) { o.optimizer = "magic"; }),
            "gnn.train: there is no optimizer 'magic'. There are adam and sgd.");
  EXPECT_EQ(text_with([](TrainingOptions& o) { o.batch = 0; }),
            "gnn.train: 20 steps of 0 structures out of 4 make no sense.");
  EXPECT_EQ(text_with([](TrainingOptions& o) { o.num_structures = 1; }, 2),
            "gnn.train: 1 structures are not enough for 2 data-parallel ranks.");
  EXPECT_EQ(text_with([](TrainingOptions& o) { o.structure.num_atoms = 0; }),
            "gnn.structure: 0 atoms were asked for. Ask for at least one.");
  const std::string text = text_with([](TrainingOptions& o) { o.partition = "random"; });
  EXPECT_EQ(text.find("gnn.partition: there is no partitioner 'random'. There are contiguous"), 0U)
      << text;
}

}  // namespace
}  // namespace tessera::workloads::gnn
