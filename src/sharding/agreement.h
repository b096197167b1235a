// src/sharding/agreement.h — the ranks make sure that they do the same, before ids travel.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::sharding {

/// Throws the same ValueError on all ranks, with the first line that differs, unless all ranks give
/// the same lines. Collective.
void check_same_lines(const std::string& operation, const std::vector<std::string>& lines,
                      const comm::Group& group);

/// What a rank found wrong with its input.
struct Fault {
  enum class Kind : std::uint8_t { kNone, kValue, kIndex, kType } kind = Kind::kNone;
  std::string text;
};

/// Throws the same exception on all ranks: the fault of the lowest rank that has one, or
/// comm::Error(kMismatch) if none has and the `call` texts differ. Collective.
[[noreturn]] void raise_together(const std::string& operation, const Fault& fault,
                                 const std::string& call, const comm::Group& group);

}  // namespace tessera::sharding
