#include "comm/shm/shm_transport.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "comm/call_agreement.h"
#include "comm/shm/creation.h"

namespace tessera::comm::shm {

std::unique_ptr<ShmTransport> ShmTransport::create(int rank, int size, Bootstrap& bootstrap,
                                                   WaitMonitor& monitor,
                                                   const ShmOptions& options) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw Failure(FailureKind::kUnavailable, {},
                  "comm.shm: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      " cannot be had; groups have 1 to " + std::to_string(kMaxRanks) + " ranks.");
  }
  GroupSegment made = make_group_segment(rank, size, bootstrap, monitor, options);
  return std::unique_ptr<ShmTransport>(new ShmTransport(
      rank, std::move(made.segment), Layout(size, made.sizes), monitor, options.staging));
}

ShmTransport::ShmTransport(int rank, std::shared_ptr<Segment> segment, const Layout& layout,
                           WaitMonitor& monitor, Staging staging)
    : rank_(rank),
      size_(layout.size()),
      segment_(std::move(segment)),
      board_(segment_->base(), layout),
      arena_(std::make_shared<Arena>(segment_, layout.heap(rank), layout.sizes().heap_bytes)),
      waiter_(board_, rank, monitor),
      point_to_point_(board_, rank, waiter_),
      one_shot_bytes_(layout.sizes().slot_bytes),
      staging_(staging),
      cores_are_far_(staging == Staging::kStreaming) {
  // With many ranks reading every message costs more than two steps.
  if (size_ > 8) {
    one_shot_bytes_ = std::max(one_shot_bytes_ * 8 / static_cast<std::size_t>(size_),
                               std::min(one_shot_bytes_, std::size_t{1024}));
  }
  constexpr int kMaxPopulated = 8;
  if (size_ <= kMaxPopulated) segment_->populate(0, layout.reserved_bytes());
}

ShmTransport::Turn ShmTransport::enter(const Call& call, std::int64_t count) {
  waiter_.check();
  if (call.root >= size_) {
    throw std::invalid_argument("comm." + std::string(name_of(call.op)) + ": root " +
                                std::to_string(call.root) + " is not in the group of " +
                                std::to_string(size_) + " ranks.");
  }
  const std::uint64_t number = ++calls_;
  const int parity = static_cast<int>(number & 1);
  CallHeader& header = board_.header(rank_, parity);
  header.sequence = call.sequence;
  header.signature = signature_of(call);
  header.flags = cores_are_far_ ? std::uint32_t{kFarCores} : 0;
  header.count = count;
  header.offset = 0;
  header.digest = 0;
  return {number, parity, header};
}

// Note [Why two slots are enough]
// A rank writes the header and the slot of call n + 2 where those of call n were. It gets there
// only after call n + 1 has met, that is, after every rank arrived at n + 1 and so left call n.
// Nobody reads the old ones any more. The rings are free for the same reason once a call has met.
void ShmTransport::meet(const Call& call, const Turn& turn) {
  publish(turn.header.arrived, turn.number, board_.rank(rank_).progress);
  waiter_.wait_for(call, others(), turn.number,
                   [&](int peer) -> auto& { return board_.header(peer, turn.parity).arrived; });
  const CallHeader& mine = turn.header;
  const bool same_count = has_equal_counts(call.op);
  bool agree = true;
  for (int peer = 0; peer < size_; ++peer) {
    const CallHeader& theirs = board_.header(peer, turn.parity);
    agree &= theirs.sequence == mine.sequence && theirs.signature == mine.signature &&
             (!same_count || theirs.count == mine.count);
  }
  // The next call's header is written where the peers read the last but one.
  __builtin_prefetch(&board_.header(rank_, 1 - turn.parity), 1);
  const CallBoard calls = board_.calls(turn.parity);
  if (agree && counts_fit(calls, rank_, call)) return;
  const Disagreement disagreement = describe_disagreement(calls);
  waiter_.fail(FailureKind::kMismatch, disagreement.ranks, disagreement.text);
  waiter_.raise();
}

bool ShmTransport::is_met() const noexcept {
  if (waiter_.has_failed()) return true;  // a wait would end at once
  const std::uint64_t number = calls_ + 1;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (!has_reached(board_.header(peer, static_cast<int>(number & 1)).arrived, number)) {
      return false;
    }
  }
  return true;
}

void ShmTransport::check_pieces(const Call& call, std::span<const Piece> pieces) const {
  if (pieces.size() == static_cast<std::size_t>(size_)) return;
  throw std::invalid_argument("comm." + std::string(name_of(call.op)) + ": " +
                              std::to_string(pieces.size()) + " pieces for a group of " +
                              std::to_string(size_) + " ranks. Give one for each rank.");
}

void ShmTransport::check_reduction(const Call& call) const {
  if (call.reduce && kernels::can_reduce(call.dtype, *call.reduce)) return;
  throw std::invalid_argument("comm." + std::string(name_of(call.op)) + ": " +
                              std::string(call.reduce ? name_of(*call.reduce) : "none") + " of " +
                              std::string(name_of(call.dtype)) + " is not defined.");
}

std::byte* ShmTransport::own_message(const Turn& turn, std::size_t bytes) noexcept {
  turn.header.flags |= kInSlot;
  return bytes <= sizeof(turn.header.payload) ? turn.header.payload
                                              : board_.slot(rank_, turn.parity);
}

const std::byte* ShmTransport::message_of(const Call& call, int peer, const Turn& turn,
                                          std::size_t bytes) {
  const CallHeader& header = board_.header(peer, turn.parity);
  if (bytes <= sizeof(header.payload)) return header.payload;
  if (bytes > board_.layout().sizes().slot_bytes) {
    refuse(call, peer,
           "a message of " + std::to_string(bytes) + " bytes in a slot of " +
               std::to_string(board_.layout().sizes().slot_bytes));
  }
  return board_.slot(peer, turn.parity);
}

ShmTransport::PackedPiece ShmTransport::packed_piece(const Call& call, int peer, const Turn& turn) {
  const std::int64_t* counts = board_.counts(peer, turn.parity).sends;
  const std::size_t most = board_.layout().sizes().slot_bytes / size_of(call.dtype);
  PackedPiece piece;
  for (int other = 0; other < size_; ++other) {
    const auto count = static_cast<std::size_t>(counts[other]);  // negative ones become huge
    if (count > most) {
      refuse(call, peer,
             std::to_string(counts[other]) + " elements in a slot of " + std::to_string(most));
    }
    if (other < rank_) piece.skip += count * size_of(call.dtype);
    piece.total += count * size_of(call.dtype);
  }
  return piece;
}

const std::byte* ShmTransport::memory_of(const Call& call, int peer, std::uint64_t offset,
                                         std::int64_t count) {
  const std::size_t width = size_of(call.dtype);
  const auto most = static_cast<std::int64_t>(board_.layout().sizes().heap_bytes / width);
  // Tensors may start anywhere in a block, as views of bytes do.
  if (count < 0 || count > most ||
      !board_.layout().is_in_a_heap(offset, static_cast<std::uint64_t>(count) * width, 1)) {
    refuse(call, peer,
           std::to_string(count) + " elements of " + std::string(name_of(call.dtype)) +
               " at offset " + std::to_string(offset) + " of a segment of " +
               std::to_string(board_.layout().total_bytes()) + " bytes");
  }
  return board_.base() + offset;
}

void ShmTransport::refuse(const Call& call, int peer, const std::string& what) {
  waiter_.fail(FailureKind::kAborted, rank_bit(peer),
               "comm." + std::string(name_of(call.op)) + " #" + std::to_string(call.sequence) +
                   ": rank " + std::to_string(peer) + " says it has " + what +
                   ", which is not believable. Its part of the shared memory is damaged.");
  waiter_.raise();
}

bool ShmTransport::is_one_shot(const Turn& turn) const noexcept {
  std::uint32_t flags = kInSlot;
  for (int peer = 0; peer < size_; ++peer) flags &= board_.header(peer, turn.parity).flags;
  return flags != 0;
}

void ShmTransport::publish_staged(const Turn& turn, std::int64_t chunks) {
  RankBlock& block = board_.rank(rank_);
  publish(block.staged.value, progress_of(turn.number, chunks), block.progress);
}

void ShmTransport::publish_finished(const Turn& turn, std::int64_t chunks) {
  RankBlock& block = board_.rank(rank_);
  publish(block.finished.value, progress_of(turn.number, chunks), block.progress);
}

void ShmTransport::wait_staged(const Call& call, const Turn& turn, RankSet ranks,
                               std::int64_t chunks) {
  waiter_.wait_for(call, ranks, progress_of(turn.number, chunks),
                   [&](int peer) -> auto& { return board_.rank(peer).staged.value; });
}

void ShmTransport::wait_finished(const Call& call, const Turn& turn, RankSet ranks,
                                 std::int64_t chunks) {
  waiter_.wait_for(call, ranks, progress_of(turn.number, chunks),
                   [&](int peer) -> auto& { return board_.rank(peer).finished.value; });
}

std::byte* ShmTransport::ring_slot(int rank, std::int64_t chunk) const noexcept {
  const std::size_t slot_bytes = board_.layout().sizes().ring_bytes / kRingDepth;
  return board_.ring(rank) + static_cast<std::size_t>(chunk % kRingDepth) * slot_bytes;
}

std::int64_t ShmTransport::largest_count(const Turn& turn) const noexcept {
  std::int64_t largest = 0;
  for (int peer = 0; peer < size_; ++peer) {
    largest = std::max(largest, board_.header(peer, turn.parity).count);
  }
  return largest;
}

void ShmTransport::barrier(const Call& call) { meet(call, enter(call, 0)); }

void ShmTransport::send(const Call& call, Piece data, int destination, int tag) {
  point_to_point_.send(call, data, destination, tag);
}

int ShmTransport::recv(const Call& call, Piece data, int source, int tag) {
  return point_to_point_.recv(call, data, source, tag);
}

std::shared_ptr<void> ShmTransport::allocate(std::size_t bytes) { return arena_->allocate(bytes); }

std::uint64_t ShmTransport::place_of(const void* data, std::size_t bytes) const noexcept {
  return board_.offset_of(data, bytes);
}

std::shared_ptr<void> ShmTransport::at_place(std::uint64_t place, std::size_t bytes,
                                             std::size_t alignment) {
  if (!board_.layout().is_in_a_heap(place, bytes, alignment)) return nullptr;
  return {segment_, segment_->base() + place};
}

void ShmTransport::abort(FailureKind kind, std::vector<int> ranks, const std::string& reason) {
  RankSet at_fault = 0;
  for (const int rank : ranks) {
    if (rank >= 0 && rank < size_) at_fault |= rank_bit(rank);
  }
  waiter_.fail(kind, at_fault, reason);
}

}  // namespace tessera::comm::shm
