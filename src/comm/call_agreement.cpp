#include "comm/call_agreement.h"

#include <optional>
#include <vector>

#include "comm/rank_list.h"

namespace tessera::comm {

namespace {

/// A call as its header tells it.
struct PublishedCall {
  explicit PublishedCall(const CallHeader& header)
      : op(static_cast<Operator>(header.signature & 0xFF)),
        dtype(static_cast<DataType>(header.signature >> 8 & 0xFF)),
        root(static_cast<int>(header.signature >> 24) - 1),
        sequence(header.sequence),
        count(header.count) {
    const std::uint32_t number = header.signature >> 16 & 0xFF;
    if (number > 0) reduce = static_cast<ReduceOp>(number - 1);
  }

  Operator op;
  DataType dtype;
  std::optional<ReduceOp> reduce;
  int root;
  std::uint64_t sequence;
  std::int64_t count;
};

/// "all_reduce sum of float32 [25]", "broadcast of float32 [25] from root 0", ...
std::string describe(const PublishedCall& call, bool with_sequence) {
  std::string text(name_of(call.op));
  if (with_sequence) text.append(" #").append(std::to_string(call.sequence));
  if (call.op == Operator::kBarrier) return text;
  if (call.reduce) text.append(" ").append(name_of(*call.reduce));
  text.append(" of ").append(name_of(call.dtype));
  if (has_equal_counts(call.op)) text.append(" [").append(std::to_string(call.count)).append("]");
  if (call.root >= 0) {
    const bool gives = call.op == Operator::kBroadcast || call.op == Operator::kScatter;
    text.append(gives ? " from root " : " to root ").append(std::to_string(call.root));
  }
  return text;
}

std::string list_of(RankSet ranks) { return list_ranks(ranks_in(ranks), ", "); }

struct Camp {
  std::string text;
  RankSet ranks;
  PublishedCall call;
};

/// Ranks that made the same call, in order of their first rank.
std::vector<Camp> camps_of(const CallBoard& board) {
  bool sequences_differ = false;
  for (int rank = 1; rank < board.size; ++rank) {
    sequences_differ |= board.header(rank).sequence != board.header(0).sequence;
  }
  std::vector<Camp> camps;
  for (int rank = 0; rank < board.size; ++rank) {
    const PublishedCall call(board.header(rank));
    std::string text = describe(call, sequences_differ);
    bool is_new = true;
    for (Camp& camp : camps) {
      if (camp.text != text) continue;
      camp.ranks |= rank_bit(rank);
      is_new = false;
    }
    if (is_new) camps.push_back({std::move(text), rank_bit(rank), call});
  }
  return camps;
}

std::string title(const PublishedCall& call) {
  return "comm." + std::string(name_of(call.op)) + " #" + std::to_string(call.sequence) + ": ";
}

Disagreement describe_camps(const std::vector<Camp>& camps) {
  std::size_t main = 0;
  for (std::size_t i = 1; i < camps.size(); ++i) {
    if (__builtin_popcountll(camps[i].ranks) > __builtin_popcountll(camps[main].ranks)) main = i;
  }
  Disagreement result;
  result.text = title(camps[main].call);
  for (std::size_t i = 0; i < camps.size(); ++i) {
    if (i == main) continue;
    result.ranks |= camps[i].ranks;
    result.text += list_of(camps[i].ranks) + " called " + camps[i].text + ", ";
  }
  result.text += list_of(camps[main].ranks) + " called " + camps[main].text +
                 ". Make every rank issue the same collectives in the same order.";
  return result;
}

/// What `from` gives to `to`, by the word of the one and of the other.
struct Transfer {
  std::int64_t given;
  std::int64_t expected;
};

/// Transfers that the operator does not have are 0 on both sides.
Transfer transfer(const CallBoard& board, const PublishedCall& call, int from, int to) {
  switch (call.op) {
    case Operator::kAllGather:
      return {board.header(from).count, board.counts(to).receives[from]};
    case Operator::kGather:
      if (to != call.root) return {0, 0};
      return {board.header(from).count, board.counts(to).receives[from]};
    case Operator::kScatter:
      if (from != call.root) return {0, 0};
      return {board.counts(from).sends[to], board.header(to).count};
    case Operator::kReduceScatter:
      return {board.counts(from).sends[to], board.header(to).count};
    case Operator::kAllToAll:
      return {board.counts(from).sends[to], board.counts(to).receives[from]};
    default:
      return {0, 0};
  }
}

}  // namespace

std::uint64_t digest_of(std::span<const Piece> pieces) noexcept {
  std::uint64_t digest = 0x9E3779B97F4A7C15;
  for (const Piece& piece : pieces) {
    digest = (digest ^ static_cast<std::uint64_t>(piece.count)) * 0xFF51AFD7ED558CCD;
    digest ^= digest >> 32;
  }
  return digest;
}

bool counts_fit(const CallBoard& board, int rank, const Call& call) noexcept {
  const int size = board.size;
  const CallHeader& mine = board.header(rank);
  switch (call.op) {
    case Operator::kAllGather:
    case Operator::kReduceScatter: {
      // Equal digests mean equal lists on all ranks, so everybody comes to the same answer by
      // comparing its own list with the counts in the headers.
      const PeerCounts own = board.counts(rank);
      const std::int64_t* list = call.op == Operator::kAllGather ? own.receives : own.sends;
      for (int peer = 0; peer < size; ++peer) {
        const CallHeader& theirs = board.header(peer);
        if (theirs.digest != mine.digest || theirs.count != list[peer]) return false;
      }
      return true;
    }
    case Operator::kGather:
    case Operator::kScatter: {
      const PeerCounts root = board.counts(call.root);
      const std::int64_t* list = call.op == Operator::kGather ? root.receives : root.sends;
      for (int peer = 0; peer < size; ++peer) {
        if (board.header(peer).count != list[peer]) return false;
      }
      return true;
    }
    case Operator::kAllToAll: {
      bool is_uniform = true;
      for (int peer = 0; peer < size; ++peer) {
        const CallHeader& theirs = board.header(peer);
        is_uniform &= (theirs.flags & kUniform) != 0 && theirs.digest == mine.digest;
      }
      if (is_uniform) return true;
      for (int from = 0; from < size; ++from) {
        const std::int64_t* sends = board.counts(from).sends;
        for (int to = 0; to < size; ++to) {
          if (sends[to] != board.counts(to).receives[from]) return false;
        }
      }
      return true;
    }
    default:
      return true;
  }
}

Disagreement describe_disagreement(const CallBoard& board) {
  const std::vector<Camp> camps = camps_of(board);
  if (camps.size() > 1) return describe_camps(camps);
  const PublishedCall& call = camps[0].call;
  Disagreement result;
  int others = 0;
  for (int from = 0; from < board.size; ++from) {
    for (int to = 0; to < board.size; ++to) {
      const Transfer move = transfer(board, call, from, to);
      if (move.given == move.expected) continue;
      if (!result.text.empty()) {
        ++others;
        continue;
      }
      result.ranks = rank_bit(from) | rank_bit(to);
      result.text = title(call) + "rank " + std::to_string(from) + " gives " +
                    std::to_string(move.given) + " elements of " +
                    std::string(name_of(call.dtype)) + " for rank " + std::to_string(to) +
                    ", which expects " + std::to_string(move.expected);
    }
  }
  if (others > 0) result.text += " (and " + std::to_string(others) + " more pairs)";
  result.text += ". Give every rank the same table of sizes.";
  return result;
}

}  // namespace tessera::comm
