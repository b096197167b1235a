// tessera/data_parallel/finite_check.h — a NaN or an infinity is named before it spreads.
//
// Each rank looks at its own gradients before they are sent. A bucket with a number that is not
// finite is sent as zeros, so the other ranks stay clean; at the end of the step the ranks exchange
// eight bytes each and all know which rank and which parameter it was.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

enum class NonFinitePolicy {
  kRaise,     // backward throws on all ranks, with the same text
  kSkipStep,  // skip_step() is true on all ranks: do not step the optimizer
  kZeroRank,  // go on: the bucket of that rank counts as zeros
};

/// The first parameter of a rank whose gradient was not finite.
struct NonFinite {
  int rank;  // in the group
  std::string parameter;
  bool is_nan;  // otherwise infinite
};

class TESSERA_API FiniteCheck : public CommHook {
 public:
  /// What the last step found, by rank; empty if all was well. The same on all ranks.
  virtual const std::vector<NonFinite>& found() const = 0;
  /// True if the last step found something and the policy is kSkipStep.
  virtual bool skip_step() const = 0;
};

/// Looks at each bucket, then reduces it with `inner`. Costs one walk through the gradients and one
/// gather of eight bytes per step. On a GPU the walk waits for the gradients to be computed.
///
/// Throws ValueError if `inner` steps the parameters itself and the policy is not kZeroRank: by the
/// end of the step it would be too late.
TESSERA_API std::shared_ptr<FiniteCheck> finite_check_hook(
    std::shared_ptr<CommHook> inner, NonFinitePolicy policy = NonFinitePolicy::kRaise);

}  // namespace tessera::data_parallel
