#include "dlrm/checkpoints.h"

#include <ATen/Functions.h>

#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/core/check.h"

namespace tessera::workloads::dlrm {
namespace {

constexpr const char* kStep = "step";
constexpr const char* kTableSteps = "table_steps";
constexpr const char* kSamples = "samples_per_step";
constexpr const char* kSeed = "seed";

void quiet(const std::string& /*line*/) {}

checkpoint::SaveOptions save_options(const CheckpointOptions& options) {
  checkpoint::SaveOptions save;
  save.keep = options.keep;
  save.log = quiet;
  return save;
}

// State of whole rows has no columns of its own, so parts of one table would claim the same rows.
std::string state_name(const sharding::LocalShard& shard, const std::string& name,
                       const at::Tensor& state) {
  std::string full = "tables." + shard.table + "." + name;
  if (state.dim() == 1 && shard.place.columns != shard.table_columns) {
    full += ".column_" + std::to_string(shard.place.column);
  }
  return full;
}

void add_shard(checkpoint::State& state, const sharding::LocalShard& shard, const std::string& name,
               const at::Tensor& tensor, bool is_replicated) {
  if (is_replicated) {
    state.add_replicated(name, tensor);
  } else if (tensor.dim() == 2) {
    state.add_shard(name, {shard.table_rows, shard.table_columns},
                    {shard.place.row, shard.place.column}, tensor);
  } else {
    state.add_shard(name, {shard.table_rows}, {shard.place.row}, tensor);
  }
}

void add_tables(checkpoint::State& state, const sharding::ShardedEmbeddingBagCollection& tables) {
  for (const sharding::LocalShard& shard : tables.local_shards()) {
    if (shard.place.rows == 0) continue;
    const bool is_replicated =
        tables.plan().at(shard.table).type == sharding::ShardingType::kDataParallel;
    add_shard(state, shard, "tables." + shard.table + ".weight", shard.weight.detach(),
              is_replicated);
    for (const auto& [name, tensor] : shard.state) {
      add_shard(state, shard, state_name(shard, name, tensor), tensor, is_replicated);
    }
  }
}

template <class T>
T value_of(const checkpoint::Values& values, const char* name, T missing) {
  const auto found = values.find(name);
  return found == values.end() ? missing : std::get<T>(found->second);
}

}  // namespace

Checkpoints::Checkpoints(const CheckpointOptions& options, Dlrm& model,
                         torch::optim::Optimizer& optimizer,
                         sharding::ShardedEmbeddingBagCollection& tables, const comm::Group& group)
    : options_(options),
      tables_(tables),
      group_(group),
      saver_(options.folder, group, save_options(options)) {
  checkpoint::add_module(state_, model.shared_from_this());
  checkpoint::add_optimizer(state_, optimizer, model);
  add_tables(state_, tables);
  state_.values[kSamples] = options.samples_per_step;
  state_.values[kSeed] = static_cast<std::int64_t>(options.seed);
}

void Checkpoints::save(std::int64_t step, bool waits) {
  state_.values[kStep] = step;
  for (const auto& optimizer : tables_.optimizers()) {
    state_.values[kTableSteps] = optimizer->num_steps();
  }
  saver_.save(step, state_);
  if (waits) saver_.wait();
}

std::int64_t Checkpoints::load() {
  if (checkpoint::list_steps(options_.folder).empty()) return 0;
  const checkpoint::LoadReport report = checkpoint::load(options_.folder, state_, group_);
  const auto samples = value_of(report.values, kSamples, std::int64_t{0});
  const auto seed = value_of(report.values, kSeed, std::int64_t{0});
  TESSERA_CHECK_VALUE(
      samples == options_.samples_per_step && seed == static_cast<std::int64_t>(options_.seed),
      "dlrm.resume: ", report.folder, " is of a job with ", samples,
      " samples per step over all ranks and seed ", seed, "; this one has ",
      options_.samples_per_step, " and ", options_.seed, ".");
  const auto steps = value_of(report.values, kTableSteps, std::int64_t{0});
  for (const auto& optimizer : tables_.optimizers()) {
    auto state = optimizer->state_dict();
    const auto counter = state.find("step");
    if (counter == state.end()) continue;
    counter->second = at::full_like(counter->second, steps);
    optimizer->load_state_dict(state);
  }
  return value_of(report.values, kStep, report.step);
}

}  // namespace tessera::workloads::dlrm
