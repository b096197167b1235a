// tessera/checkpoint/state.h — what a job saves: tensors with their places, and plain values.
//
// A PlacedTensor says which part of which global tensor this rank holds. That is all a checkpoint
// knows of data parallelism (whole tensors, the same on every rank) and of sharded tables (rows,
// columns or boxes), so anything saved under one placement loads under any other.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// A box of a global tensor that this rank holds.
struct Piece {
  std::vector<std::int64_t> offsets;  // where it begins; its lengths are the tensor's sizes
  at::Tensor tensor;                  // read by a save, written by a load; any strides, any device
  /// Rows of `tensor` that differ from the base of a delta, int64, ascending. Undefined: all.
  at::Tensor touched_rows;
};

/// Replicated tensors are written by the rank that has least to write.
inline constexpr int kSpread = -1;

struct PlacedTensor {
  std::string name;                 // the same on every rank
  std::vector<std::int64_t> shape;  // of the global tensor
  std::vector<Piece> pieces;        // of this rank; none is fine
  bool is_replicated = false;       // every rank holds all of it, and one writes it
  int owner = kSpread;              // the group rank that writes it, if replicated
};

/// Something whose tensors appear only while it works, such as an optimizer, or that wants to know
/// when a load is done.
class TESSERA_API Stateful {
 public:
  virtual ~Stateful();
  /// Adds what is to be saved now.
  virtual void collect(std::vector<PlacedTensor>& tensors, Values& values) = 0;
  /// The same for a delta. Lists whose length changes add what changed to `lists`, the same on
  /// every rank; by default everything is added by `collect`.
  virtual void collect_delta(std::vector<PlacedTensor>& tensors, std::vector<ListDelta>& lists,
                             Values& values);
  /// Adds what is to be loaded from `source`, allocating it where needed. Changes nothing that is
  /// in use: the load may fail yet, or turn to another checkpoint and ask again.
  virtual void prepare(const Reader& source, std::vector<PlacedTensor>& tensors) = 0;
  /// Takes the values, after all tensors are loaded.
  virtual void finish(const Values& values);
};

/// Everything a job saves and loads. Build it once and use it for every save.
class TESSERA_API State {
 public:
  void add(PlacedTensor tensor) { tensors_.push_back(std::move(tensor)); }
  /// Adds a tensor that every rank holds.
  void add_replicated(std::string name, at::Tensor tensor, int owner = kSpread);
  /// Adds the part of a tensor of shape `shape` that begins at `offsets`.
  void add_shard(std::string name, std::vector<std::int64_t> shape,
                 std::vector<std::int64_t> offsets, at::Tensor tensor);
  void add(std::shared_ptr<Stateful> stateful) { statefuls_.push_back(std::move(stateful)); }

  /// The same on every rank, or there on some ranks only.
  Values values;
  /// This rank's own: its random state's seed, its place in the data.
  Values rank_values;

  const std::vector<PlacedTensor>& tensors() const noexcept { return tensors_; }
  const std::vector<std::shared_ptr<Stateful>>& statefuls() const noexcept { return statefuls_; }

 private:
  std::vector<PlacedTensor> tensors_;
  std::vector<std::shared_ptr<Stateful>> statefuls_;
};

/// Which rows of a table were changed since it was last saved.
class TESSERA_API TouchedRows {
 public:
  explicit TouchedRows(std::int64_t num_rows);
  /// Marks rows; `rows` are integers in any order, with repetitions.
  void mark(const at::Tensor& rows);
  /// The marked rows, ascending.
  at::Tensor rows() const;
  /// Forgets them; call it when a save that holds them has succeeded.
  void clear();

 private:
  at::Tensor is_touched_;
};

/// The element type in a file. Throws TypeError for types that safetensors does not know.
TESSERA_API Dtype dtype_of(at::ScalarType type);
TESSERA_API at::ScalarType scalar_type_of(Dtype dtype);

}  // namespace tessera::checkpoint
