#include "tessera/checkpoint/replicas.h"

#include <ATen/ATen.h>

#include <functional>

#include "tessera/core/check.h"

namespace tessera::checkpoint {
namespace {

using data_parallel::CommHook;
using data_parallel::HookState;

// Tensors of one rank each, stacked: [ranks, ...].
constexpr const char* kRank = "rank/";
constexpr const char* kNumber = "number/";

struct Member {
  std::shared_ptr<CommHook> hook;  // null: there is nothing to save
  int rank = 0;
  int size = 1;
};

bool starts_with(const std::string& text, const std::string& start) {
  return text.rfind(start, 0) == 0;
}

class HookKeeper final : public Stateful {
 public:
  HookKeeper(std::function<Member()> member, std::string prefix)
      : member_(std::move(member)), prefix_(std::move(prefix)) {}

  void collect(std::vector<PlacedTensor>& tensors, Values& values) override {
    const Member member = member_();
    if (!member.hook) return;
    const HookState state = member.hook->state();
    State placed;
    for (const auto& [key, tensor] : state.tensors) {
      if (!state.local.contains(key)) {
        placed.add_replicated(prefix_ + key, tensor);
        continue;
      }
      std::vector<std::int64_t> shape = tensor.sizes().vec();
      shape.insert(shape.begin(), member.size);
      std::vector<std::int64_t> offsets(shape.size(), 0);
      offsets[0] = member.rank;
      placed.add_shard(prefix_ + kRank + key, shape, offsets, tensor.unsqueeze(0));
    }
    tensors.insert(tensors.end(), placed.tensors().begin(), placed.tensors().end());
    for (const auto& [key, number] : state.numbers) values[prefix_ + kNumber + key] = number;
  }

  void prepare(const Reader& source, std::vector<PlacedTensor>& tensors) override {
    loaded_ = {};
    scales_.clear();
    const Member member = member_();
    if (!member.hook) return;
    for (const TensorInfo& info : source.tensors()) {
      if (!starts_with(info.name, prefix_)) continue;
      const std::string key = info.name.substr(prefix_.size());
      if (starts_with(key, kRank) && !info.shape.empty()) {
        prepare_local(info, key.substr(std::string(kRank).size()), member, tensors);
        continue;
      }
      State placed;
      placed.add_replicated(info.name, at::empty(info.shape, scalar_type_of(info.dtype)));
      loaded_.tensors[key] = placed.tensors()[0].pieces[0].tensor;
      tensors.push_back(placed.tensors()[0]);
    }
  }

  void finish(const Values& values) override {
    const Member member = member_();
    if (!member.hook) return;
    for (const auto& [key, scale] : scales_) {
      if (scale != 1) loaded_.tensors[key].mul_(scale);
      loaded_.tensors[key] = loaded_.tensors[key].sum(0);
    }
    const std::string start = prefix_ + kNumber;
    for (const auto& [name, value] : values) {
      if (!starts_with(name, start)) continue;
      if (const auto* number = std::get_if<std::int64_t>(&value)) {
        loaded_.numbers[name.substr(start.size())] = *number;
      }
    }
    member.hook->load_state(loaded_);
    loaded_ = {};
  }

 private:
  // Rank r takes the rows r, r + size, ... of those that were saved.
  void prepare_local(const TensorInfo& info, const std::string& key, const Member& member,
                     std::vector<PlacedTensor>& tensors) {
    const std::int64_t saved = info.shape[0];
    std::vector<std::int64_t> shape = info.shape;
    shape[0] = saved > member.rank ? (saved - member.rank - 1) / member.size + 1 : 0;
    const at::Tensor rows = at::empty(shape, scalar_type_of(info.dtype));
    PlacedTensor placed{info.name, info.shape, {}, false, kSpread};
    for (std::int64_t i = 0; i < shape[0]; ++i) {
      std::vector<std::int64_t> offsets(shape.size(), 0);
      offsets[0] = member.rank + i * member.size;
      placed.pieces.push_back({offsets, rows.narrow(0, i, 1), {}});
    }
    tensors.push_back(std::move(placed));
    loaded_.tensors[key] = rows;
    scales_[key] = static_cast<double>(member.size) / static_cast<double>(saved);
  }

  std::function<Member()> member_;
  std::string prefix_;
  HookState loaded_;
  std::map<std::string, double> scales_;
};

}  // namespace

void add_hook(State& state, std::shared_ptr<CommHook> hook, int rank, int size,
              const std::string& prefix) {
  TESSERA_CHECK_VALUE(hook != nullptr, "checkpoint: there is no hook to save.");
  TESSERA_CHECK_VALUE(rank >= 0 && rank < size, "checkpoint: rank ", rank, " of ", size,
                      " does not exist.");
  state.add(std::make_shared<HookKeeper>(
      [hook = std::move(hook), rank, size] { return Member{hook, rank, size}; }, prefix));
}

void add_hook(State& state, data_parallel::Replica& replica, const std::string& prefix) {
  state.add(std::make_shared<HookKeeper>(
      [&replica] {
        return Member{replica.comm_hook(), replica.group().rank(), replica.group().size()};
      },
      prefix));
}

}  // namespace tessera::checkpoint
