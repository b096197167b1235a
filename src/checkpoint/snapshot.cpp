#include "checkpoint/snapshot.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/core/check.h"

namespace tessera::checkpoint {
namespace {

void check_piece(const PlacedTensor& placed, const Piece& piece) {
  const at::Tensor& tensor = piece.tensor;
  TESSERA_CHECK_VALUE(tensor.defined(), "checkpoint: a piece of '", placed.name,
                      "' has no tensor.");
  TESSERA_CHECK_VALUE(tensor.layout() == at::kStrided, "checkpoint: '", placed.name,
                      "' is not a dense tensor.");
  const auto rank = placed.shape.size();
  bool is_inside = piece.offsets.size() == rank && tensor.dim() == static_cast<std::int64_t>(rank);
  for (std::size_t i = 0; is_inside && i < rank; ++i) {
    is_inside = piece.offsets[i] >= 0 && piece.offsets[i] + tensor.size(i) <= placed.shape[i];
  }
  TESSERA_CHECK_VALUE(is_inside, "checkpoint: a piece of '", placed.name, "' at ",
                      text_of(piece.offsets), " of ", text_of(tensor.sizes().vec()),
                      " leaves its shape ", text_of(placed.shape), ".");
  if (!piece.touched_rows.defined()) return;
  TESSERA_CHECK_VALUE(rank == 1 || rank == 2, "checkpoint: '", placed.name, "' has ", rank,
                      " dimensions; only tensors of one or two can be saved as a delta.");
  TESSERA_CHECK_TYPE(piece.touched_rows.scalar_type() == at::kLong && piece.touched_rows.dim() == 1,
                     "checkpoint: the touched rows of '", placed.name,
                     "' are not a vector of int64.");
}

struct DeviceOrder {
  bool operator()(const at::Device& a, const at::Device& b) const {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  }
};

class Taker {
 public:
  Taker(Snapshot& snapshot, Staging* staging) : snapshot_(snapshot), staging_(staging) {}

  void take(const std::string& name, const std::vector<std::int64_t>& shape,
            std::vector<std::int64_t> offsets, const at::Tensor& source) {
    const at::Tensor tensor = source.detach();
    const at::Tensor memory = in_host_memory(name, tensor);
    Part part;
    part.name = name;
    part.dtype = dtype_of(memory.scalar_type());
    part.shape = shape;
    part.region = {std::move(offsets), memory.sizes().vec()};
    part.data = static_cast<const std::byte*>(memory.const_data_ptr());
    // A part without bytes needs no address, but a writer that asks for none does.
    static const std::byte kNothing{};
    if (part.data == nullptr) part.data = &kNothing;
    snapshot_.parts.push_back(std::move(part));
    snapshot_.memory.push_back(memory);
  }

  /// Waits for copies that devices have begun. Before anybody reads or changes the tensors.
  void wait() const {
    for (const at::Device& device : devices_) {
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
    }
  }

 private:
  at::Tensor in_host_memory(const std::string& name, const at::Tensor& tensor) {
    if (staging_ == nullptr) return tensor.to(at::kCPU).contiguous();
    at::Tensor& kept = (*staging_)[name + "#" + std::to_string(num_of_name_[name]++)];
    if (!kept.defined() || kept.sizes() != tensor.sizes() ||
        kept.scalar_type() != tensor.scalar_type()) {
      // Pinned memory is written by the device itself, while the host goes on.
      kept = at::empty(
          tensor.sizes(),
          tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(tensor.is_cuda()));
    }
    kept.copy_(tensor, /*non_blocking=*/tensor.is_cuda());
    if (tensor.is_cuda()) devices_.insert(tensor.device());
    return kept;
  }

  Snapshot& snapshot_;
  Staging* staging_;
  std::map<std::string, int> num_of_name_;
  std::set<at::Device, DeviceOrder> devices_;
};

void take_delta(const PlacedTensor& placed, const Piece& piece, int rank, std::size_t place,
                DeltaRecord& delta, Taker& taker) {
  const at::Tensor rows = piece.touched_rows.to(piece.tensor.device());
  const std::int64_t count = rows.size(0);
  if (count == 0 || piece.tensor.numel() == 0) return;
  const at::Tensor values = piece.tensor.detach().index_select(0, rows).reshape(
      {count, piece.tensor.numel() / piece.tensor.size(0)});
  const std::string suffix = std::to_string(rank) + "." + std::to_string(place);
  DeltaPiece written{placed.name + "@rows." + suffix, placed.name + "@values." + suffix, 0, 1};
  if (placed.shape.size() == 2) {
    written.column_begin = piece.offsets[1];
    written.column_end = piece.offsets[1] + piece.tensor.size(1);
  }
  taker.take(written.rows, {count}, {0}, rows + piece.offsets[0]);
  taker.take(written.values, values.sizes().vec(), {0, 0}, values);
  delta.pieces.push_back(std::move(written));
}

}  // namespace

Snapshot take_snapshot(const State& state, int rank, int size, bool is_delta, Staging* staging) {
  Snapshot snapshot;
  snapshot.values = state.values;
  snapshot.rank_values = state.rank_values;
  std::vector<PlacedTensor> tensors = state.tensors();
  for (const auto& stateful : state.statefuls()) {
    if (is_delta) {
      stateful->collect_delta(tensors, snapshot.lists, snapshot.values);
    } else {
      stateful->collect(tensors, snapshot.values);
    }
  }

  std::map<std::string, std::vector<std::int64_t>> shapes;
  std::vector<const PlacedTensor*> replicated;
  Taker taker(snapshot, staging);
  for (const PlacedTensor& placed : tensors) {
    const auto [known, is_new] = shapes.emplace(placed.name, placed.shape);
    TESSERA_CHECK_VALUE(is_new || (!placed.is_replicated && known->second == placed.shape),
                        "checkpoint: '", placed.name, "' is there twice.");
    for (const Piece& piece : placed.pieces) check_piece(placed, piece);
    if (placed.is_replicated) {
      TESSERA_CHECK_VALUE(placed.pieces.size() == 1 &&
                              placed.pieces[0].tensor.sizes() == at::IntArrayRef(placed.shape),
                          "checkpoint: '", placed.name,
                          "' is called replicated, but this rank does not hold all of it.");
      replicated.push_back(&placed);
      continue;
    }
    const bool has_rows =
        is_delta && !placed.pieces.empty() &&
        std::all_of(placed.pieces.begin(), placed.pieces.end(),
                    [](const Piece& piece) { return piece.touched_rows.defined(); });
    if (has_rows) {
      auto found =
          std::find_if(snapshot.deltas.begin(), snapshot.deltas.end(),
                       [&](const DeltaRecord& delta) { return delta.name == placed.name; });
      if (found == snapshot.deltas.end()) {
        snapshot.deltas.push_back(
            {placed.name, dtype_of(placed.pieces[0].tensor.scalar_type()), placed.shape, {}});
        found = snapshot.deltas.end() - 1;
      }
      for (const Piece& piece : placed.pieces) {
        // Numbered by what is there already: a tensor may come in several entries.
        take_delta(placed, piece, rank, found->pieces.size(), *found, taker);
      }
      continue;
    }
    for (const Piece& piece : placed.pieces) {
      taker.take(placed.name, placed.shape, piece.offsets, piece.tensor);
    }
  }
  // Largest first, each to the rank that has least: all ranks come to the same answer.
  std::stable_sort(replicated.begin(), replicated.end(),
                   [](const PlacedTensor* a, const PlacedTensor* b) {
                     return a->pieces[0].tensor.nbytes() > b->pieces[0].tensor.nbytes();
                   });
  std::vector<std::size_t> load(static_cast<std::size_t>(size), 0);
  for (const PlacedTensor* placed : replicated) {
    TESSERA_CHECK_VALUE(placed->owner >= kSpread && placed->owner < size, "checkpoint: '",
                        placed->name, "' belongs to rank ", placed->owner, " of ", size, ".");
    const std::size_t owner =
        placed->owner == kSpread
            ? static_cast<std::size_t>(std::min_element(load.begin(), load.end()) - load.begin())
            : static_cast<std::size_t>(placed->owner);
    // Those with an owner do not count: how long they are may differ between ranks.
    if (placed->owner == kSpread) load[owner] += placed->pieces[0].tensor.nbytes();
    if (static_cast<int>(owner) != rank) continue;
    const Piece& piece = placed->pieces[0];
    if (is_delta && piece.touched_rows.defined()) {
      snapshot.deltas.push_back(
          {placed->name, dtype_of(piece.tensor.scalar_type()), placed->shape, {}});
      take_delta(*placed, piece, rank, 0, snapshot.deltas.back(), taker);
    } else {
      taker.take(placed->name, placed->shape, piece.offsets, piece.tensor);
    }
  }
  taker.wait();
  return snapshot;
}

}  // namespace tessera::checkpoint
