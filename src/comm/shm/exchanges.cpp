// broadcast, all_gather, gather, scatter and all_to_all: data that move without changing.

#include <algorithm>
#include <array>

#include "comm/call_agreement.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm::shm {

namespace {

using kernels::Store;

std::byte* bytes_of(Piece piece) { return static_cast<std::byte*>(piece.data); }

/// Copies unless both are the same place, as in a collective in place.
void copy_to(std::byte* to, const std::byte* from, std::size_t bytes, Store store) {
  if (to != from && bytes != 0) kernels::copy(to, from, bytes, store);
}

/// Part `k` of `bytes` in parts of `part` bytes.
struct Part {
  Part(std::size_t bytes, std::size_t part, std::int64_t k)
      : first(std::min(bytes, static_cast<std::size_t>(k) * part)),
        bytes(std::min(part, bytes - first)) {}
  std::size_t first;
  std::size_t bytes;
};

// Outputs this large leave the cache before anybody reads them.
constexpr std::size_t kStreamedOutputBytes = std::size_t{4} << 20;

Store output_store(std::span<const Piece> outputs, std::size_t element_bytes) {
  std::size_t bytes = 0;
  for (const Piece& piece : outputs) bytes += static_cast<std::size_t>(piece.count) * element_bytes;
  return bytes >= kStreamedOutputBytes ? Store::kStreaming : Store::kCached;
}

}  // namespace

void ShmTransport::broadcast(const Call& call, Piece data) {
  const std::size_t bytes = static_cast<std::size_t>(data.count) * size_of(call.dtype);
  const Turn turn = enter(call, data.count);
  const bool is_small = bytes <= board_.layout().sizes().slot_bytes;
  const bool is_root = rank_ == call.root;
  if (!is_small) {
    turn.header.offset = board_.offset_of(data.data, bytes);
    request_probe(turn);
  } else if (is_root) {
    copy_to(own_message(turn, bytes), bytes_of(data), bytes, Store::kCached);
  }
  meet(call, turn);
  if (is_small) {
    if (!is_root)
      copy_to(bytes_of(data), message_of(call, call.root, turn, bytes), bytes, Store::kCached);
    return;
  }
  const RankSet root = rank_bit(call.root);
  std::array<Piece, kMaxRanks> outputs{};
  if (!is_root) outputs[static_cast<std::size_t>(call.root)] = data;
  spread(call, turn, is_root ? data : Piece{}, {outputs.data(), static_cast<std::size_t>(size_)},
         root, everyone() & ~root);
}

void ShmTransport::all_gather(const Call& call, Piece input, std::span<const Piece> outputs) {
  check_pieces(call, outputs);
  const std::size_t element_bytes = size_of(call.dtype);
  const std::size_t bytes = static_cast<std::size_t>(input.count) * element_bytes;
  const Turn turn = enter(call, input.count);
  std::int64_t* receives = board_.counts(rank_, turn.parity).receives;
  for (int peer = 0; peer < size_; ++peer) receives[peer] = outputs[peer].count;
  turn.header.digest = digest_of(outputs);
  if (bytes <= board_.layout().sizes().slot_bytes) {
    copy_to(own_message(turn, bytes), bytes_of(input), bytes, Store::kCached);
  }
  turn.header.offset = board_.offset_of(input.data, bytes);
  if (bytes > board_.layout().sizes().slot_bytes) request_probe(turn);
  meet(call, turn);
  if (!is_one_shot(turn)) return spread(call, turn, input, outputs, everyone(), everyone());
  for (int peer = 0; peer < size_; ++peer) {
    const std::size_t theirs = static_cast<std::size_t>(outputs[peer].count) * element_bytes;
    copy_to(bytes_of(outputs[peer]), message_of(call, peer, turn, theirs), theirs, Store::kCached);
  }
}

void ShmTransport::gather(const Call& call, Piece input, std::span<const Piece> outputs) {
  const bool is_root = rank_ == call.root;
  if (is_root) check_pieces(call, outputs);
  const std::size_t element_bytes = size_of(call.dtype);
  const std::size_t bytes = static_cast<std::size_t>(input.count) * element_bytes;
  const Turn turn = enter(call, input.count);
  if (is_root) {
    std::int64_t* receives = board_.counts(rank_, turn.parity).receives;
    for (int peer = 0; peer < size_; ++peer) receives[peer] = outputs[peer].count;
  }
  if (bytes <= board_.layout().sizes().slot_bytes) {
    copy_to(own_message(turn, bytes), bytes_of(input), bytes, Store::kCached);
  }
  turn.header.offset = board_.offset_of(input.data, bytes);
  if (bytes > board_.layout().sizes().slot_bytes) request_probe(turn);
  meet(call, turn);
  if (!is_one_shot(turn)) {
    return spread(call, turn, input, outputs, everyone(), rank_bit(call.root));
  }
  if (!is_root) return;
  for (int peer = 0; peer < size_; ++peer) {
    const std::size_t theirs = static_cast<std::size_t>(outputs[peer].count) * element_bytes;
    copy_to(bytes_of(outputs[peer]), message_of(call, peer, turn, theirs), theirs, Store::kCached);
  }
}

/// Every source's input goes to all readers: staged once, or read where it lies if in the heap.
void ShmTransport::spread(const Call& call, const Turn& turn, Piece input,
                          std::span<const Piece> outputs, RankSet sources, RankSet readers) {
  const Store staging = choose_staging(call, turn);
  const std::size_t element_bytes = size_of(call.dtype);
  const std::size_t part = board_.layout().sizes().ring_bytes / kRingDepth;
  const Store output = output_store(outputs, element_bytes);
  const std::size_t input_bytes = static_cast<std::size_t>(input.count) * element_bytes;
  const bool reads = (readers & rank_bit(rank_)) != 0;
  RankSet writers = 0;
  std::size_t largest = 0;
  std::array<const std::byte*, kMaxRanks> in_heap{};  // by source; null: staged
  for (RankSet left = sources; left != 0; left &= left - 1) {
    const int source = __builtin_ctzll(left);
    const CallHeader& header = board_.header(source, turn.parity);
    const bool is_read = (readers & ~rank_bit(source)) != 0;
    if (header.offset == 0 && is_read) writers |= rank_bit(source);
    if (header.offset != 0) {
      in_heap[static_cast<std::size_t>(source)] =
          memory_of(call, source, header.offset, header.count);
    }
    largest = std::max(largest, static_cast<std::size_t>(header.count) * element_bytes);
  }
  const bool writes = (writers & rank_bit(rank_)) != 0;
  const auto count = static_cast<std::int64_t>((largest + part - 1) / part);
  const auto keep_own = [&](std::int64_t k) {
    if (!reads || (sources & rank_bit(rank_)) == 0) return;
    const Part own(input_bytes, part, k);
    copy_to(bytes_of(outputs[rank_]) + own.first, bytes_of(input) + own.first, own.bytes, output);
  };
  run_rounds(
      call, turn, {writers, readers, count, 0},
      [&](std::int64_t k) {
        const Part own(input_bytes, part, k);
        copy_to(ring_slot(rank_, k), bytes_of(input) + own.first, own.bytes, staging);
        keep_own(k);  // now, while the input is in the cache
      },
      [&](std::int64_t k) {
        if (!writes) keep_own(k);
        for (RankSet left = sources & others(); left != 0; left &= left - 1) {
          const int source = __builtin_ctzll(left);
          // The counts of the outputs are the sources' own: they were compared.
          const Part theirs(static_cast<std::size_t>(outputs[source].count) * element_bytes, part,
                            k);
          const std::byte* memory = in_heap[static_cast<std::size_t>(source)];
          const std::byte* from = memory == nullptr ? ring_slot(source, k) : memory + theirs.first;
          copy_to(bytes_of(outputs[source]) + theirs.first, from, theirs.bytes, output);
        }
      });
  // The peers read the input where it lies; it must not change before they are done.
  if ((sources & rank_bit(rank_)) != 0 && turn.header.offset != 0) {
    wait_finished(call, turn, readers & others(), count);
  }
}

void ShmTransport::scatter(const Call& call, std::span<const Piece> inputs, Piece output) {
  const bool is_root = rank_ == call.root;
  if (is_root) check_pieces(call, inputs);
  const std::size_t element_bytes = size_of(call.dtype);
  const Turn turn = enter(call, output.count);
  if (is_root && publish_sends(turn, inputs, element_bytes)) pack(turn, inputs, element_bytes);
  if ((turn.header.flags & kInSlot) == 0) request_probe(turn);
  meet(call, turn);
  const RankSet root = rank_bit(call.root);
  if ((board_.header(call.root, turn.parity).flags & kInSlot) == 0) {
    std::array<Piece, kMaxRanks> outputs{};
    outputs[static_cast<std::size_t>(call.root)] = output;
    return deliver(call, turn, inputs, {outputs.data(), static_cast<std::size_t>(size_)}, root,
                   everyone());
  }
  const PackedPiece piece = packed_piece(call, call.root, turn);
  copy_to(bytes_of(output), message_of(call, call.root, turn, piece.total) + piece.skip,
          static_cast<std::size_t>(output.count) * element_bytes, Store::kCached);
}

void ShmTransport::all_to_all(const Call& call, std::span<const Piece> inputs,
                              std::span<const Piece> outputs) {
  check_pieces(call, inputs);
  check_pieces(call, outputs);
  const std::size_t element_bytes = size_of(call.dtype);
  std::int64_t largest = 0;
  bool is_uniform = true;
  for (int peer = 0; peer < size_; ++peer) {
    largest = std::max(largest, inputs[peer].count);
    is_uniform &= inputs[peer].count == inputs[0].count && outputs[peer].count == inputs[0].count;
  }
  const Turn turn = enter(call, largest);
  std::int64_t* receives = board_.counts(rank_, turn.parity).receives;
  for (int peer = 0; peer < size_; ++peer) receives[peer] = outputs[peer].count;
  const bool is_small = publish_sends(turn, inputs, element_bytes);
  if (is_uniform) turn.header.flags |= kUniform;
  if (is_small) {
    pack(turn, inputs, element_bytes);
  } else {
    request_probe(turn);
  }
  meet(call, turn);
  if (!is_one_shot(turn)) return deliver(call, turn, inputs, outputs, everyone(), everyone());
  for (int peer = 0; peer < size_; ++peer) {
    const PackedPiece piece = packed_piece(call, peer, turn);
    copy_to(bytes_of(outputs[peer]), message_of(call, peer, turn, piece.total) + piece.skip,
            static_cast<std::size_t>(outputs[peer].count) * element_bytes, Store::kCached);
  }
}

/// Publishes the counts of the pieces, and where they lie if all of them lie in the heap. Returns
/// whether they fit into the slot together.
bool ShmTransport::publish_sends(const Turn& turn, std::span<const Piece> pieces,
                                 std::size_t element_bytes) {
  const PeerCounts own = board_.counts(rank_, turn.parity);
  std::size_t total = 0;
  bool in_heap = true;
  for (int peer = 0; peer < size_; ++peer) {
    const auto bytes = static_cast<std::size_t>(pieces[peer].count) * element_bytes;
    own.sends[peer] = pieces[peer].count;
    own.offsets[peer] =
        static_cast<std::int64_t>(bytes == 0 ? 0 : board_.offset_of(pieces[peer].data, bytes));
    in_heap &= peer == rank_ || bytes == 0 || own.offsets[peer] != 0;
    total += bytes;
  }
  turn.header.digest = digest_of(pieces);
  if (in_heap) turn.header.flags |= kInHeap;
  return total <= board_.layout().sizes().slot_bytes;
}

/// Puts the pieces into the slot, one after the other.
void ShmTransport::pack(const Turn& turn, std::span<const Piece> pieces,
                        std::size_t element_bytes) {
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += static_cast<std::size_t>(piece.count) * element_bytes;
  std::byte* message = own_message(turn, total);
  for (const Piece& piece : pieces) {
    const auto bytes = static_cast<std::size_t>(piece.count) * element_bytes;
    copy_to(message, bytes_of(piece), bytes, Store::kCached);
    message += bytes;
  }
}

/// Elements for one peer in one chunk of a ring: the chunk is divided among the other ranks.
std::int64_t ShmTransport::peer_chunk(std::size_t element_bytes) const noexcept {
  const std::size_t chunk_bytes = board_.layout().sizes().ring_bytes / kRingDepth;
  const auto peers = static_cast<std::size_t>(std::max(size_ - 1, 1));
  return static_cast<std::int64_t>(chunk_bytes / peers / 64 * 64 / element_bytes);
}

std::byte* ShmTransport::peer_block(int from, int to, std::int64_t chunk,
                                    std::size_t element_bytes) const noexcept {
  const auto index = static_cast<std::size_t>(to < from ? to : to - 1);
  return ring_slot(from, chunk) +
         index * static_cast<std::size_t>(peer_chunk(element_bytes)) * element_bytes;
}

/// Where the sources' pieces for this rank lie in their heaps; null where they are staged, by
/// `writers`, or empty.
std::array<const std::byte*, kMaxRanks> ShmTransport::pieces_in_heap(
    const Call& call, const Turn& turn, RankSet sources, RankSet readers, RankSet& writers) {
  std::array<const std::byte*, kMaxRanks> places{};
  for (RankSet left = sources; left != 0; left &= left - 1) {
    const int source = __builtin_ctzll(left);
    if ((board_.header(source, turn.parity).flags & kInHeap) == 0) {
      writers |= rank_bit(source);
    } else if (source != rank_ && (readers & rank_bit(rank_)) != 0) {
      const PeerCounts counts = board_.counts(source, turn.parity);
      if (counts.sends[rank_] == 0) continue;
      places[static_cast<std::size_t>(source)] = memory_of(
          call, source, static_cast<std::uint64_t>(counts.offsets[rank_]), counts.sends[rank_]);
    }
  }
  return places;
}

/// Every source has its own piece for every reader.
void ShmTransport::deliver(const Call& call, const Turn& turn, std::span<const Piece> inputs,
                           std::span<const Piece> outputs, RankSet sources, RankSet readers) {
  const Store staging = choose_staging(call, turn);
  const std::size_t element_bytes = size_of(call.dtype);
  const std::size_t part = static_cast<std::size_t>(peer_chunk(element_bytes)) * element_bytes;
  const Store output = output_store(outputs, element_bytes);
  RankSet writers = 0;
  const std::array<const std::byte*, kMaxRanks> in_heap =
      pieces_in_heap(call, turn, sources, readers, writers);
  const bool is_source = (sources & rank_bit(rank_)) != 0;
  const std::size_t largest = static_cast<std::size_t>(largest_count(turn)) * element_bytes;
  const auto count = static_cast<std::int64_t>((largest + part - 1) / part);
  run_rounds(
      call, turn, {writers, readers, count, 0},
      [&](std::int64_t k) {
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_) continue;
          const Part own(static_cast<std::size_t>(inputs[peer].count) * element_bytes, part, k);
          copy_to(peer_block(rank_, peer, k, element_bytes), bytes_of(inputs[peer]) + own.first,
                  own.bytes, staging);
        }
      },
      [&](std::int64_t k) {
        for (RankSet left = sources; left != 0; left &= left - 1) {
          const int source = __builtin_ctzll(left);
          const Part theirs(static_cast<std::size_t>(outputs[source].count) * element_bytes, part,
                            k);
          const std::byte* from = nullptr;
          if (source == rank_) {
            from = bytes_of(inputs[rank_]) + theirs.first;
          } else if ((writers & rank_bit(source)) != 0) {
            from = peer_block(source, rank_, k, element_bytes);
          } else {
            from = in_heap[static_cast<std::size_t>(source)] + theirs.first;
          }
          copy_to(bytes_of(outputs[source]) + theirs.first, from, theirs.bytes, output);
        }
      });
  // The peers read the input where it lies; it must not change before they are done.
  if (is_source && (turn.header.flags & kInHeap) != 0) {
    wait_finished(call, turn, readers & others(), count);
  }
}

}  // namespace tessera::comm::shm
