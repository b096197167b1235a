// src/comm/rank_list.h — ranks in the words of an error.

#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// "rank 3", "ranks 0, 2 and 5"; `last` stands before the last of several.
inline std::string list_ranks(const std::vector<int>& ranks, const char* last = " and ") {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? last : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace tessera::comm
