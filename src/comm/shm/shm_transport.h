// src/comm/shm/shm_transport.h — collectives between ranks of one host through shared memory.
//
// docs/shm.md tells the algorithms, the layout of the segment and what happens when a rank fails.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/shm/arena.h"
#include "comm/shm/layout.h"
#include "comm/shm/point_to_point.h"
#include "comm/shm/segment.h"
#include "comm/shm/waiter.h"
#include "comm/transport.h"
#include "kernels/reduce.h"

namespace tessera::comm::shm {

/// How large messages are put into the rings: through the cache, past it, or as measured.
enum class Staging : std::uint8_t { kMeasured, kCached, kStreaming };

/// Rank 0's options hold for the group; of the others only `deadline` and `directory` are used.
struct ShmOptions {
  /// Largest message that is exchanged in one step; 0 means 64 KiB.
  std::size_t slot_bytes = 0;
  /// Staging of one rank for larger messages; 0 means by group size, 4 MiB down to 512 KiB.
  std::size_t ring_bytes = 0;
  /// Room for messages from one rank to another; 0 means by group size, 512 KiB down to 4 KiB.
  std::size_t mailbox_bytes = 0;
  /// Most memory that allocate() can give to one rank; capped by what is free.
  std::size_t heap_bytes = std::size_t{1} << 30;
  /// When to give up finding the other ranks.
  Clock::time_point deadline = Clock::now() + std::chrono::seconds(60);
  Staging staging = Staging::kMeasured;
  /// Where the segment is made; empty means TESSERA_SHM_DIR, or anonymous memory.
  std::string directory;
};

/// One rank's end of a group. Collectives are called by one thread at a time; send, recv, allocate
/// and abort by any thread at any time. The destructor does not communicate.
class ShmTransport final : public Transport {
 public:
  /// Joins a group of `size` ranks, at most 64, which may be processes or threads.
  ///
  /// Collective. Uses the keys "shm/..." of `bootstrap`, which must belong to this group alone.
  /// Either every rank gets a transport, or every rank gets the same Failure: kUnavailable if there
  /// is no (or too little) shared memory or the ranks cannot see each other's, kTimeout if a rank
  /// does not come. `monitor` must live as long as the transport.
  static std::unique_ptr<ShmTransport> create(int rank, int size, Bootstrap& bootstrap,
                                              WaitMonitor& monitor, const ShmOptions& options);

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string_view name() const noexcept override { return "shm"; }

  void all_reduce(const Call& call, Piece data) override;
  void reduce(const Call& call, Piece data) override;
  void broadcast(const Call& call, Piece data) override;
  void all_gather(const Call& call, Piece input, std::span<const Piece> outputs) override;
  void gather(const Call& call, Piece input, std::span<const Piece> outputs) override;
  void scatter(const Call& call, std::span<const Piece> inputs, Piece output) override;
  void reduce_scatter(const Call& call, std::span<const Piece> inputs, Piece output) override;
  void all_to_all(const Call& call, std::span<const Piece> inputs,
                  std::span<const Piece> outputs) override;
  void barrier(const Call& call) override;
  bool is_met() const noexcept override;
  void send(const Call& call, Piece data, int destination, int tag) override;
  int recv(const Call& call, Piece data, int source, int tag) override;
  std::shared_ptr<void> allocate(std::size_t bytes) override;
  bool reaches_peers() const noexcept override { return true; }
  std::uint64_t place_of(const void* data, std::size_t bytes) const noexcept override;
  std::shared_ptr<void> at_place(std::uint64_t place, std::size_t bytes,
                                 std::size_t alignment) override;
  void abort(FailureKind kind, std::vector<int> ranks, const std::string& reason) override;

  /// What the last probe found: whether a line changes cores slowly. For benchmarks and reports.
  bool cores_are_far() const noexcept { return cores_are_far_; }

 private:
  /// One collective, from arrival to return.
  struct Turn {
    std::uint64_t number;
    int parity;
    CallHeader& header;
  };

  /// A pipeline of rounds: writers stage a chunk each, readers consume it `lag` rounds later.
  struct Rounds {
    RankSet writers;
    RankSet readers;
    std::int64_t count;
    int lag;
  };

  /// Where this rank's piece lies in a slot that holds one for every rank.
  struct PackedPiece {
    std::size_t skip = 0;
    std::size_t total = 0;
  };

  ShmTransport(int rank, std::shared_ptr<Segment> segment, const Layout& layout,
               WaitMonitor& monitor, Staging staging);

  // Every collective: enter, fill in the header, meet, move data. (shm_transport.cpp)
  Turn enter(const Call& call, std::int64_t count);
  void meet(const Call& call, const Turn& turn);
  void check_pieces(const Call& call, std::span<const Piece> pieces) const;
  void check_reduction(const Call& call) const;
  std::byte* own_message(const Turn& turn, std::size_t bytes) noexcept;
  // What a peer wrote is looked at before it is used; what cannot be ends the group.
  const std::byte* message_of(const Call& call, int peer, const Turn& turn, std::size_t bytes);
  PackedPiece packed_piece(const Call& call, int peer, const Turn& turn);
  const std::byte* memory_of(const Call& call, int peer, std::uint64_t offset, std::int64_t count);
  [[noreturn]] void refuse(const Call& call, int peer, const std::string& what);
  bool is_one_shot(const Turn& turn) const noexcept;
  RankSet everyone() const noexcept { return ~RankSet{0} >> (kMaxRanks - size_); }
  RankSet others() const noexcept { return everyone() & ~rank_bit(rank_); }
  /// Publishes that this rank has staged, or finished, `chunks` chunks.
  void publish_staged(const Turn& turn, std::int64_t chunks);
  void publish_finished(const Turn& turn, std::int64_t chunks);
  void wait_staged(const Call& call, const Turn& turn, RankSet ranks, std::int64_t chunks);
  void wait_finished(const Call& call, const Turn& turn, RankSet ranks, std::int64_t chunks);
  template <typename Stage, typename Consume>
  void run_rounds(const Call& call, const Turn& turn, const Rounds& rounds, Stage stage,
                  Consume consume);
  std::byte* ring_slot(int rank, std::int64_t chunk) const noexcept;
  std::int64_t largest_count(const Turn& turn) const noexcept;

  // Which way to stage. (probe.cpp)
  kernels::Store choose_staging(const Call& call, const Turn& turn);
  void request_probe(const Turn& turn);
  int measure_distance(const Turn& turn);
  void answer_pings(const Turn& turn);

  // Reductions. (reductions.cpp)
  void reduce_for(const Call& call, Piece data, RankSet readers);
  void reduce_one_shot(const Call& call, const Turn& turn, Piece data);
  void reduce_in_heap(const Call& call, const Turn& turn, Piece data, RankSet readers);
  void reduce_two_phase(const Call& call, const Turn& turn, Piece data, RankSet readers,
                        kernels::Store store);
  void reduce_direct(const Call& call, const Turn& turn, Piece data);
  void scatter_reduced(const Call& call, const Turn& turn, std::span<const Piece> inputs,
                       Piece output);

  // Exchanges. (exchanges.cpp)
  void spread(const Call& call, const Turn& turn, Piece input, std::span<const Piece> outputs,
              RankSet sources, RankSet readers);
  void deliver(const Call& call, const Turn& turn, std::span<const Piece> inputs,
               std::span<const Piece> outputs, RankSet sources, RankSet readers);
  void pack(const Turn& turn, std::span<const Piece> pieces, std::size_t element_bytes);
  bool publish_sends(const Turn& turn, std::span<const Piece> pieces, std::size_t element_bytes);
  std::array<const std::byte*, kMaxRanks> pieces_in_heap(const Call& call, const Turn& turn,
                                                         RankSet sources, RankSet readers,
                                                         RankSet& writers);
  std::int64_t peer_chunk(std::size_t element_bytes) const noexcept;
  std::byte* peer_block(int from, int to, std::int64_t chunk,
                        std::size_t element_bytes) const noexcept;

  int rank_;
  int size_;
  std::shared_ptr<Segment> segment_;
  Board board_;
  std::shared_ptr<Arena> arena_;
  Waiter waiter_;
  PointToPoint point_to_point_;
  std::size_t one_shot_bytes_;  // of a reduction, where every rank reads every message
  Staging staging_;
  bool cores_are_far_;  // rank 0's word counts
  std::uint64_t calls_ = 0;
  Clock::time_point probed_{};
};

}  // namespace tessera::comm::shm

#include "comm/shm/rounds-inl.h"
