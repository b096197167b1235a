// Times training steps on sharded tables: ids out, rows home, gradients back, rows stepped. Eight
// tables of 200,000 x 64, 20 ids per bag, SGD, one thread per rank.
//
//   sharding/<type>_step/<engine>/b<batch per rank>    the peer is torchrec over Gloo
//
//   step_bench [--ranks N] [--seconds S] [--only WORD]
//
// With --only, just the rows whose name contains the word.

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "kernels/dispatch.h"
#include "support/rank_bench.h"
#include "support/rank_groups.h"
#include "support/row.h"
#include "tessera/comm/group.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::bench {
namespace {

using sharding::Placement;

constexpr std::int64_t kTables = 8;
constexpr std::int64_t kRows = 200'000;
constexpr std::int64_t kColumns = 64;
constexpr std::int64_t kBag = 20;
constexpr int kRotation = 8;

std::vector<embedding::EmbeddingBagConfig> tables() {
  std::vector<embedding::EmbeddingBagConfig> all;
  for (std::int64_t t = 0; t < kTables; ++t) {
    embedding::EmbeddingBagConfig config;
    config.name = "t" + std::to_string(t);
    config.num_embeddings = kRows;
    config.embedding_dim = kColumns;
    config.feature_names = {"f" + std::to_string(t)};
    all.push_back(config);
  }
  return all;
}

std::vector<jagged::KeyedJaggedTensor> batches(std::int64_t batch, int rank) {
  std::vector<std::string> keys;
  for (std::int64_t t = 0; t < kTables; ++t) keys.push_back("f" + std::to_string(t));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(rank) + 1);
  std::vector<jagged::KeyedJaggedTensor> all;
  for (int i = 0; i < kRotation; ++i) {
    const at::Tensor ids = at::randint(0, kRows, {kTables * batch * kBag}, generator, at::kLong);
    all.push_back(jagged::KeyedJaggedTensor::from_lengths_sync(
        keys, ids, at::full({kTables * batch}, kBag, at::kInt)));
  }
  return all;
}

void run(RankBench& bench, double seconds, const std::string& only) {
  at::set_num_threads(1);
  const RankGroups groups(bench);
  const std::vector<std::pair<std::string, std::function<Placement(int)>>> types{
      {"table_wise", [&](int t) { return sharding::table_wise(t % bench.size()); }},
      {"row_wise", [](int) { return sharding::row_wise(); }},
      {"column_wise", [&](int) {
         std::vector<int> ranks;
         for (int r = 0; r < bench.size(); ++r) ranks.push_back(r);
         return sharding::column_wise(ranks);
       }}};
  for (const auto engine : {comm::Engine::kShm, comm::Engine::kGloo}) {
    const std::string word = engine == comm::Engine::kShm ? "shm" : "gloo";
    const comm::Group group = groups.of(engine, word);
    for (const auto& [type, place] : types) {
      std::map<std::string, Placement> wishes;
      for (int t = 0; t < kTables; ++t) wishes.emplace("t" + std::to_string(t), place(t));
      sharding::ShardedOptions sharded;
      sharded.local_size = bench.size();
      sharding::ShardedEmbeddingBagCollection collection(
          tables(), sharding::make_module_plan(tables(), wishes, {bench.size(), bench.size()}),
          group, false, sharded);
      for (const std::int64_t batch : {std::int64_t{64}, std::int64_t{2048}}) {
        const std::string name =
            "sharding/" + type + "_step/" + word + "/b" + std::to_string(batch);
        if (name.find(only) == std::string::npos) continue;
        const auto inputs = batches(batch, bench.rank());
        const at::Tensor gradient = at::rand({batch, kTables * kColumns}).sub_(0.5).mul_(1e-3);
        int step = 0;
        const Samples samples = bench.measure(
            [&] {
              const auto output = collection.forward(inputs[step++ % kRotation]);
              output.values().backward(gradient);
            },
            batch < 1000 ? 8 : 1, seconds);
        if (bench.rank() != 0) continue;
        RowLabel label;
        label.name = name;
        label.ranks = bench.size();
        label.isa = std::string(kernels::name_of(kernels::active_isa()));
        label.bytes = static_cast<std::size_t>(kTables * batch * kColumns * 4);
        label.others = samples.others;
        label.copy_gbps = samples.copy_gbps;
        for (const bool is_far : {false, true}) {
          label.state = is_far ? "far" : "near";
          print_row(label, is_far ? samples.far : samples.near);
        }
      }
    }
  }
  bench.meet();
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  double seconds = 2.0;
  std::string only;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
  }
  return tessera::bench::run_ranks(argc, argv, {2}, [&](tessera::bench::RankBench& bench) {
    tessera::bench::run(bench, seconds, only);
  });
}
