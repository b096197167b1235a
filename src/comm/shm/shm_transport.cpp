#include "comm/shm/shm_transport.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "comm/shm/agreement.h"
#include "comm/shm/element_types.h"

namespace tessera::comm::shm {

namespace {

/// What rank 0 tells the others, and what the others answer: "ok ..." or "<kind> <text>".
std::string encode(const Failure& failure) {
  return std::to_string(static_cast<int>(failure.kind())) + " " + failure.what();
}

void raise_unless_ok(const std::string& answer) {
  if (answer.rfind("ok", 0) == 0) return;
  const std::size_t space = answer.find(' ');
  const int kind = std::atoi(answer.c_str());
  throw Failure(static_cast<FailureKind>(kind), {},
                space == std::string::npos ? answer : answer.substr(space + 1));
}

std::string encode_segment(const std::string& path, const Sizes& sizes) {
  std::ostringstream text;
  text << "ok " << sizes.slot_bytes << ' ' << sizes.ring_bytes << ' ' << sizes.mailbox_bytes << ' '
       << sizes.heap_bytes << ' ' << path;
  return text.str();
}

std::shared_ptr<Segment> make_segment(int size, const ShmOptions& options, Sizes& sizes) {
  const std::string directory = options.directory.empty() ? default_directory() : options.directory;
  remove_stale_segments(directory);
  sizes = Layout::complete(
      size, {options.slot_bytes, options.ring_bytes, options.mailbox_bytes, options.heap_bytes});
  const std::size_t reserved = Layout(size, sizes).reserved_bytes();
  const std::size_t available = free_bytes(directory);
  const std::size_t spare = available > reserved ? available - reserved : 0;
  sizes.heap_bytes = std::min(sizes.heap_bytes, spare / static_cast<std::size_t>(size)) /
                     kHugePageBytes * kHugePageBytes;
  const Layout layout(size, sizes);
  auto segment = Segment::create(directory, reserved, layout.total_bytes());
  GroupBlock& group = Board(segment->base(), layout).group();
  group.magic = GroupBlock::kMagic;
  group.size = static_cast<std::uint64_t>(size);
  return segment;
}

std::shared_ptr<Segment> join_segment(int size, const std::string& answer, Sizes& sizes) {
  std::istringstream text(answer.substr(2));
  std::string path;
  text >> sizes.slot_bytes >> sizes.ring_bytes >> sizes.mailbox_bytes >> sizes.heap_bytes >>
      std::ws;
  std::getline(text, path);
  const Layout layout(size, sizes);
  auto segment = Segment::open(path, layout.total_bytes());
  const GroupBlock& group = Board(segment->base(), layout).group();
  if (group.magic != GroupBlock::kMagic || group.size != static_cast<std::uint64_t>(size)) {
    throw Failure(FailureKind::kUnavailable, {},
                  "comm.shm: the segment " + path + " is for a group of " +
                      std::to_string(group.size) + " ranks, not " + std::to_string(size) +
                      ". Give every rank the same group size.");
  }
  return segment;
}

std::string mapped_key(int rank) { return "shm/mapped/" + std::to_string(rank); }

/// Rank 0: collects what all ranks say and tells the verdict to all. The name of the segment is
/// gone before anyone may use it.
std::string settle(int size, Segment* segment, const std::string& first_answer,
                   Bootstrap& bootstrap, Clock::time_point deadline) {
  std::string verdict = first_answer.rfind("ok", 0) == 0 ? "ok" : first_answer;
  try {
    for (int peer = 1; peer < size && verdict == "ok"; ++peer) {
      const std::string answer = bootstrap.get(mapped_key(peer), deadline);
      if (answer != "ok") verdict = answer;
    }
  } catch (const Failure& failure) {
    verdict = encode(failure);
  }
  if (segment != nullptr) segment->unlink();
  bootstrap.set("shm/verdict", verdict);
  return verdict;
}

}  // namespace

std::unique_ptr<ShmTransport> ShmTransport::create(int rank, int size, Bootstrap& bootstrap,
                                                   WaitMonitor& monitor,
                                                   const ShmOptions& options) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw Failure(FailureKind::kUnavailable, {},
                  "comm.shm: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      " cannot be had; groups have 1 to " + std::to_string(kMaxRanks) + " ranks.");
  }
  Sizes sizes;
  std::shared_ptr<Segment> segment;
  std::string verdict;
  if (rank == 0) {
    std::string answer;
    try {
      segment = make_segment(size, options, sizes);
      answer = encode_segment(segment->path(), sizes);
    } catch (const Failure& failure) {
      answer = encode(failure);
    }
    bootstrap.set("shm/segment", answer);
    verdict = settle(size, segment.get(), answer, bootstrap, options.deadline);
  } else {
    const std::string answer = bootstrap.get("shm/segment", options.deadline);
    raise_unless_ok(answer);
    try {
      segment = join_segment(size, answer, sizes);
      bootstrap.set(mapped_key(rank), "ok");
    } catch (const Failure& failure) {
      std::string text = failure.what();
      const std::string title = "comm.shm: ";
      if (text.rfind(title, 0) == 0)
        text.insert(title.size(), "rank " + std::to_string(rank) + " ");
      bootstrap.set(mapped_key(rank), encode(Failure(failure.kind(), {rank}, text)));
    }
    // Rank 0 gives up first, so that its reason reaches everybody.
    verdict = bootstrap.get("shm/verdict", options.deadline + std::chrono::seconds(2));
  }
  raise_unless_ok(verdict);
  return std::unique_ptr<ShmTransport>(
      new ShmTransport(rank, std::move(segment), Layout(size, sizes), monitor, options.staging));
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
  if (agree && counts_fit(board_, turn.parity, rank_, call)) return;
  const Disagreement disagreement = describe_disagreement(board_, turn.parity);
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
  if (call.reduce != ReduceOp::kNone &&
      kernels::can_reduce(element_of(call.dtype), reduction_of(call.reduce))) {
    return;
  }
  throw std::invalid_argument("comm." + std::string(name_of(call.op)) + ": " +
                              std::string(name_of(call.reduce)) + " of " +
                              std::string(name_of(call.dtype)) + " is not defined.");
}

std::byte* ShmTransport::own_message(const Turn& turn, std::size_t bytes) noexcept {
  turn.header.flags |= kInSlot;
  return bytes <= sizeof(turn.header.payload) ? turn.header.payload
                                              : board_.slot(rank_, turn.parity);
}

const std::byte* ShmTransport::message_of(int peer, const Turn& turn,
                                          std::size_t bytes) const noexcept {
  const CallHeader& header = board_.header(peer, turn.parity);
  return bytes <= sizeof(header.payload) ? header.payload : board_.slot(peer, turn.parity);
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

std::shared_ptr<void> ShmTransport::at_place(std::uint64_t place) {
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
