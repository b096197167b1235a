// all_reduce, reduce and reduce_scatter. Every path adds in rank order, so the bits do not depend
// on the path.

#include <algorithm>
#include <array>

#include "comm/call_agreement.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm::shm {

namespace {

constexpr std::int64_t kSliceUnit = 64;  // elements; slices start at cache lines

/// The part of `count` elements that rank `part` of `parts` reduces.
struct Slice {
  Slice(std::int64_t count, int part, int parts) {
    const std::int64_t even = (count + parts - 1) / parts;
    const std::int64_t length = (even + kSliceUnit - 1) / kSliceUnit * kSliceUnit;
    first = std::min(count, part * length);
    last = std::min(count, first + length);
  }
  std::int64_t size() const { return last - first; }

  std::int64_t first;
  std::int64_t last;
};

/// Sources and destinations of one kernel call.
class Combination {
 public:
  explicit Combination(const Call& call) : call_(call) {}
  void from(const void* source) { sources_[num_sources_++] = source; }
  void to(void* destination) { destinations_[num_destinations_++] = destination; }
  void run(std::int64_t count, kernels::Store store) const {
    if (count == 0 || num_destinations_ == 0) return;
    kernels::reduce(call_.dtype, *call_.reduce, {sources_.data(), num_sources_},
                    {destinations_.data(), num_destinations_}, count, store);
  }

 private:
  const Call& call_;
  std::array<const void*, kMaxRanks> sources_;
  std::array<void*, kMaxRanks + 1> destinations_;
  std::size_t num_sources_ = 0;
  std::size_t num_destinations_ = 0;
};

std::byte* bytes_of(Piece piece) { return static_cast<std::byte*>(piece.data); }

}  // namespace

void ShmTransport::all_reduce(const Call& call, Piece data) { reduce_for(call, data, everyone()); }

void ShmTransport::reduce(const Call& call, Piece data) {
  reduce_for(call, data, rank_bit(std::max(call.root, 0)));
}

void ShmTransport::reduce_for(const Call& call, Piece data, RankSet readers) {
  check_reduction(call);
  const Turn turn = enter(call, data.count);
  const std::size_t bytes = static_cast<std::size_t>(data.count) * size_of(call.dtype);
  const bool is_small = bytes <= one_shot_bytes_;
  if (is_small) {
    kernels::copy(own_message(turn, bytes), data.data, bytes, kernels::Store::kCached);
  } else {
    turn.header.offset = board_.offset_of(data.data, bytes);
    request_probe(turn);
  }
  meet(call, turn);
  if (is_small) {
    if ((readers & rank_bit(rank_)) != 0) reduce_one_shot(call, turn, data);
    return;
  }
  if (size_ == 1) return;
  bool all_in_heap = true;
  for (int peer = 0; peer < size_; ++peer) {
    all_in_heap &= board_.header(peer, turn.parity).offset != 0;
  }
  if (all_in_heap) return reduce_in_heap(call, turn, data, readers);
  const kernels::Store store = choose_staging(call, turn);
  if (size_ == 2 && store == kernels::Store::kStreaming && readers == everyone()) {
    return reduce_direct(call, turn, data);
  }
  reduce_two_phase(call, turn, data, readers, store);
}

void ShmTransport::reduce_one_shot(const Call& call, const Turn& turn, Piece data) {
  const std::size_t bytes = static_cast<std::size_t>(data.count) * size_of(call.dtype);
  Combination combination(call);
  for (int peer = 0; peer < size_; ++peer) combination.from(message_of(call, peer, turn, bytes));
  combination.to(data.data);
  combination.run(data.count, kernels::Store::kCached);
}

/// All buffers can be reached: every rank reduces its slice and writes it where it belongs.
/// Ordinary stores were faster than streaming ones here, and than reading the slices back.
void ShmTransport::reduce_in_heap(const Call& call, const Turn& turn, Piece data, RankSet readers) {
  const Slice slice(data.count, rank_, size_);
  const std::size_t skip = static_cast<std::size_t>(slice.first) * size_of(call.dtype);
  Combination combination(call);
  for (int peer = 0; peer < size_; ++peer) {
    const std::uint64_t offset = board_.header(peer, turn.parity).offset;
    std::byte* buffer = const_cast<std::byte*>(memory_of(call, peer, offset, data.count)) + skip;
    combination.from(buffer);
    if ((readers & rank_bit(peer)) != 0) combination.to(buffer);
  }
  combination.run(slice.size(), kernels::Store::kCached);
  publish_finished(turn, 1);
  wait_finished(call, turn, others(), 1);
}

/// Per chunk: stage what the others reduce, reduce the own slice of all ranks' chunks into the own
/// ring, read the other slices back. Staging runs one chunk ahead of reading back.
///
/// A slot is written again kRingDepth chunks later. Then every rank has been seen to stage the
/// chunk before, which it does after reading back the chunk three before that one.
void ShmTransport::reduce_two_phase(const Call& call, const Turn& turn, Piece data, RankSet readers,
                                    kernels::Store store) {
  static_assert(kRingDepth >= 3);
  const std::size_t element_bytes = size_of(call.dtype);
  const std::size_t chunk_bytes = board_.layout().sizes().ring_bytes / kRingDepth;
  const auto chunk = static_cast<std::int64_t>(chunk_bytes / element_bytes);
  const std::int64_t chunks = (data.count + chunk - 1) / chunk;
  const bool reads = (readers & rank_bit(rank_)) != 0;
  const bool is_read = (readers & others()) != 0;

  const auto length_of = [&](std::int64_t k) { return std::min(chunk, data.count - k * chunk); };
  const auto own_at = [&](std::int64_t k, std::int64_t first) {
    return bytes_of(data) + static_cast<std::size_t>(k * chunk + first) * element_bytes;
  };
  const auto ring_at = [&](int rank, std::int64_t k, std::int64_t first) {
    return ring_slot(rank, k) + static_cast<std::size_t>(first) * element_bytes;
  };
  const auto copy = [&](std::byte* to, const std::byte* from, std::int64_t count,
                        kernels::Store how) {
    kernels::copy(to, from, static_cast<std::size_t>(count) * element_bytes, how);
  };
  const auto stage = [&](std::int64_t k) {
    const std::int64_t length = length_of(k);
    const Slice mine(length, rank_, size_);
    copy(ring_at(rank_, k, 0), own_at(k, 0), mine.first, store);
    copy(ring_at(rank_, k, mine.last), own_at(k, mine.last), length - mine.last, store);
    publish_staged(turn, k + 1);
  };
  const auto reduce_slice = [&](std::int64_t k) {
    const Slice mine(length_of(k), rank_, size_);
    Combination combination(call);
    for (int peer = 0; peer < size_; ++peer) {
      combination.from(peer == rank_ ? own_at(k, mine.first) : ring_at(peer, k, mine.first));
    }
    if (is_read) combination.to(ring_at(rank_, k, mine.first));
    if (reads) combination.to(own_at(k, mine.first));
    combination.run(mine.size(), store);
    publish_finished(turn, k + 1);
  };
  const auto read_back = [&](std::int64_t k) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      const Slice theirs(length_of(k), peer, size_);
      copy(own_at(k, theirs.first), ring_at(peer, k, theirs.first), theirs.size(),
           kernels::Store::kCached);
    }
  };

  stage(0);
  for (std::int64_t k = 0; k < chunks; ++k) {
    wait_staged(call, turn, others(), k + 1);
    reduce_slice(k);
    if (k + 1 < chunks) stage(k + 1);
    if (!reads) continue;
    wait_finished(call, turn, others(), k + 1);
    read_back(k);
  }
}

/// Two ranks whose cores are far from each other: both stage everything past the cache and add the
/// other's chunk to their own.
void ShmTransport::reduce_direct(const Call& call, const Turn& turn, Piece data) {
  const std::size_t element_bytes = size_of(call.dtype);
  const std::size_t chunk_bytes = board_.layout().sizes().ring_bytes / kRingDepth;
  const auto chunk = static_cast<std::int64_t>(chunk_bytes / element_bytes);
  const int peer = 1 - rank_;
  const auto own_at = [&](std::int64_t k) {
    return bytes_of(data) + static_cast<std::size_t>(k * chunk) * element_bytes;
  };
  const auto length_of = [&](std::int64_t k) { return std::min(chunk, data.count - k * chunk); };
  const Rounds rounds{everyone(), everyone(), (data.count + chunk - 1) / chunk, 1};
  run_rounds(
      call, turn, rounds,
      [&](std::int64_t k) {
        kernels::copy(ring_slot(rank_, k), own_at(k),
                      static_cast<std::size_t>(length_of(k)) * element_bytes,
                      kernels::Store::kStreaming);
      },
      [&](std::int64_t k) {
        Combination combination(call);
        combination.from(rank_ == 0 ? own_at(k) : ring_slot(peer, k));
        combination.from(rank_ == 0 ? ring_slot(peer, k) : own_at(k));
        combination.to(own_at(k));
        combination.run(length_of(k), kernels::Store::kCached);
      });
}

void ShmTransport::reduce_scatter(const Call& call, std::span<const Piece> inputs, Piece output) {
  check_reduction(call);
  check_pieces(call, inputs);
  const std::size_t element_bytes = size_of(call.dtype);
  const Turn turn = enter(call, output.count);
  const bool is_small = publish_sends(turn, inputs, element_bytes);
  if (is_small) {
    pack(turn, inputs, element_bytes);
  } else {
    request_probe(turn);
  }
  meet(call, turn);
  if (!is_one_shot(turn)) return scatter_reduced(call, turn, inputs, output);
  std::size_t skip = 0;
  std::size_t total = 0;
  for (int peer = 0; peer < size_; ++peer) {
    const auto bytes = static_cast<std::size_t>(inputs[peer].count) * element_bytes;
    if (peer < rank_) skip += bytes;
    total += bytes;
  }
  Combination combination(call);
  for (int peer = 0; peer < size_; ++peer)
    combination.from(message_of(call, peer, turn, total) + skip);
  combination.to(output.data);
  combination.run(output.count, kernels::Store::kCached);
}

void ShmTransport::scatter_reduced(const Call& call, const Turn& turn,
                                   std::span<const Piece> inputs, Piece output) {
  const kernels::Store store = choose_staging(call, turn);
  const std::size_t element_bytes = size_of(call.dtype);
  const std::int64_t chunk = peer_chunk(element_bytes);
  const bool in_heap = (turn.header.flags & kInHeap) != 0;
  RankSet writers = 0;
  const std::array<const std::byte*, kMaxRanks> places =
      pieces_in_heap(call, turn, everyone(), everyone(), writers);
  const std::int64_t count = (largest_count(turn) + chunk - 1) / chunk;
  const auto length_of = [&](std::int64_t total, std::int64_t k) {
    return std::clamp<std::int64_t>(total - k * chunk, 0, chunk);
  };
  run_rounds(
      call, turn, {writers, everyone(), count, 0},
      [&](std::int64_t k) {
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_) continue;
          kernels::copy(
              peer_block(rank_, peer, k, element_bytes),
              bytes_of(inputs[peer]) + static_cast<std::size_t>(k * chunk) * element_bytes,
              static_cast<std::size_t>(length_of(inputs[peer].count, k)) * element_bytes, store);
        }
      },
      [&](std::int64_t k) {
        const std::size_t skip = static_cast<std::size_t>(k * chunk) * element_bytes;
        Combination combination(call);
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_) {
            combination.from(bytes_of(inputs[rank_]) + skip);
          } else if ((writers & rank_bit(peer)) != 0) {
            combination.from(peer_block(peer, rank_, k, element_bytes));
          } else {
            combination.from(places[static_cast<std::size_t>(peer)] + skip);
          }
        }
        combination.to(bytes_of(output) + skip);
        combination.run(length_of(output.count, k), kernels::Store::kCached);
      });
  // The peers read the input where it lies; it must not change before they are done.
  if (in_heap) wait_finished(call, turn, others(), count);
}

}  // namespace tessera::comm::shm
