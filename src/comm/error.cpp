#include "tessera/comm/error.h"

#include <utility>

namespace tessera::comm {

const char* name_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kMismatch:
      return "mismatch";
    case ErrorKind::kPeerLost:
      return "peer lost";
    case ErrorKind::kPeerFailed:
      return "peer failed";
    case ErrorKind::kTimeout:
      return "timeout";
    case ErrorKind::kAborted:
      return "aborted";
    case ErrorKind::kUnavailable:
      return "unavailable";
    case ErrorKind::kRendezvous:
      return "rendezvous";
  }
  return "unknown";
}

// Without a backtrace: the text is meant for users and must be the same on every rank.
Error::Error(ErrorKind kind, std::vector<int> ranks, std::string message)
    : c10::DistBackendError(std::move(message), nullptr), kind_(kind), ranks_(std::move(ranks)) {}

Error::~Error() = default;

}  // namespace tessera::comm
