// Costs are sums of products of a speed and what a plan asks of it. So the speeds that make costs
// of measured passes what they were are a system of linear equations with too many rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tessera/planner/machine_profile.h"

namespace tessera::planner {
namespace {

constexpr int kRounds = 3000;
constexpr double kLeastShare = 0.2;  // of a pass: a shorter part counts as this
constexpr double kBytesPerElement = 4;

// All that is fitted: seconds a byte for the speeds, then the seconds, then the fixed ones.
constexpr std::array kSpeeds{&Speeds::memory, &Speeds::host, &Speeds::step};
constexpr std::size_t kNumSpeeds = kSpeeds.size();
constexpr std::size_t kNumSeconds = std::size(kSpeedSeconds);
constexpr std::size_t kFixed = kNumSpeeds + kNumSeconds;
constexpr std::size_t kNumUnknowns = kFixed + 3;
using Row = std::array<double, kNumUnknowns>;

Problem problem_of(const Pass& pass, int num_ranks, const Speeds& speeds) {
  Problem problem;
  problem.batch = pass.batch;
  problem.ranks.assign(static_cast<std::size_t>(num_ranks), {kNoLimit, speeds});
  problem.ranks_per_host = num_ranks;
  for (int t = 0; t < pass.tables; ++t) {
    Table& table = problem.tables.emplace_back();
    table.name = std::to_string(t);
    table.rows = pass.rows;
    table.dim = pass.dim;
    table.element_bytes = kBytesPerElement;
    table.has_exact_norms = true;
    const double lookups = static_cast<double>(pass.batch) * pass.ids;
    table.features[0].ids = pass.ids;
    table.features[0].distinct = {{lookups, pass.distinct_here}};
    if (num_ranks > 1) table.features[0].distinct.emplace_back(lookups * num_ranks, pass.distinct);
  }
  return problem;
}

Plan plan_of(const Pass& pass, int num_ranks) {
  Plan plan;
  for (int t = 0; t < pass.tables; ++t) {
    TablePlan& one = plan.emplace_back();
    one.name = std::to_string(t);
    one.cut = pass.cut;
    const auto even = [&](std::int64_t whole, int r) {
      const std::int64_t each = (whole + num_ranks - 1) / num_ranks;
      return std::clamp<std::int64_t>(whole - r * each, 0, each);
    };
    for (int r = 0; r < num_ranks; ++r) {
      if (pass.cut == Cut::kTableWise && r != t % num_ranks) continue;
      const bool is_row_cut = pass.cut == Cut::kRowWise;
      const bool is_column_cut = pass.cut == Cut::kColumnWise;
      one.shards.push_back({0, 0, is_row_cut ? even(pass.rows, r) : pass.rows,
                            is_column_cut ? even(pass.dim, r) : pass.dim, r});
    }
  }
  return plan;
}

// What a pass asks of one of the speeds, as the mean of all ranks: ids, forward, backward.
std::array<double, 3> asked(const Pass& pass, const Plan& plan, int num_ranks,
                            const Speeds& speeds) {
  std::array<double, 3> sums{};
  for (const ShardCost& cost : cost_of(problem_of(pass, num_ranks, speeds), plan)) {
    sums[0] += cost.seconds.ids / num_ranks;
    sums[1] += (cost.seconds.lookup + cost.seconds.rows) / num_ranks;
    sums[2] += (cost.seconds.gradients + cost.seconds.step) / num_ranks;
  }
  return sums;
}

}  // namespace

PassFit fit(const std::vector<Pass>& passes, int num_ranks, const Speeds& assumed) {
  PassFit found;
  found.speeds = assumed;
  if (passes.empty()) return found;
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  Speeds free;
  for (double Speeds::* speed : kSpeeds) free.*speed = kInfinite;
  free.network = kInfinite;
  std::vector<Row> rows;  // each over what was measured, which is 1 then or less
  std::vector<double> wanted;
  for (const Pass& pass : passes) {
    const Plan plan = plan_of(pass, num_ranks);
    std::array<Row, 3> three{};
    for (std::size_t i = 0; i < kFixed; ++i) {
      Speeds one = free;
      if (i < kNumSpeeds) {
        one.*kSpeeds[i] = 1;
      } else {
        one.*(kSpeedSeconds[i - kNumSpeeds].seconds) = 1;
      }
      const auto sums = asked(pass, plan, num_ranks, one);
      for (std::size_t k = 0; k < 3; ++k) three[k][i] = sums[k];
    }
    const std::array<double, 3> times{pass.input, pass.forward, pass.backward};
    const double whole = times[0] + times[1] + times[2];
    for (std::size_t k = 0; k < 3; ++k) {
      three[k][kFixed + k] = 1;
      const double scale = std::max(times[k], kLeastShare * whole);
      for (double& value : three[k]) value /= scale;
      rows.push_back(three[k]);
      wanted.push_back(times[k] / scale);
    }
  }
  // Least squares, none negative: one unknown after the other, from the products of all rows.
  std::array<Row, kNumUnknowns> products{};
  Row aims{};
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t i = 0; i < kNumUnknowns; ++i) {
      aims[i] += rows[r][i] * wanted[r];
      for (std::size_t k = 0; k < kNumUnknowns; ++k) products[i][k] += rows[r][i] * rows[r][k];
    }
  }
  Row unknown{};
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < kNumUnknowns; ++i) {
      if (products[i][i] == 0) continue;
      double rest = aims[i];
      for (std::size_t k = 0; k < kNumUnknowns; ++k) rest -= products[i][k] * unknown[k];
      unknown[i] = std::max(0.0, unknown[i] + rest / products[i][i]);
    }
  }
  for (std::size_t i = 0; i < kFixed; ++i) {
    if (i < kNumSpeeds) {
      if (unknown[i] > 0) found.speeds.*kSpeeds[i] = std::clamp(1 / unknown[i], 1.0, 1e18);
    } else {
      found.speeds.*(kSpeedSeconds[i - kNumSpeeds].seconds) = std::min(1.0, unknown[i]);
    }
  }
  found.input = unknown[kFixed];
  found.forward = unknown[kFixed + 1];
  found.backward = unknown[kFixed + 2];
  return found;
}

}  // namespace tessera::planner
