// src/comm/call_agreement.h — do the calls of all ranks fit each other? If not, say how.
//
// Works on the headers and counts that the ranks have published, so every rank comes to the same
// answer and to the same text.

#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "comm/call_board.h"
#include "comm/rank_set.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Operator, dtype, reduce-op and root in one word.
inline std::uint32_t signature_of(const Call& call) noexcept {
  const std::uint32_t reduce = call.reduce ? static_cast<std::uint32_t>(*call.reduce) + 1 : 0;
  return static_cast<std::uint32_t>(call.op) | static_cast<std::uint32_t>(call.dtype) << 8 |
         reduce << 16 | static_cast<std::uint32_t>(call.root + 1) << 24;
}

/// Whether all ranks must give the same count (the others have one count per peer, or none).
constexpr bool has_equal_counts(Operator op) noexcept {
  return op == Operator::kAllReduce || op == Operator::kReduce || op == Operator::kBroadcast;
}

/// Order-sensitive digest of the counts of some pieces.
std::uint64_t digest_of(std::span<const Piece> pieces) noexcept;

/// Whether the counts per peer that the ranks published fit each other. All ranks must have arrived
/// and agree on the operator; constant work where the counts are alike, else one look per pair.
bool counts_fit(const CallBoard& board, int rank, const Call& call) noexcept;

struct Disagreement {
  RankSet ranks = 0;  // those that differ from most
  std::string text;
};

/// Describes why the ranks do not agree. Only call it when they do not.
Disagreement describe_disagreement(const CallBoard& board);

}  // namespace tessera::comm
