#include "comm/call_table.h"

#include <algorithm>

#include "comm/call_agreement.h"

namespace tessera::comm {
namespace {

// Words of a record before the counts per peer.
enum Word : std::size_t { kSequence, kSignature, kCount, kDigest, kNumWords };

}  // namespace

CallTable::CallTable(int size)
    : size_(size),
      record_words_(kNumWords + 2 * static_cast<std::size_t>(size)),
      headers_(static_cast<std::size_t>(size)),
      counts_(3 * static_cast<std::size_t>(size) * static_cast<std::size_t>(size)) {}

std::vector<std::int64_t> CallTable::record(const Call& call, std::int64_t count,
                                            std::span<const Piece> inputs,
                                            std::span<const Piece> outputs) const {
  std::vector<std::int64_t> words(record_words_, 0);
  words[kSequence] = static_cast<std::int64_t>(call.sequence);
  words[kSignature] = signature_of(call);
  words[kCount] = count;
  if (call.op == Operator::kAllGather) {
    words[kDigest] = static_cast<std::int64_t>(digest_of(outputs));
  } else if (call.op == Operator::kReduceScatter) {
    words[kDigest] = static_cast<std::int64_t>(digest_of(inputs));
  }
  for (std::size_t r = 0; r < inputs.size(); ++r) words[kNumWords + r] = inputs[r].count;
  for (std::size_t r = 0; r < outputs.size(); ++r) words[kNumWords + size_ + r] = outputs[r].count;
  return words;
}

void CallTable::check(const Call& call, int rank, const std::int64_t* records) {
  const CallBoard board{size_, reinterpret_cast<std::byte*>(headers_.data()), sizeof(CallHeader),
                        reinterpret_cast<std::byte*>(counts_.data()),
                        3 * static_cast<std::size_t>(size_) * sizeof(std::int64_t)};
  bool agrees = true;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t* words = records + r * record_words_;
    CallHeader& header = board.header(r);
    header.sequence = static_cast<std::uint64_t>(words[kSequence]);
    header.signature = static_cast<std::uint32_t>(words[kSignature]);
    header.count = words[kCount];
    header.digest = static_cast<std::uint64_t>(words[kDigest]);
    header.flags = 0;
    const PeerCounts counts = board.counts(r);
    std::copy_n(words + kNumWords, size_, counts.sends);
    std::copy_n(words + kNumWords + size_, size_, counts.receives);
    agrees &= words[kSequence] == records[kSequence] && words[kSignature] == records[kSignature] &&
              (words[kCount] == records[kCount] || !has_equal_counts(call.op));
  }
  if (agrees && counts_fit(board, rank, call)) return;
  const Disagreement difference = describe_disagreement(board);
  throw Failure(FailureKind::kMismatch, ranks_in(difference.ranks), difference.text);
}

}  // namespace tessera::comm
