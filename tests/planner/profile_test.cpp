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
  EXPECT_EQ(assumed(measured()), std::vector<std::string>{"links between hosts"});
  EXPECT_EQ(speeds_of(MachineProfile{}), Speeds{});
}

TEST(ProfileTest, WhereItWasMeasuredIsCompared) {
  const MachineProfile profile = measured();
  Here here{profile.machine, "shm", 2};
  EXPECT_EQ(difference(profile, here).words, "");
  EXPECT_FALSE(difference(profile, here).is_other_machine);
  here = {profile.machine, "gloo", 4};
  EXPECT_EQ(difference(profile, here).words, "with 2 ranks (here 4), over shm (here gloo)");
  EXPECT_FALSE(difference(profile, here).is_other_machine);
  // What is not known does not differ.
  here = {profile.machine, "", 0};
  EXPECT_EQ(difference(profile, here).words, "");
  here.machine = "another one";
  EXPECT_EQ(difference(profile, here).words, "on a processor (here another one)");
  EXPECT_TRUE(difference(profile, here).is_other_machine);
  MachineProfile older = measured();
  older.version = "0.0.9";
  older.num_ranks = 1;
  here = {profile.machine, "shm", 8};
  EXPECT_EQ(difference(older, here).words, "with 1 rank (here 8), by version 0.0.9 (here 0.1.0)");
  EXPECT_FALSE(processor_name().empty());
  EXPECT_EQ(Here{}.machine, processor_name());
}

TEST(ProfileTest, FilesAreReadAsWritten) {
  MachineProfile profile = measured();
  profile.calibration = {"runs/1", 1.5, 0.5, 2, 1};
  profile.left_out = 7;
  const MachineProfile read = profile_from_json(to_json(profile));
  EXPECT_EQ(to_json(read), to_json(profile));
  EXPECT_EQ(read.calibration, profile.calibration);
  EXPECT_EQ(read.left_out, 7);
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

TEST(ProfileTest, WhatLiesBetweenHostsIsInTheStep) {
  MachineProfile profile = measured();
  profile.network = {{1e3, 40e-6 + 1e3 / 1e9}, {1e6, 40e-6 + 1e6 / 1e9}};
  profile.network_all_reduce = {{1e3, 90e-6 + 1e3 / 5e8}, {1e6, 90e-6 + 1e6 / 5e8}};
  EXPECT_TRUE(assumed(profile).empty());
  EXPECT_NEAR(speeds_of(profile).network, 1e9, 1);
  EXPECT_EQ(to_json(profile_from_json(to_json(profile))), to_json(profile));
  // On one host it is as without them; over two, every exchange and the all-reduce go between them.
  const DenseLoad dense{6e9, 4e6};
  const std::vector<ShardCost> alone(2);
  EXPECT_EQ(predict(profile, alone, dense).total(), predict(measured(), alone, dense).total());
  const std::vector<ShardCost> apart(4);
  const StepTime there = predict(profile, apart, dense);
  const StepTime here = predict(profile, alone, dense);
  EXPECT_NEAR(there.links - here.links, 2 * 40e-6, 1e-9);
  EXPECT_NEAR(there.gradients - here.gradients, 40e-6 + (90e-6 + 4e6 / 5e8) - (8e-6 + 4e6 / 2e9),
              1e-9);
  // A profile that knows of one host alone goes by that.
  EXPECT_EQ(predict(measured(), apart, dense).total(), predict(measured(), alone, dense).total());
}

// Passes whose times are those of known speeds, computed by hand from the pass.
Pass made(Cut cut, std::int64_t batch, int tables, std::int64_t dim, double ids) {
  constexpr double kRanks = 2;
  Pass pass{cut, batch, tables, 1'000'000, dim, ids};
  const double lookups = kRanks * static_cast<double>(batch) * ids;  // of a table
  pass.distinct = 0.8 * lookups;
  pass.distinct_here = 0.45 * lookups;
  const bool is_copy = cut == Cut::kDataParallel;
  const double shards = cut == Cut::kTableWise ? tables / kRanks : tables;
  const double share = cut == Cut::kRowWise ? 0.5 : 1;
  const double bytes = 4.0 * static_cast<double>(dim) / (cut == Cut::kColumnWise ? 2 : 1);
  const double here = shards * lookups * (is_copy ? 0.5 : share);
  const double bags = shards * kRanks * static_cast<double>(batch) * (is_copy ? 0.5 : 1);
  const double touched = shards * pass.distinct * share;
  const double stepped = shards * lookups * share;
  const bool is_merged = is_copy || cut == Cut::kColumnWise;
  const double link = 0.5 / 4e9;  // half of what a rank sends stays
  pass.input = 50e-6 + here * (3e-9 + (cut == Cut::kRowWise ? 5e-9 : 0)) +
               (is_copy ? 0 : (8 * here + 4 * bags) * link);
  pass.forward = 20e-6 + here * (6e-9 + std::max(bytes, 64.0) / 20e9) + bags * 9e-9 +
                 shards * 2e-6 + (is_copy ? 0 : bags * bytes * link);
  pass.backward =
      30e-6 + stepped * 20e-9 + (stepped * bytes + 2 * touched * (bytes + 4)) / 40e9 +
      (is_copy ? shards * pass.distinct_here * (8 + bytes) * 2 * link : bags * bytes * link) +
      (is_merged ? touched * (90e-9 + bytes * 1e-9) : 0);
  return pass;
}

TEST(ProfileTest, PassesTellEverySpeed) {
  MachineProfile profile = measured();
  for (const Cut cut : {Cut::kTableWise, Cut::kRowWise, Cut::kColumnWise, Cut::kDataParallel}) {
    profile.passes.push_back(made(cut, 512, 16, 32, 1));
    profile.passes.push_back(made(cut, 2048, 16, 16, 4));
    profile.passes.push_back(made(cut, 1024, 8, 64, 16));
    profile.passes.push_back(made(cut, 256, 4, 128, 8));
    profile.passes.push_back(made(cut, 1024, 32, 64, 1));
  }
  const PassFit found = fit(profile.passes, 2, speeds_of(measured()));
  EXPECT_NEAR(found.speeds.memory / 20e9, 1, 0.05);
  EXPECT_NEAR(found.speeds.host / 4e9, 1, 0.05);
  EXPECT_NEAR(found.speeds.step / 40e9, 1, 0.05);
  EXPECT_NEAR(found.speeds.cut_seconds / 5e-9, 1, 0.05);
  EXPECT_NEAR(found.speeds.id_seconds / 20e-9, 1, 0.05);
  EXPECT_NEAR(found.speeds.merge_seconds / 90e-9, 1, 0.05);
  EXPECT_NEAR(found.speeds.merge_byte_seconds / 1e-9, 1, 0.05);
  EXPECT_EQ(speeds_of(profile), found.speeds);
  // A file keeps them, and a prediction of such a pass is its time.
  EXPECT_EQ(speeds_of(profile_from_json(to_json(profile))), found.speeds);
  for (const Pass& pass :
       {made(Cut::kRowWise, 512, 8, 32, 3), made(Cut::kTableWise, 100, 2, 8, 1)}) {
    Problem problem;
    problem.batch = pass.batch;
    problem.ranks.assign(2, {kNoLimit, found.speeds});
    problem.ranks_per_host = 2;
    Plan plan;
    for (int t = 0; t < pass.tables; ++t) {
      Table table;
      table.name = std::to_string(t);
      table.rows = pass.rows;
      table.dim = pass.dim;
      const double lookups = static_cast<double>(pass.batch) * pass.ids;
      table.features = {
          {pass.ids, false, {{lookups, pass.distinct_here}, {2 * lookups, pass.distinct}}}};
      problem.tables.push_back(table);
      TablePlan one{table.name, pass.cut, Kernel::kFused, {}};
      if (pass.cut == Cut::kRowWise) {
        one.shards = {{0, 0, pass.rows / 2, pass.dim, 0},
                      {pass.rows / 2, 0, pass.rows / 2, pass.dim, 1}};
      } else {
        one.shards = {{0, 0, pass.rows, pass.dim, t % 2}};
      }
      plan.push_back(one);
    }
    DenseLoad dense;
    dense.forward = 1e-3;
    dense.backward = 2e-3;
    dense.other = 0.5e-3;
    const StepTime time = predict(profile, cost_of(problem, plan), dense);
    const double all_reduce = fit(profile.all_reduce).fixed;
    EXPECT_NEAR(time.total(), pass.input + pass.forward + pass.backward + 3.5e-3 + all_reduce,
                0.03 * (pass.input + pass.forward + pass.backward));
  }
  profile.passes[0].ids = -1;
  EXPECT_THROW(profile_from_json(to_json(profile)), PlanError);
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
  should.links *= 1.3;
  should.lookup *= 1.3;
  should.dense *= 1.2;
  should.backward = 1.3 * before.gradients + 1.7 * before.step +
                    1.2 * (before.backward - before.gradients - before.step);
  profile.calibration = calibrate("runs/1", before, should);
  problem.ranks.assign(2, {kNoLimit, speeds_of(profile)});
  const StepTime after = predict(profile, cost_of(problem, result.plan), dense);
  EXPECT_NEAR(after.links / should.links, 1, 1e-6);
  EXPECT_NEAR(after.lookup / should.lookup, 1, 1e-6);
  EXPECT_NEAR(after.dense / should.dense, 1, 1e-6);
  EXPECT_NEAR(after.backward / should.backward, 1, 1e-6);
  EXPECT_EQ(calibrate("x", before, {}).links, 1);
  // A later run was predicted with these factors. It was not slower than that, so they stay; and
  // what it was slower by is beside them.
  const Calibration with = profile.calibration;
  const Calibration same = calibrate("runs/2", after, after, with);
  StepTime slower = after;
  slower.dense *= 1.1;
  const Calibration more = calibrate("runs/3", after, slower, with);
  for (const FactorName& name : kCalibrationFactors) {
    EXPECT_NEAR(same.*(name.factor), with.*(name.factor), 1e-6) << name.key;
  }
  EXPECT_NEAR(more.dense, 1.1 * with.dense, 1e-6);
  slower.dense *= 9;
  EXPECT_EQ(calibrate("runs/4", after, slower, with).dense, 2);
}

}  // namespace
}  // namespace tessera::planner
