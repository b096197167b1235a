// Machine profiles: lines through measured points, files, and what a prediction says of them.

#include <gtest/gtest.h>

#include "tessera/planner/machine_profile.h"
#include "tessera/planner/planner.h"

namespace tessera::planner {
namespace {

MachineProfile measured() {
  MachineProfile profile;
  profile.machine = "a processor";
  profile.version = "0.1.0";
  profile.engine = "shm";
  profile.num_ranks = 2;
  profile.threads_per_rank = 1;
  for (const double bytes : {64.0, 256.0, 1024.0}) {
    profile.rows.emplace_back(bytes, 10e-9 + bytes / 20e9);
    profile.steps.emplace_back(bytes * 3, 40e-9 + bytes * 3 / 10e9);
    profile.host.emplace_back(bytes * 1000, 5e-6 + bytes * 1000 / 4e9);
    profile.all_reduce.emplace_back(bytes * 1000, 8e-6 + bytes * 1000 / 2e9);
    profile.dense.emplace_back(bytes * 1e6, 1e-4 + bytes * 1e6 / 50e9);
  }
  profile.parts = {{1, 3e-6}, {33, 3e-6 + 32 * 2e-6}};
  return profile;
}

TEST(ProfileTest, LinesAreFound) {
  const Line line = fit({{1, 3}, {2, 5}, {10, 21}});
  EXPECT_NEAR(line.fixed, 1, 1e-12);
  EXPECT_NEAR(line.each, 2, 1e-12);
  // Neither may be negative.
  EXPECT_EQ(fit({{1, 1}, {2, 3}}).fixed, 0);
  EXPECT_NEAR(fit({{1, 1}, {2, 3}}).each, (1.0 + 2.0 / 3) / (1 + 4.0 / 9), 1e-12);
  EXPECT_EQ(fit({{1, 3}, {2, 1}}).each, 0);
  EXPECT_NEAR(fit({{5, 10}}).each, 2, 1e-12);
  EXPECT_EQ(fit({}).each, 0);
  EXPECT_EQ(rising({{1, 2}, {2, 1}, {3, 4}}), (Curve{{1, 2}, {2, 2}, {3, 4}}));
}

TEST(ProfileTest, SpeedsAreThoseOfTheLines) {
  const Speeds speeds = speeds_of(measured());
  EXPECT_NEAR(speeds.memory, 20e9, 1);
  EXPECT_NEAR(speeds.row_seconds, 10e-9, 1e-18);
  EXPECT_NEAR(speeds.step, 10e9, 1);
  EXPECT_NEAR(speeds.id_seconds, 40e-9, 1e-18);
  EXPECT_NEAR(speeds.part_seconds, 2e-6, 1e-15);
  EXPECT_NEAR(speeds.host, 4e9, 1);
  EXPECT_EQ(speeds.network, Speeds{}.network);
  EXPECT_EQ(assumed(measured()), "links between hosts");
  EXPECT_EQ(speeds_of(MachineProfile{}), Speeds{});
}

TEST(ProfileTest, FilesAreReadAsWritten) {
  MachineProfile profile = measured();
  profile.calibration = {"runs/1", 1.5, 0.5, 2, 1};
  const MachineProfile read = profile_from_json(to_json(profile));
  EXPECT_EQ(to_json(read), to_json(profile));
  EXPECT_EQ(read.calibration, profile.calibration);
  const std::pair<const char*, const char*> kBad[] = {
      {"", "the profile"},
      {"{}", "no profile of tessera doctor"},
      {R"({"kind": "tessera machine profile", "machine": 3})", "/machine"},
      {R"({"kind": "tessera machine profile", "what": 3})", "what"},
      {R"({"kind": "tessera machine profile", "machine": "a", "version": "1", "engine": "shm",
           "ranks": 2, "threads_per_rank": 1, "spread": 0,
           "curves": {"rows": [[1, 2], [1, 3]]}})",
       "/curves/rows/1"},
  };
  for (const auto& [text, place] : kBad) {
    try {
      profile_from_json(text);
      ADD_FAILURE() << text;
    } catch (const PlanError& error) {
      EXPECT_NE(std::string(error.what()).find(place), std::string::npos) << error.what();
    }
  }
}

TEST(ProfileTest, EveryTermIsInTheCosts) {
  Problem problem;
  problem.ranks.assign(2, {kNoLimit, speeds_of(measured())});
  problem.ranks_per_host = 2;
  problem.batch = 100;
  Table table;
  table.name = "a";
  table.rows = 1'000'000'000;  // no id comes twice
  table.dim = 32;
  table.features[0].ids = 5;
  problem.tables = {table};
  const Plan plan{{"a", Cut::kTableWise, Kernel::kFused, {{0, 0, table.rows, 32, 0}}}};
  const std::vector<ShardCost> costs = cost_of(problem, plan);
  const double ids = 1000;
  EXPECT_NEAR(costs[0].seconds.lookup, ids * (10e-9 + 128 / 20e9) + 2e-6, 1e-12);
  EXPECT_NEAR(costs[0].seconds.step, ids * (40e-9 + (128 + 2 * 132) / 10e9), 1e-9);
  const StepTime time = predict(measured(), costs, {6e9, 4e6});
  const double operations = 1e-4 + 6e9 / 50e9;
  EXPECT_NEAR(time.dense, operations / 3, 1e-9);
  EXPECT_NEAR(time.links, costs[0].seconds.ids + costs[0].seconds.rows + 2 * 5e-6, 1e-9);
  EXPECT_NEAR(time.gradients, costs[0].seconds.gradients + 5e-6 + 8e-6 + 4e6 / 2e9, 1e-9);
  EXPECT_NEAR(time.backward, operations * 2 / 3 + time.gradients + time.step, 1e-9);
  EXPECT_NEAR(predict(measured(), costs, {6e9, 4e6, 3}).dense, (3e-4 + 6e9 / 50e9) / 3, 1e-9);
}

TEST(ProfileTest, ACalibratedProfilePredictsTheRunItCameFrom) {
  MachineProfile profile = measured();
  Problem problem;
  problem.ranks.assign(2, {kNoLimit, speeds_of(profile)});
  problem.ranks_per_host = 2;
  Table table;
  table.name = "a";
  table.rows = 100'000;
  table.dim = 64;
  table.features[0].ids = 20;
  problem.tables = {table};
  const PlanResult result = plan(problem);
  const DenseLoad dense{1e9, 1e6};
  const StepTime before = predict(profile, result.per_rank, dense);
  StepTime should = before;
  should.links *= 1.5;
  should.lookup *= 0.8;
  should.dense *= 1.2;
  should.backward = 1.5 * before.gradients + 1.7 * before.step +
                    1.2 * (before.backward - before.gradients - before.step);
  profile.calibration = calibrate("runs/1", before, should);
  problem.ranks.assign(2, {kNoLimit, speeds_of(profile)});
  const StepTime after = predict(profile, cost_of(problem, result.plan), dense);
  EXPECT_NEAR(after.links / should.links, 1, 1e-6);
  EXPECT_NEAR(after.lookup / should.lookup, 1, 1e-6);
  EXPECT_NEAR(after.dense / should.dense, 1, 1e-6);
  EXPECT_NEAR(after.backward / should.backward, 1, 1e-6);
  EXPECT_EQ(calibrate("x", before, {}).links, 1);
}

}  // namespace
}  // namespace tessera::planner
