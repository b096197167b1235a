#include "checkpoint/managed_ids.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/load.h"
#include "tessera/comm/collectives.h"

namespace tessera::checkpoint {
namespace {

using collision::MCHManagedCollisionModule;
using collision::ShardedManagedCollisionCollection;

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr const char* kIds = "_mch_sorted_raw_ids";
constexpr const char* kSegments = "_output_segments_tensor";
constexpr const char* kIteration = "_current_iter_tensor";
constexpr const char* kHistoryIds = "_tessera_history_ids";
constexpr const char* kHistoryIterations = "_tessera_history_iter";
constexpr const char* kNumIds = "_tessera_num_ids";
// A number for each slot, the ids first.
constexpr std::array kOfSlots = {kIds, "_mch_remapped_ids_mapping", "_mch_counts",
                                 "_mch_last_access_iter"};

/// Tensors of a module by their names in it.
using Tensors = std::map<std::string, at::Tensor>;

/// A table's ids, and which part of them this rank has.
struct IdPart {
  std::string prefix;  // of the names of its tensors
  std::string table;
  std::shared_ptr<MCHManagedCollisionModule> ids;  // null: none
  std::vector<std::int64_t> bounds;                // of the rows of all parts

  std::int64_t first() const { return ids->options().output_global_offset; }
  std::int64_t size() const { return ids->options().zch_size; }
  std::int64_t end() const { return first() + size(); }
  std::int64_t offset() const { return first() - bounds.front(); }
  std::int64_t num_slots() const { return bounds.back() - bounds.front(); }
  std::int64_t num_parts() const { return static_cast<std::int64_t>(bounds.size()) - 1; }
  std::int64_t place() const {
    return std::find(bounds.begin(), bounds.end() - 1, first()) - bounds.begin();
  }
};

at::Tensor numbers(std::int64_t count) { return at::empty({count}, at::kLong); }

/// How many slots have ids, 2^63 - 1 being one if the module says so.
std::int64_t num_ids_of(const MCHManagedCollisionModule& ids, const at::Tensor& slots) {
  const auto count = slots.ne(kLargest).sum().item<std::int64_t>();
  const bool has_largest =
      ids.num_ids() == count + 1 && slots[count].item<std::int64_t>() == kLargest;
  return has_largest ? count + 1 : count;
}

// ---- what was saved ----

/// The rows at which saved parts begin, and the end of the last.
std::vector<std::int64_t> saved_bounds(const at::Tensor& segments) {
  const auto* bound = segments.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> bounds(bound, bound + segments.numel());
  std::erase_if(bounds, [](std::int64_t row) { return row < 0; });
  return bounds;
}

/// Which slots of a part have ids. `counts` says how many each saved part has; undefined, as before
/// it was saved: 2^63 - 1 is none. Empty if that is not what is in the slots.
at::Tensor slots_with_ids(const IdPart& part, const at::Tensor& ids, const at::Tensor& segments,
                          const at::Tensor& counts) {
  at::Tensor has_id = ids.ne(kLargest);
  if (!counts.defined()) return has_id;
  std::vector<std::int64_t> bounds = saved_bounds(segments);
  if (counts.numel() == 1) bounds = {part.first(), part.end()};
  if (counts.numel() + 1 != static_cast<std::int64_t>(bounds.size())) return {};
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    const std::int64_t begin = bounds[i] - part.first();
    const std::int64_t end = bounds[i + 1] - part.first();
    if (begin < 0 || end > part.size()) continue;
    const auto count = counts[static_cast<std::int64_t>(i)].item<std::int64_t>();
    const auto listed = has_id.slice(0, begin, end).sum().item<std::int64_t>();
    if (count == listed) continue;
    const bool has_largest = count == listed + 1 && begin + count <= end &&
                             ids[begin + listed].item<std::int64_t>() == kLargest;
    if (!has_largest) return {};
    has_id[begin + listed] = true;
  }
  return has_id;
}

/// The slots of parts put together, as one part has them: ids in order, then what is free.
Tensors put_together(const IdPart& part, const Tensors& loaded) {
  const auto counts = loaded.find(kNumIds);
  const at::Tensor ids = loaded.at(kIds);
  at::Tensor has_id = slots_with_ids(part, ids, loaded.at(kSegments),
                                     counts == loaded.end() ? at::Tensor() : counts->second);
  if (!has_id.defined()) has_id = ids.ne(kLargest);
  const at::Tensor ascending = at::argsort(ids, /*stable=*/true, /*dim=*/0);
  const at::Tensor taken = has_id.index_select(0, ascending);
  const at::Tensor order =
      at::cat({ascending.masked_select(taken), ascending.masked_select(taken.logical_not())});
  const auto num_ids = has_id.sum().item<std::int64_t>();
  Tensors state;
  for (const char* name : kOfSlots) {
    const auto found = loaded.find(name);
    if (found != loaded.end()) state[name] = found->second.index_select(0, order);
  }
  // Every part had a last slot that is never given up; of these only the last is one here.
  for (std::size_t i = 2; i < kOfSlots.size(); ++i) {
    const auto found = state.find(kOfSlots[i]);
    if (found != state.end()) found->second.slice(0, num_ids, part.size() - 1).zero_();
  }
  state[kNumIds] = at::full({1}, num_ids, at::kLong);
  return state;
}

std::string listed(const std::vector<std::int64_t>& bounds) {
  std::string text;
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(bounds[i]);
  }
  return text;
}

class ManagedIdsState final : public Stateful {
 public:
  ManagedIdsState(std::vector<IdPart> parts,
                  std::shared_ptr<ShardedManagedCollisionCollection> sharded)
      : parts_(std::move(parts)), sharded_(std::move(sharded)) {}

  void collect(std::vector<PlacedTensor>& tensors, Values& values) override;
  void prepare(const Reader& source, std::vector<PlacedTensor>& tensors) override;
  void finish(const Values& values) override;

 private:
  /// How many ids wait on all ranks, by table, and how many of them on earlier ones.
  std::pair<at::Tensor, at::Tensor> waiting(const std::vector<Tensors>& states) const;
  void check(const Reader& source, const IdPart& part) const;
  /// Those of the waiting ids that this rank owns, call by call.
  void add_history(const IdPart& part, const Tensors& loaded, Tensors& state) const;

  std::vector<IdPart> parts_;                                   // by table
  std::shared_ptr<ShardedManagedCollisionCollection> sharded_;  // null: all have the whole
  std::vector<Tensors> loaded_;                                 // by table, until a load is done
};

std::pair<at::Tensor, at::Tensor> ManagedIdsState::waiting(
    const std::vector<Tensors>& states) const {
  at::Tensor own = at::zeros({1, static_cast<std::int64_t>(states.size())}, at::kLong);
  for (std::size_t i = 0; i < states.size(); ++i) {
    const auto found = states[i].find(kHistoryIds);
    if (found != states[i].end()) own[0][static_cast<std::int64_t>(i)] = found->second.numel();
  }
  if (sharded_ == nullptr || sharded_->group().size() == 1) return {own[0], at::zeros_like(own[0])};
  const at::Tensor all = comm::all_gather(own, sharded_->group());
  return {all.sum(0), all.narrow(0, 0, sharded_->group().rank()).sum(0)};
}

void ManagedIdsState::collect(std::vector<PlacedTensor>& tensors, Values& /*values*/) {
  std::vector<Tensors> states;
  for (const IdPart& part : parts_) {
    states.push_back(part.ids == nullptr ? Tensors() : part.ids->state_dict());
  }
  const auto [all_waiting, earlier_waiting] = waiting(states);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const IdPart& part = parts_[i];
    Tensors& state = states[i];
    if (part.ids == nullptr) continue;
    // What every rank holds is that of rank 0, so that it fits together.
    const auto add = [&](const char* name, std::int64_t length, std::int64_t offset,
                         const at::Tensor& tensor) {
      tensors.push_back({part.prefix + name,
                         {length},
                         {{{offset}, tensor, {}}},
                         /*is_replicated=*/sharded_ == nullptr,
                         /*owner=*/sharded_ == nullptr ? 0 : kSpread});
    };
    for (const char* name : kOfSlots) {
      if (state.contains(name)) add(name, part.num_slots(), part.offset(), state.at(name));
    }
    add(kNumIds, part.num_parts(), part.place(),
        at::full({1}, num_ids_of(*part.ids, state.at(kIds)), at::kLong));
    const auto table = static_cast<std::int64_t>(i);
    const auto length = all_waiting[table].item<std::int64_t>();
    const auto offset = earlier_waiting[table].item<std::int64_t>();
    for (const char* name : {kHistoryIds, kHistoryIterations}) {
      at::Tensor& own = state.try_emplace(name, numbers(0)).first->second;
      // Of an empty list, the first part writes the shape.
      if (own.numel() > 0 || (length == 0 && part.place() == 0)) add(name, length, offset, own);
    }
    if (part.place() > 0) continue;
    for (const char* name : {kSegments, kIteration}) {
      add(name, state.at(name).numel(), 0, state.at(name));
    }
  }
}

void ManagedIdsState::prepare(const Reader& source, std::vector<PlacedTensor>& tensors) {
  loaded_.assign(parts_.size(), {});
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const IdPart& part = parts_[i];
    if (part.ids == nullptr) continue;
    const auto stage = [&, loaded = &loaded_[i]](const char* name, std::int64_t length,
                                                 std::int64_t offset, std::int64_t size) {
      at::Tensor memory = (*loaded)[name] = numbers(size);
      tensors.push_back({part.prefix + name, {length}, {{{offset}, memory, {}}}});
    };
    for (const auto& buffer : part.ids->named_buffers()) {
      const auto own = std::find(kOfSlots.begin(), kOfSlots.end(), std::string_view(buffer.key()));
      if (own != kOfSlots.end()) stage(*own, part.num_slots(), part.offset(), part.size());
    }
    for (const char* name : {kSegments, kIteration}) {
      const std::int64_t size = part.ids->named_buffers()[name].numel();
      stage(name, size, 0, size);
    }
    // Not there in what was saved before they were.
    for (const char* name : {kNumIds, kHistoryIds, kHistoryIterations}) {
      const TensorInfo* info = source.find(part.prefix + name);
      if (info == nullptr || info->shape.size() != 1) continue;
      stage(name, info->shape[0], 0, info->shape[0]);
    }
    check(source, part);
  }
}

// What does not fit is told before anything changes.
void ManagedIdsState::check(const Reader& source, const IdPart& part) const {
  const auto is_list = [&](const TensorInfo* info, std::int64_t length) {
    return info != nullptr && info->dtype == Dtype::kI64 &&
           info->shape == std::vector<std::int64_t>{length};
  };
  const TensorInfo* segments_info = source.find(part.prefix + kSegments);
  const TensorInfo* ids_info = source.find(part.prefix + kIds);
  const std::int64_t num_segments = part.ids->named_buffers()[kSegments].numel();
  // Names, shapes and types are compared for all tensors alike.
  if (!is_list(segments_info, num_segments) || !is_list(ids_info, part.num_slots())) return;
  at::Tensor segments;
  at::Tensor counts;
  const at::Tensor ids = numbers(part.size());
  try {
    segments = read_tensor(source, *segments_info);
    source.read(ids_info->name, {{part.offset()}, {part.size()}},
                reinterpret_cast<std::byte*>(ids.mutable_data_ptr()));
    const TensorInfo* counts_info = source.find(part.prefix + kNumIds);
    if (counts_info != nullptr) counts = read_tensor(source, *counts_info);
  } catch (const Error& error) {
    // A load turns to an older checkpoint when it reads the same again.
    if (error.kind() == ErrorKind::kCorrupt) return;
    throw;
  }
  const auto fail = [&](ErrorKind kind, const std::string& what) {
    throw Error(kind, source.folder() + ": " + what);
  };
  const std::string table = "table '" + part.table + "'";
  const auto bounds = saved_bounds(segments);
  const auto is_bound = [&](std::int64_t row) {
    return std::find(bounds.begin(), bounds.end(), row) != bounds.end();
  };
  if (!is_bound(part.first()) || !is_bound(part.end())) {
    fail(ErrorKind::kInvalid,
         "the ids of " + table + " were saved in parts whose rows begin at " + listed(bounds) +
             "; here a part has rows " + std::to_string(part.first()) + " to " +
             std::to_string(part.end() - 1) +
             ". Parts are put together, never cut: load on as many ranks, or table_wise.");
  }
  const at::Tensor has_id = slots_with_ids(part, ids, segments, counts);
  if (!has_id.defined()) {
    fail(ErrorKind::kCorrupt, table + " does not have as many ids as its parts say.");
  }
  const at::Tensor own = std::get<0>(ids.masked_select(has_id).sort());
  const at::Tensor is_twice = own.slice(0, 1).eq(own.slice(0, 0, -1));
  if (own.numel() > 1 && is_twice.any().item<bool>()) {
    const auto twice = own.slice(0, 1).masked_select(is_twice)[0].item<std::int64_t>();
    fail(ErrorKind::kCorrupt, table + " has id " + std::to_string(twice) + " twice.");
  }
  if (sharded_ == nullptr || own.numel() == 0) return;
  const at::Tensor owners = sharded_->owners(part.table, own);
  const at::Tensor is_other = owners.ne(sharded_->group().rank());
  if (!is_other.any().item<bool>()) return;
  fail(ErrorKind::kInvalid,
       "id " + std::to_string(own.masked_select(is_other)[0].item<std::int64_t>()) + " of " +
           table + " has a row of rank " + std::to_string(sharded_->group().rank()) +
           ", but belongs to rank " +
           std::to_string(owners.masked_select(is_other)[0].item<std::int64_t>()) +
           " here. Load on as many ranks as have saved it, with the same plan.");
}

void ManagedIdsState::add_history(const IdPart& part, const Tensors& loaded, Tensors& state) const {
  const auto ids = loaded.find(kHistoryIds);
  const auto iterations = loaded.find(kHistoryIterations);
  if (ids == loaded.end() || iterations == loaded.end()) return;
  at::Tensor own = ids->second;
  at::Tensor when = iterations->second;
  if (own.numel() == 0 || own.numel() != when.numel()) return;
  if (sharded_ != nullptr) {
    const at::Tensor is_own = sharded_->owners(part.table, own).eq(sharded_->group().rank());
    own = own.masked_select(is_own);
    when = when.masked_select(is_own);
  }
  const at::Tensor order = at::argsort(when, /*stable=*/true, /*dim=*/0);
  state[kHistoryIds] = own.index_select(0, order);
  state[kHistoryIterations] = when.index_select(0, order);
}

void ManagedIdsState::finish(const Values& /*values*/) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const IdPart& part = parts_[i];
    if (part.ids == nullptr) continue;
    Tensors state = put_together(part, loaded_[i]);
    state[kIteration] = loaded_[i].at(kIteration);
    state[kSegments] = part.ids->named_buffers()[kSegments].clone();
    add_history(part, loaded_[i], state);
    part.ids->load_state_dict(state);
  }
  loaded_.clear();
}

}  // namespace

void add_managed_ids(State& state, std::shared_ptr<MCHManagedCollisionModule> ids,
                     const std::string& prefix) {
  IdPart part;
  part.prefix = prefix;
  part.table = ids->options().name;
  const std::int64_t first = ids->options().output_global_offset;
  part.bounds = {first, first + ids->options().zch_size};
  part.ids = std::move(ids);
  state.add(std::make_shared<ManagedIdsState>(std::vector{std::move(part)}, nullptr));
}

void add_managed_ids(State& state, std::shared_ptr<ShardedManagedCollisionCollection> ids,
                     const std::string& prefix) {
  std::vector<IdPart> parts;
  for (const auto& table : ids->embedding_configs()) {
    parts.push_back({prefix + "_managed_collision_modules." + table.name + ".", table.name,
                     ids->part(table.name), ids->bounds(table.name)});
  }
  state.add(std::make_shared<ManagedIdsState>(std::move(parts), std::move(ids)));
}

}  // namespace tessera::checkpoint
