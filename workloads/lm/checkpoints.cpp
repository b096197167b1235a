#include "lm/checkpoints.h"

#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/save.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::workloads {
namespace {

constexpr const char* kStep = "step";
constexpr const char* kLoss = "loss";
constexpr const char* kBatch = "batch";
constexpr const char* kLength = "length";
constexpr const char* kSeed = "seed";

std::int64_t number_of(const checkpoint::Values& values, const char* name) {
  const auto found = values.find(name);
  return found == values.end() ? 0 : std::get<std::int64_t>(found->second);
}

}  // namespace

LmCheckpoints::LmCheckpoints(const LmOptions& options, const Gpt& model,
                             torch::optim::Optimizer& optimizer, const comm::Mesh& mesh,
                             const comm::Group& world)
    : options_(options), optimizer_(optimizer), mesh_(mesh), world_(world) {
  for (checkpoint::PlacedTensor placed : model.placed_parameters()) {
    placed.name = "model." + placed.name;
    for (checkpoint::Piece& piece : placed.pieces) piece.tensor = piece.tensor.detach();
    state_.add(std::move(placed));
  }
  checkpoint::add_optimizer(state_, optimizer, model.placed_parameters());
  state_.values[kBatch] = options.batch;
  state_.values[kLength] = options.model.length;
  state_.values[kSeed] = static_cast<std::int64_t>(options.model.seed);
}

void LmCheckpoints::save(std::int64_t step, double loss) {
  state_.values[kStep] = step;
  state_.values[kLoss] = loss;
  // The other data ranks hold the same, and wait so that nobody loads or ends before it is there.
  if (mesh_.group("data").rank() == 0) {
    checkpoint::SaveOptions options;
    options.keep = options_.keep_checkpoints;
    options.log = [](const std::string&) {};
    checkpoint::save(options_.checkpoints, step, state_, mesh_.group("vocab"), options);
  }
  comm::barrier(world_);
}

LmCheckpoints::Place LmCheckpoints::load() {
  if (checkpoint::list_steps(options_.checkpoints).empty()) return {};
  const checkpoint::LoadReport report =
      checkpoint::load(options_.checkpoints, state_, mesh_.group("vocab"));
  const std::int64_t batch = number_of(report.values, kBatch);
  const std::int64_t length = number_of(report.values, kLength);
  const std::int64_t seed = number_of(report.values, kSeed);
  TESSERA_CHECK_VALUE(batch == options_.batch && length == options_.model.length &&
                          seed == static_cast<std::int64_t>(options_.model.seed),
                      "lm.resume: ", report.folder, " is of a job with batch ", batch, ", length ",
                      length, " and seed ", seed, "; this one has ", options_.batch, ", ",
                      options_.model.length, " and ", options_.model.seed, ".");
  // The rate that was saved is not the one that is asked for now.
  for (auto& group : optimizer_.param_groups()) group.options().set_lr(options_.learning_rate);
  const auto loss = report.values.find(kLoss);
  return {number_of(report.values, kStep),
          loss == report.values.end() ? 0.0 : std::get<double>(loss->second)};
}

}  // namespace tessera::workloads
