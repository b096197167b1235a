// src/comm/rank_set.h — ranks of a group as bits.

#pragma once

#include <cstdint>
#include <vector>

namespace tessera::comm {

using RankSet = std::uint64_t;

constexpr RankSet rank_bit(int rank) noexcept { return RankSet{1} << rank; }

/// In rising order.
inline std::vector<int> ranks_in(RankSet ranks) {
  std::vector<int> list;
  for (; ranks != 0; ranks &= ranks - 1) list.push_back(__builtin_ctzll(ranks));
  return list;
}

}  // namespace tessera::comm
