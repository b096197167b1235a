#include "comm/call_table.h"

#include <algorithm>

#include "comm/shm/agreement.h"

namespace tessera::comm {
namespace {

// Words of a record before the counts per peer.
enum Word : std::size_t { kSequence, kSignature, kCount, kDigest, kNumWords };

// A layout as small as it gets: only headers and counts are used.
shm::Layout table_layout(int size) {
  return {size,
          shm::Layout::complete(
              size, {.slot_bytes = 64, .ring_bytes = 64, .mailbox_bytes = 64, .heap_bytes = 0})};
}

constexpr std::size_t kAlignment = 128;

std::byte* aligned(std::vector<std::byte>& memory) {
  auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (kAlignment - address % kAlignment) % kAlignment;
}

}  // namespace

CallTable::CallTable(int size)
    : size_(size),
      record_words_(kNumWords + 2 * static_cast<std::size_t>(size)),
      layout_(table_layout(size)) {
  memory_.resize(layout_.reserved_bytes() + kAlignment);
}

std::vector<std::int64_t> CallTable::record(const Call& call, std::int64_t count,
                                            std::span<const Piece> inputs,
                                            std::span<const Piece> outputs) const {
  std::vector<std::int64_t> words(record_words_, 0);
  words[kSequence] = static_cast<std::int64_t>(call.sequence);
  words[kSignature] = shm::signature_of(call);
  words[kCount] = count;
  if (call.op == Operator::kAllGather) {
    words[kDigest] = static_cast<std::int64_t>(shm::digest_of(outputs));
  } else if (call.op == Operator::kReduceScatter) {
    words[kDigest] = static_cast<std::int64_t>(shm::digest_of(inputs));
  }
  for (std::size_t r = 0; r < inputs.size(); ++r) words[kNumWords + r] = inputs[r].count;
  for (std::size_t r = 0; r < outputs.size(); ++r) words[kNumWords + size_ + r] = outputs[r].count;
  return words;
}

void CallTable::check(const Call& call, int rank, const std::int64_t* records) {
  const shm::Board board(aligned(memory_), layout_);
  bool agrees = true;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t* words = records + r * record_words_;
    shm::CallHeader& header = board.header(r, 0);
    header.sequence = static_cast<std::uint64_t>(words[kSequence]);
    header.signature = static_cast<std::uint32_t>(words[kSignature]);
    header.count = words[kCount];
    header.digest = static_cast<std::uint64_t>(words[kDigest]);
    header.flags = 0;
    const shm::PeerCounts counts = board.counts(r, 0);
    std::copy_n(words + kNumWords, size_, counts.sends);
    std::copy_n(words + kNumWords + size_, size_, counts.receives);
    agrees &= words[kSequence] == records[kSequence] && words[kSignature] == records[kSignature] &&
              (words[kCount] == records[kCount] || !shm::has_equal_counts(call.op));
  }
  if (agrees && shm::counts_fit(board, 0, rank, call)) return;
  const shm::Disagreement difference = shm::describe_disagreement(board, 0);
  throw Failure(FailureKind::kMismatch, shm::ranks_in(difference.ranks), difference.text);
}

}  // namespace tessera::comm
