// tessera-worker profile-rank — one of the ranks that `tessera doctor --profile` measures with.
//
// All ranks of the host do the same at once, since memory and links are shared; a time is the
// slowest rank's, the median of five. What there is no time for is left out: see `Measuring`. Hosts
// measure themselves beside each other, and then what lies between them together.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "measuring.h"
#include "profile_passes.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/topology.h"
#include "tessera/core/version.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/planner/machine_profile.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

using planner::Curve;

constexpr std::int64_t kWidths[] = {16, 32, 64, 128, 256};  // columns of a row
constexpr std::int64_t kTables[] = {1, 32};
constexpr std::int64_t kExchanges[] = {512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20};
constexpr std::int64_t kLayers[] = {64, 256, 1024};
constexpr std::chrono::seconds kBetweenHosts{12};

embedding::TableBatch batch_of(std::int64_t tables, std::int64_t rows, std::int64_t columns) {
  std::vector<embedding::Table> list;
  std::vector<embedding::Feature> features;
  for (std::int64_t i = 0; i < tables; ++i) {
    const std::string name = "t" + std::to_string(i);
    at::Tensor weight = embedding::empty_rows(rows, columns, at::kFloat);
    weight.fill_(0.01);
    list.push_back({name, weight});
    features.push_back({name, i});
  }
  return {list,
          features,
          {.gradients = embedding::GradientForm::kFused,
           .optimizer = {.kind = embedding::OptimizerKind::kRowWiseAdagrad}}};
}

// Rows far larger than the caches, from a cache line to 1 KiB wide.
void measure_rows(Measuring& seconds, std::int64_t table_bytes, planner::MachineProfile& profile) {
  constexpr std::int64_t kBag = 16;
  constexpr std::int64_t kInputs = 4;
  std::mt19937_64 random(1);
  for (const std::int64_t columns : kWidths) {
    if (!seconds.begins()) continue;
    const std::int64_t rows = table_bytes / (columns * 4);
    const std::int64_t samples = std::max<std::int64_t>(64, (1 << 18) / columns / kBag);
    const embedding::TableBatch batch = batch_of(1, rows, columns);
    const std::int64_t num_ids = samples * kBag;
    std::vector<embedding::LookupInput> inputs;
    for (std::int64_t i = 0; i < kInputs; ++i) {
      at::Tensor ids = at::empty({num_ids}, at::kLong);
      auto* id = ids.data_ptr<std::int64_t>();
      for (std::int64_t k = 0; k < num_ids; ++k) {
        id[k] = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
      }
      inputs.push_back({ids, at::arange(0, num_ids + 1, kBag, at::kLong)});
    }
    const at::Tensor gradient = at::full({samples, columns}, 1e-6);
    std::size_t next = 0;
    const double forward = seconds([&] { batch.pooled(inputs[next++ % kInputs]); });
    const double both = seconds([&] { batch.pooled(inputs[next++ % kInputs]).backward(gradient); });
    const auto ids = static_cast<double>(num_ids);
    const double row_bytes = static_cast<double>(columns) * 4;
    profile.rows.emplace_back(row_bytes, forward / ids);
    const double touched = 1 - std::pow(1 - 1.0 / static_cast<double>(rows), ids);
    const double moved =
        row_bytes + 2 * touched * static_cast<double>(rows) / ids * (row_bytes + 4);
    profile.steps.emplace_back(moved, std::max(1e-12, (both - forward) / ids));
  }
}

// Many tables of next to nothing: what a table costs by itself.
void measure_parts(Measuring& seconds, planner::MachineProfile& profile) {
  for (const std::int64_t tables : kTables) {
    if (!seconds.begins()) continue;
    const embedding::TableBatch batch = batch_of(tables, 16, 16);
    const std::int64_t num_ids = tables * 4;
    const embedding::LookupInput input{at::zeros({num_ids}, at::kLong),
                                       at::arange(0, num_ids + 1, 1, at::kLong)};
    const at::Tensor gradient = at::full({4, 16 * tables}, 1e-6);
    profile.parts.emplace_back(tables, seconds([&] { batch.pooled(input).backward(gradient); }));
  }
}

void measure_links(Measuring& seconds, const comm::Group& group, planner::MachineProfile& profile) {
  if (group.size() < 2) return;
  const double leaving = static_cast<double>(group.size() - 1) / group.size();
  for (const std::int64_t bytes : kExchanges) {
    if (!seconds.begins()) continue;
    const std::int64_t count = std::max<std::int64_t>(1, bytes / 4 / group.size()) * group.size();
    at::Tensor tensor = at::zeros({count});
    profile.host.emplace_back(static_cast<double>(count) * 4 * leaving,
                              seconds([&] { comm::all_to_all(tensor, group); }));
    profile.all_reduce.emplace_back(static_cast<double>(count) * 4,
                                    seconds([&] { comm::all_reduce_(tensor, group); }));
  }
}

// Exchanges of all ranks at once, each with those of its number on the other hosts: a host's ranks
// share its way out.
void measure_network(double seconds_each, const comm::Group& across, const comm::Group& world,
                     planner::MachineProfile& profile) {
  Measuring seconds(world, seconds_each, Measuring::Clock::now() + kBetweenHosts,
                    static_cast<int>(std::size(kExchanges)));
  const double leaving = static_cast<double>(across.size() - 1) / across.size();
  for (const std::int64_t bytes : kExchanges) {
    if (!seconds.begins()) continue;
    const std::int64_t count = std::max<std::int64_t>(1, bytes / 4 / across.size()) * across.size();
    at::Tensor tensor = at::zeros({count});
    profile.network.emplace_back(static_cast<double>(count) * 4 * leaving,
                                 seconds([&] { comm::all_to_all(tensor, across); }));
    profile.network_all_reduce.emplace_back(static_cast<double>(count) * 4,
                                            seconds([&] { comm::all_reduce_(tensor, world); }));
  }
  profile.spread = std::max(profile.spread, seconds.spread());
  profile.left_out += seconds.left_out();
}

void measure_dense(Measuring& seconds, planner::MachineProfile& profile) {
  constexpr std::int64_t kSamples = 512;
  for (const std::int64_t width : kLayers) {
    if (!seconds.begins()) continue;
    const at::Tensor input = at::full({kSamples, width}, 0.5);
    const at::Tensor weight = at::full({width, width}, 0.01);
    profile.dense.emplace_back(6.0 * kSamples * static_cast<double>(width * width), seconds([&] {
                                 const at::Tensor output = at::mm(input, weight);
                                 at::mm(output, weight.t());
                                 at::mm(input.t(), output);
                               }));
  }
}

// profile-rank SECONDS [--quick]: it ends before the steady clock says so many; with a plus, so
// many after all ranks have met. What lies between hosts comes after that.
int profile_rank(const std::vector<std::string>& words) {
  const std::string until = words.empty() ? "" : words[0];
  const bool is_quick = words.size() > 1 && words[1] == "--quick";
  const double seconds_each = is_quick ? 0.02 : 0.2;
  comm::GroupOptions options = comm::default_group_options();
  options.name = "profile";
  const comm::Group world = comm::init(options);
  const bool has_hosts = comm::get_num_groups(world.size()) > 1;
  const auto [group, across] =
      has_hosts ? comm::intra_and_cross_node_pg(world) : std::pair(world, world);
  const auto end = Measuring::Clock::time_point(
      (until.starts_with('+') ? Measuring::Clock::now().time_since_epoch()
                              : Measuring::Clock::duration::zero()) +
      std::chrono::duration_cast<Measuring::Clock::duration>(
          std::chrono::duration<double>(std::strtod(until.c_str(), nullptr))));
  planner::MachineProfile profile;
  profile.version = version();
  profile.engine = group.engine();
  profile.num_ranks = group.size();
  profile.threads_per_rank = at::get_num_threads();
  const std::size_t points = std::size(kWidths) + std::size(kTables) + std::size(kLayers) +
                             (group.size() > 1 ? std::size(kExchanges) : 0);
  Measuring seconds(group, seconds_each, end,
                    static_cast<int>(points) + num_passes(group, is_quick));
  measure_rows(seconds, std::int64_t{is_quick ? 16 : 96} << 20, profile);
  measure_parts(seconds, profile);
  measure_links(seconds, group, profile);
  measure_dense(seconds, profile);
  profile.passes = measure_passes(seconds, group, is_quick);
  profile.spread = seconds.spread();
  profile.left_out = seconds.left_out();
  if (has_hosts) measure_network(seconds_each, across, world, profile);
  for (Curve* curve :
       {&profile.rows, &profile.steps, &profile.parts, &profile.host, &profile.network,
        &profile.all_reduce, &profile.network_all_reduce, &profile.dense}) {
    *curve = planner::rising(std::move(*curve));
  }
  if (group.rank() == 0) std::printf("%s\n", planner::to_json(profile).c_str());
  std::fflush(stdout);
  comm::barrier(world);
  return 0;
}

}  // namespace

const WorkerVerb kProfileRankVerb{"profile-rank", profile_rank};

}  // namespace tessera::cli
