#include "tessera/comm/group.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include <ATen/Context.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backend.h"
#include "comm/engines.h"
#include "comm/member.h"
#include "comm/nccl/nccl_backend.h"
#include "comm/rendezvous.h"
#include "comm/torch_engine.h"
#include "tessera/comm/backend.h"
#include "tessera/core/check.h"

namespace tessera::comm {

namespace {

// What the others are told of this rank: NCCL is out for one whose caller asked for a CPU engine.
int gpus_for_nccl(const GroupOptions& options) {
  if (options.engine != Engine::kAuto || !has_nccl() || !at::hasCUDA()) return 0;
  return static_cast<int>(at::getNumGPUs());
}

// CUDA tensors go over NCCL if every rank of a host can have a GPU of its own; else they are staged
// through host memory. `nccl` becomes NCCL's engine, if it is that.
void add_cuda_engine(c10d::ProcessGroup& group, EngineBackend& engine,
                     const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options,
                     std::optional<TorchEngine>& nccl) {
  const CudaWay way = choose_cuda_way(engine.monitor().members());
  if (!way.is_nccl) {
    // Once a job: groups of some ranks choose for themselves, and say nothing.
    if (way.teller == group.getRank() && options.world_ranks.empty()) {
      std::fprintf(stderr,
                   "[tessera] group '%s' carries CUDA tensors through host memory instead of over "
                   "NCCL, which is slower: %s\n",
                   options.name.c_str(), way.reason.c_str());
    }
    group.setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::CUSTOM,
                     c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&engine));
    return;
  }
  const auto made = make_nccl_backend(c10::make_intrusive<c10d::PrefixStore>("nccl", store),
                                      group.getRank(), group.getSize(), options.timeout);
  group.setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, made);
  nccl.emplace(made);
}

}  // namespace

struct Group::State {
  std::string name;
  c10::intrusive_ptr<EngineBackend> engine;  // null for groups made elsewhere
  c10::intrusive_ptr<c10d::Store> store;     // may be null for those
  GroupOptions options;
  std::optional<TorchEngine> nccl;  // nothing for groups without
};

GroupOptions default_group_options() {
  GroupOptions options;
  if (const char* seconds = std::getenv("TESSERA_TIMEOUT")) {
    char* end = nullptr;
    const double value = std::strtod(seconds, &end);
    TESSERA_CHECK_VALUE(end != seconds && *end == '\0' && value > 0,
                        "comm.init: TESSERA_TIMEOUT is '", seconds,
                        "', not a positive number of seconds.");
    options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(value * 1000));
  }
  if (const char* engine = std::getenv("TESSERA_ENGINE")) {
    const std::string name = engine;
    TESSERA_CHECK_VALUE(name == "auto" || name == "shm" || name == "gloo",
                        "comm.init: TESSERA_ENGINE is '", name, "'. It may be auto, shm or gloo.");
    options.engine = name == "shm" ? Engine::kShm : name == "gloo" ? Engine::kGloo : Engine::kAuto;
  }
  if (const char* check = std::getenv("TESSERA_CHECK_COLLECTIVES")) {
    options.check_gloo_calls = std::string(check) != "0";
  }
  return options;
}

Group::Group(c10::intrusive_ptr<c10d::ProcessGroup> process_group)
    : group_(std::move(process_group)) {
  TESSERA_CHECK_VALUE(group_, "comm.group: there is no process group to wrap.");
  rank_ = group_->getRank();
  size_ = group_->getSize();
  state_ = std::make_shared<State>();
  state_->store = group_->getStore();
  state_->options = default_group_options();
  if (has_engine_for(*group_, c10::DeviceType::CPU)) {
    state_->engine = c10::dynamic_intrusive_pointer_cast<EngineBackend>(
        group_->getBackend(c10::DeviceType::CPU));
  }
  state_->name = state_->engine ? state_->engine->monitor().group_name() : "process group";
}

Group::Group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::shared_ptr<State> state)
    : group_(std::move(process_group)),
      state_(std::move(state)),
      rank_(group_->getRank()),
      size_(group_->getSize()) {}

int Group::world_rank(int group_rank) const {
  TESSERA_CHECK_VALUE(group_rank >= 0 && group_rank < size_, "comm.group: ", group_rank,
                      " is not a rank of a group of ", size_, ".");
  return state_->engine ? state_->engine->monitor().members()[group_rank].world_rank : group_rank;
}

const std::string& Group::name() const noexcept { return state_->name; }

std::string Group::engine() const {
  return state_->engine ? state_->engine->getBackendName() : group_->getBackendName();
}

c10::intrusive_ptr<c10d::Store> Group::store() const {
  TESSERA_CHECK_VALUE(state_->store, "comm.group: group '", state_->name,
                      "' was made without a store.");
  return state_->store;
}

std::shared_ptr<Group> Group::subgroup(const std::vector<int>& ranks,
                                       const std::string& name) const {
  TESSERA_CHECK_VALUE(!ranks.empty(), "comm.subgroup: a group needs at least one rank.");
  std::string key = "subgroup/" + name;
  GroupOptions options = state_->options;
  options.name = name;
  options.world_ranks.clear();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    TESSERA_CHECK_VALUE(ranks[i] >= 0 && ranks[i] < size_, "comm.subgroup: ", ranks[i],
                        " is not a rank of a group of ", size_, ".");
    TESSERA_CHECK_VALUE(i == 0 || ranks[i - 1] < ranks[i],
                        "comm.subgroup: the ranks must ascend, but ", ranks[i - 1],
                        " comes before ", ranks[i], ".");
    options.world_ranks.push_back(world_rank(ranks[i]));
    key.append("/").append(std::to_string(ranks[i]));
  }
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  return std::make_shared<Group>(make_group(c10::make_intrusive<c10d::PrefixStore>(key, store()),
                                            static_cast<int>(place - ranks.begin()),
                                            static_cast<int>(ranks.size()), options));
}

void Group::abort(const std::string& reason) const {
  if (state_->engine) {
    state_->engine->fail(FailureKind::kAborted, {rank_},
                         "comm: group '" + name() + "' was aborted by rank " +
                             std::to_string(world_rank(rank_)) + ": " + reason);
  } else {
    group_->abort();
  }
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size, const GroupOptions& options) {
  return make_engine(store, rank, size, options);
}

Group make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                 const GroupOptions& options) {
  auto state = std::make_shared<Group::State>();
  state->engine = make_engine(store, rank, size, options, gpus_for_nccl(options));
  state->name = options.name;
  state->store = store;
  state->options = options;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  // As CUSTOM, never as GLOO: LibTorch casts what is registered under that name to its own class.
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, state->engine);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  if (at::hasCUDA()) add_cuda_engine(*group, *state->engine, store, options, state->nccl);
  group->setGroupName(options.name);
  return {std::move(group), std::move(state)};
}

}  // namespace tessera::comm
