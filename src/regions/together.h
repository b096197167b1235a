// src/regions/together.h — a fault that one rank finds, raised by all.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::regions::detail {

/// Every rank's words, on every rank; all bring the same number. Collective.
std::vector<std::vector<std::int64_t>> exchange_words(const std::vector<std::int64_t>& mine,
                                                      const comm::Group& group);

/// Raises the faults of the ranks in `wrong`: ValueError where the fault is, comm::Error(kMismatch)
/// with the same text elsewhere. Collective; `fault` is empty on ranks without one.
[[noreturn]] void raise_faults(const std::string& fault, const std::vector<int>& wrong,
                               const comm::Group& group);

}  // namespace tessera::regions::detail
