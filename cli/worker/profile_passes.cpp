#include "profile_passes.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>

#include <ATen/ATen.h>

#include "tessera/comm/collectives.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
using jagged::KeyedJaggedTensor;
using planner::Cut;
using planner::Pass;

constexpr int kBatches = 4;
constexpr int kMostPasses = 200;

struct PassLoad {
  std::int64_t batch;
  std::int64_t tables;
  std::int64_t rows;
  std::int64_t dim;
  std::int64_t ids;
  bool is_skewed;
};
// Shapes that differ in what they have most of, so that each part of a pass can be told apart.
constexpr PassLoad kLoads[] = {
    {512, 16, 100'000, 32, 1, false},  {2048, 16, 50'000, 16, 4, true},
    {1024, 8, 100'000, 64, 16, false}, {256, 4, 200'000, 128, 8, true},
    {4096, 16, 100'000, 32, 2, true},  {1024, 32, 30'000, 16, 1, false},
};

// Ids of `load`, feature by feature: even, or such that the k-th most asked for has a share of 1/k.
at::Tensor draw_ids(const PassLoad& load, std::mt19937_64& random) {
  at::Tensor ids = at::empty({load.tables * load.batch * load.ids}, at::kLong);
  auto* id = ids.data_ptr<std::int64_t>();
  const auto rows = static_cast<std::uint64_t>(load.rows);
  const double log_rows = std::log(static_cast<double>(load.rows));
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    std::uint64_t one = random();
    if (load.is_skewed) {
      const double place = std::exp(log_rows * static_cast<double>(one >> 11) * 0x1p-53) - 1;
      one = static_cast<std::uint64_t>(place) * 7'919;  // a prime: spread over the rows
    }
    id[i] = static_cast<std::int64_t>(one % rows);
  }
  return ids;
}

double distinct_per_table(const at::Tensor& ids, std::int64_t tables) {
  double count = 0;
  for (const at::Tensor& one : ids.view({tables, -1}).unbind(0)) {
    count += static_cast<double>(std::get<0>(at::_unique(one)).numel());
  }
  return count / static_cast<double>(tables);
}

sharding::Placement placement_of(Cut cut, int table, int num_ranks) {
  std::vector<int> all(static_cast<std::size_t>(num_ranks));
  std::iota(all.begin(), all.end(), 0);
  switch (cut) {
    case Cut::kRowWise:
      return sharding::row_wise();
    case Cut::kColumnWise:
      return sharding::column_wise(all);
    case Cut::kDataParallel:
      return sharding::data_parallel().with_kernel(sharding::ComputeKernel::kFused);
    default:
      return sharding::table_wise(table % num_ranks);
  }
}

Pass measure(Cut cut, const PassLoad& load, const comm::Group& group, Measuring& seconds) {
  std::vector<embedding::EmbeddingBagConfig> tables;
  std::map<std::string, sharding::Placement> wishes;
  std::vector<std::string> keys;
  for (int t = 0; t < load.tables; ++t) {
    embedding::EmbeddingBagConfig& table = tables.emplace_back();
    table.name = keys.emplace_back("t" + std::to_string(t));
    table.num_embeddings = load.rows;
    table.embedding_dim = load.dim;
    table.feature_names = {table.name};
    wishes.emplace(table.name, placement_of(cut, t, group.size()));
  }
  sharding::ShardedOptions options;
  options.local_size = group.size();
  options.optimizer.kind = embedding::OptimizerKind::kRowWiseAdagrad;
  options.exact_row_norms = true;
  sharding::ShardedEmbeddingBagCollection collection(
      tables, sharding::make_module_plan(tables, wishes, {group.size(), group.size()}), group,
      /*is_weighted=*/false, options);

  std::mt19937_64 random(static_cast<std::uint64_t>(group.rank()) + 1);
  std::vector<KeyedJaggedTensor> batches;
  Pass pass;
  for (int i = 0; i < kBatches; ++i) {
    const at::Tensor ids = draw_ids(load, random);
    jagged::KeyedJaggedFields fields;
    fields.lengths = at::full({load.tables * load.batch}, load.ids, at::kInt);
    fields.stride = load.batch;
    fields.length_per_key =
        std::vector<std::int64_t>(static_cast<std::size_t>(load.tables), load.batch * load.ids);
    batches.emplace_back(keys, ids, std::move(fields));
    if (i > 0) continue;
    const at::Tensor everyone =
        comm::all_gather_v(ids, group).view({group.size(), load.tables, -1}).transpose(0, 1);
    pass.distinct_here = distinct_per_table(ids, load.tables);
    pass.distinct = distinct_per_table(everyone.reshape({-1}), load.tables);
  }
  const at::Tensor gradient = at::full({load.batch, load.tables * load.dim}, 1e-6);

  std::array<std::vector<double>, 3> times;
  const auto once = [&](std::size_t number) {
    const auto begin = Clock::now();
    const auto input = collection.input_dist(batches[number % batches.size()]).wait().wait();
    const auto sent = Clock::now();
    const at::Tensor rows = collection.compute_and_output_dist(input).wait().values();
    const auto read = Clock::now();
    rows.backward(gradient);
    const auto stepped = Clock::now();
    times[0].push_back(std::chrono::duration<double>(sent - begin).count());
    times[1].push_back(std::chrono::duration<double>(read - sent).count());
    times[2].push_back(std::chrono::duration<double>(stepped - read).count());
  };
  for (std::size_t i = 0; i < 2; ++i) once(i);
  const Repetitions often = seconds.repetitions(times[0][1] + times[1][1] + times[2][1]);
  const int more = std::min(often.times * often.calls, kMostPasses);
  // The first pass makes what later ones use again; the second counts only if there is no time.
  for (auto& list : times) list.erase(list.begin(), list.begin() + (more > 0 ? 2 : 1));
  for (int i = 0; i < more; ++i) once(static_cast<std::size_t>(i));
  const std::size_t count = times[0].size();
  at::Tensor medians = at::empty({3}, at::kDouble);
  for (std::size_t k = 0; k < times.size(); ++k) {
    const auto middle = times[k].begin() + static_cast<std::ptrdiff_t>(count / 2);
    std::nth_element(times[k].begin(), middle, times[k].end());
    medians[static_cast<std::int64_t>(k)] = *middle;
  }
  // Ranks that wait in one part are late in another: their mean adds up to a pass.
  comm::all_reduce_(medians, group, comm::Reduction::kSum);
  medians.div_(group.size());
  pass.cut = cut;
  pass.batch = load.batch;
  pass.tables = static_cast<int>(load.tables);
  pass.rows = load.rows;
  pass.dim = load.dim;
  pass.ids = static_cast<double>(load.ids);
  pass.input = medians[0].item<double>();
  pass.forward = medians[1].item<double>();
  pass.backward = medians[2].item<double>();
  return pass;
}

std::vector<PassLoad> loads_for(bool is_quick) {
  std::vector<PassLoad> loads;
  std::copy_if(std::begin(kLoads), std::end(kLoads), std::back_inserter(loads),
               [&](const PassLoad& load) { return !is_quick || load.batch <= 1024; });
  return loads;
}

std::vector<Cut> cuts_for(const comm::Group& group) {
  if (group.size() < 2) return {Cut::kTableWise, Cut::kDataParallel};
  return {Cut::kTableWise, Cut::kDataParallel, Cut::kRowWise, Cut::kColumnWise};
}

}  // namespace

int num_passes(const comm::Group& group, bool is_quick) {
  return static_cast<int>(loads_for(is_quick).size() * cuts_for(group).size());
}

std::vector<Pass> measure_passes(Measuring& seconds, const comm::Group& group, bool is_quick) {
  std::vector<Pass> passes;
  for (PassLoad load : loads_for(is_quick)) {
    if (is_quick) load.rows /= 10;
    for (const Cut cut : cuts_for(group)) {
      if (seconds.begins()) passes.push_back(measure(cut, load, group, seconds));
    }
  }
  return passes;
}

}  // namespace tessera::cli
