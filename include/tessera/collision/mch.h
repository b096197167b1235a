// tessera/collision/mch.h — the parts of a multi-column hash table that compute.
//
// Such a table is a few tensors, one element per slot: ids in ascending order, the row of each, and
// what its policy knows of it. Slots without an id come last and hold 2^63 - 1; how many ids there
// are is told apart, so that 2^63 - 1 is an id like any other. The last slot never has one: its row
// is that of all unknown ids. Nothing here communicates.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::collision {

/// The tensors of a table, all int64 and of one length on the CPU; changed in place.
struct MchSlots {
  at::Tensor ids;
  at::Tensor rows;
  /// What moves with the ids: counts, last iterations, …
  std::vector<at::Tensor> metadata;
};

/// Which of the values are ids of the table, as booleans, and the slots of those that are. Works on
/// any device.
TESSERA_API std::pair<at::Tensor, at::Tensor> mch_match(const at::Tensor& sorted_ids,
                                                        std::int64_t num_ids,
                                                        const at::Tensor& values);

/// Of `scores`, those of `num_slots` slots and behind them those of new ids, the best `num_slots`
/// stay; of equal ones those in front. Returns the slots that go, and as many new ids, counted from
/// 0, that come: both from the best score to the worst. Costs no sort of the table.
TESSERA_API std::pair<at::Tensor, at::Tensor> mch_select(const at::Tensor& scores,
                                                         std::int64_t num_slots);

/// Finds the rows of ids quickly.
class TESSERA_API MchIndex {
 public:
  MchIndex();
  MchIndex(MchIndex&&) noexcept;
  MchIndex& operator=(MchIndex&&) noexcept;
  ~MchIndex();

  /// Takes the first `num_ids` slots. Throws ValueError for an id that is there twice.
  void rebuild(const MchSlots& slots, std::int64_t num_ids);
  /// Gives `new_ids` the slots `places`, their metadata written already, and brings the slots into
  /// order again. Returns how many ids there are now.
  std::int64_t replace(MchSlots& slots, std::int64_t num_ids, const at::Tensor& places,
                       const at::Tensor& new_ids);
  /// The row of every value, or `unknown_row`; on the device of the values.
  at::Tensor remap(const at::Tensor& values, std::int64_t unknown_row) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::collision
