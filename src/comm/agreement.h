// src/comm/agreement.h — do the ranks agree? What each of them says, on all of them, so that all
// come to the same answer and raise the same error.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm::detail {

/// The same number on every rank and in every run, unlike std::hash (FNV-1a). Two texts share it
/// only if they are the same, but for one case in 2^64.
std::uint64_t hash_of(std::string_view text) noexcept;

/// Every rank's words, on every rank; all bring the same number. Collective.
std::vector<std::vector<std::int64_t>> exchange_words(const std::vector<std::int64_t>& mine,
                                                      const Group& group);

/// Every rank's text, on every rank. Collective.
std::vector<std::string> exchange_texts(const std::string& mine, const Group& group);

/// Every rank's text, if they are not all the same; nothing if they are, which takes three words
/// from each. Collective.
std::optional<std::vector<std::string>> find_difference(const std::string& mine,
                                                        const Group& group);

/// The ranks whose entry is not that of rank 0, ascending. `entries` has one for every rank.
template <class Entry>
std::vector<int> unlike_the_first(const std::vector<Entry>& entries) {
  std::vector<int> ranks;
  for (std::size_t rank = 1; rank < entries.size(); ++rank) {
    if (entries[rank] != entries[0]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

/// Raises the faults of the ranks in `wrong`: ValueError where the fault is, comm::Error(kMismatch)
/// with the same text elsewhere. Collective; `fault` is empty on ranks without one.
[[noreturn]] void raise_faults(const std::string& fault, const std::vector<int>& wrong,
                               const Group& group);

}  // namespace tessera::comm::detail
