// tessera/regions/placement.h — where the parts of a value, and of its gradient, are.
//
// Every operator of this folder turns one placement into another. Operators come in conjugate
// pairs, and the backward of each is a call to its partner, so derivatives of any order are right:
//
//   operator        from        to           backward
//   copy            Replicated  Shared       reduce
//   reduce          Partial     Replicated   copy
//   gather          Shard       Replicated   scatter
//   scatter         Replicated  Shard        gather
//   gather_shared   Shard       Shared       reduce_scatter
//   reduce_scatter  Partial     Shard        gather_shared
//   all_reduce      Partial     Shared       all_reduce
//
// Everything here is collective: all ranks of the group call it, with the same dimension, sizes,
// type and trailing shape, in the same order. The ranks compare what they are about to do with one
// small message per call and agree on whether the result needs a gradient, so that a rank whose own
// part is empty or constant still takes part in the backward pass; a difference is the same
// comm::Error on all ranks. TESSERA_CHECK_REGIONS=0 leaves the message out (each rank then decides
// by its own input), and it is left out for CUDA tensors, where it would wait for the device.
//
// Nothing modifies its input or the gradient that arrives.

#pragma once

#include <cstdint>

namespace tessera::regions {

enum class Placement : std::uint8_t {
  kShard,       // a slice; its gradient is the slice's
  kReplicated,  // the whole, and the whole gradient, the same everywhere
  kShared,      // the whole; the gradients of the ranks add up to the true one
  kPartial,     // an addend: the ranks' values add up; the gradient is whole
};

/// "Shard", "Replicated", "Shared", "Partial".
constexpr const char* name_of(Placement placement) noexcept {
  switch (placement) {
    case Placement::kShard:
      return "Shard";
    case Placement::kReplicated:
      return "Replicated";
    case Placement::kShared:
      return "Shared";
    case Placement::kPartial:
      return "Partial";
  }
  return "";
}

/// Where the gradient of a value lives: Shared and Partial trade places, the others keep theirs.
constexpr Placement dual_of(Placement placement) noexcept {
  if (placement == Placement::kShared) return Placement::kPartial;
  if (placement == Placement::kPartial) return Placement::kShared;
  return placement;
}

}  // namespace tessera::regions
