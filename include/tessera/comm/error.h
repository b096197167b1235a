// tessera/comm/error.h — the error every rank raises when the world is wrong.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "tessera/core/export.h"

namespace tessera::comm {

enum class ErrorKind : std::uint8_t {
  kMismatch,     // the ranks called different collectives, or with different arguments
  kPeerLost,     // a process of the group ended
  kPeerFailed,   // a rank reported an exception of its own
  kTimeout,      // a rank did not arrive within the limit
  kAborted,      // the group was aborted
  kUnavailable,  // an engine cannot be had here
  kRendezvous,   // the ranks did not find each other
};

/// "mismatch", "peer lost", ...
TESSERA_API const char* name_of(ErrorKind kind) noexcept;

/// A failure of the group, not of the caller. `what()` is the root cause: the same text on every
/// rank.
///
/// Derives from c10::DistBackendError, so that code that only knows LibTorch's errors, including
/// torch.distributed in Python, sees one too.
class TESSERA_API Error : public c10::DistBackendError {
 public:
  Error(ErrorKind kind, std::vector<int> ranks, std::string message);
  ~Error() override;

  ErrorKind kind() const noexcept { return kind_; }
  /// Group ranks at fault, ascending; empty if unknown.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  ErrorKind kind_;
  std::vector<int> ranks_;
};

}  // namespace tessera::comm
