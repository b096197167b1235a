// src/comm/transport.h — moves bytes between the ranks of one group; blocking, and free of
// LibTorch.
//
// A Transport is what an engine has to provide: shared memory, Gloo, or both in two levels. It
// knows nothing of tensors, queues or futures; `backend.cpp` builds those on top, once for all
// engines. Every method is collective unless it says otherwise: all ranks of the group call it, in
// the same order. Every method compares what the ranks are about to do before any data moves, and
// throws the same Failure on all ranks when they disagree.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/reduce.h"

namespace tessera::comm {

using Clock = std::chrono::steady_clock;

// What is sent and how it is combined: the kernels' own words, so that nothing is translated.
using DataType = kernels::Element;
using ReduceOp = kernels::Reduction;

/// Bytes of one element.
std::size_t size_of(DataType dtype) noexcept;
/// "float32", "bool", ...
std::string_view name_of(DataType dtype) noexcept;

std::string_view name_of(ReduceOp op) noexcept;

enum class Operator : std::uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kRecv,
};
/// "all_reduce", "all_to_all", ...
std::string_view name_of(Operator op) noexcept;

/// One rank's share of a collective: where it starts and how many elements it holds.
struct Piece {
  void* data = nullptr;
  std::int64_t count = 0;
};

/// What this rank is about to do, as far as the ranks must agree on it.
struct Call {
  Operator op = Operator::kBarrier;
  DataType dtype = DataType::kUInt8;
  std::optional<ReduceOp> reduce;  // where the operator has one
  int root = -1;                   // group rank; -1 where the operator has none
  std::uint64_t sequence = 0;      // the how-many-th collective of this group
  std::int64_t count = 0;          // elements this rank brings, for messages
  Clock::time_point deadline{};    // the wait ends with a timeout here
  Clock::duration limit{};         // how long that was at the start, for messages; 0 if unknown
  const Call* whole = nullptr;     // the operation this one is a step of: what errors talk about
};

enum class FailureKind : std::uint8_t {
  kMismatch,    // the ranks called different things
  kPeerLost,    // a process of the group ended
  kPeerFailed,  // a rank reported an error of its own
  kTimeout,
  kAborted,      // somebody called abort()
  kUnavailable,  // the engine cannot be had here (no shared memory, no route)
};

/// The world is wrong. `what()` is the root cause and is the same text on every rank.
class Failure : public std::exception {
 public:
  Failure(FailureKind kind, std::vector<int> ranks, std::string message)
      : kind_(kind), ranks_(std::move(ranks)), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  FailureKind kind() const noexcept { return kind_; }
  /// Group ranks at fault, ascending; empty if unknown.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  FailureKind kind_;
  std::vector<int> ranks_;
  std::string message_;
};

/// Consulted by every wait, about every 20 ms, with the group ranks that have not arrived yet.
///
/// Throws Failure to end the wait: a peer died, a peer reported an error, the deadline passed. The
/// transport then marks the group as broken, with that text, so that all other ranks raise it too.
class WaitMonitor {
 public:
  virtual ~WaitMonitor() = default;
  virtual void check(const Call& call, std::span<const int> missing, Clock::duration waited) = 0;

  /// As check, while the group is still being made: looks for dead processes only.
  virtual void check_creation(std::span<const int> missing) = 0;
};

/// The two verbs a group needs to find itself: a key-value store shared by its ranks.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits for the key. Throws Failure(kTimeout) naming the key at the deadline.
  virtual std::string get(const std::string& key, Clock::time_point deadline) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// "shm", "gloo", "shm+gloo".
  virtual std::string_view name() const noexcept = 0;

  /// Reduces `data` over all ranks, in rank order, in place. kAvg divides by the group size.
  virtual void all_reduce(const Call& call, Piece data) = 0;
  /// As all_reduce, but only the root's data change.
  virtual void reduce(const Call& call, Piece data) = 0;
  /// Copies the root's data to all ranks.
  virtual void broadcast(const Call& call, Piece data) = 0;
  /// Rank r's input becomes outputs[r] everywhere; outputs[r].count is rank r's input count.
  virtual void all_gather(const Call& call, Piece input, std::span<const Piece> outputs) = 0;
  /// As all_gather, on the root only; elsewhere `outputs` is empty.
  virtual void gather(const Call& call, Piece input, std::span<const Piece> outputs) = 0;
  /// inputs[r] of the root becomes rank r's output; `inputs` is empty elsewhere.
  virtual void scatter(const Call& call, std::span<const Piece> inputs, Piece output) = 0;
  /// Reduces inputs[r] of all ranks, in rank order, into rank r's output.
  virtual void reduce_scatter(const Call& call, std::span<const Piece> inputs, Piece output) = 0;
  /// inputs[r] goes to rank r; outputs[r] comes from rank r.
  virtual void all_to_all(const Call& call, std::span<const Piece> inputs,
                          std::span<const Piece> outputs) = 0;
  virtual void barrier(const Call& call) = 0;

  /// Tells the peers, without waiting, that this rank will come to the all-reduce `call`, so that
  /// they need not wait for the thread that will run it. Not collective, and each rank may do so or
  /// not. One at a time, beside a collective of another thread; in the order of the collectives,
  /// none of which may be neither announced nor done.
  virtual void announce(const Call& /*call*/) noexcept {}

  /// Whether all other ranks have come to the next collective of this rank, so that it would only
  /// move data; false if that is not known. Not collective; not beside a collective of this rank.
  virtual bool is_met() const noexcept { return false; }

  /// Not collective. Matches the receiver's recv by source and tag, in order per tag.
  /// May be called from several threads at once, and beside a collective.
  virtual void send(const Call& call, Piece data, int destination, int tag) = 0;
  /// Not collective. `source` -1 takes from any rank; returns the rank it came from.
  virtual int recv(const Call& call, Piece data, int source, int tag) = 0;

  /// Memory that the peers can reach, so that collectives on it need no staging; null if there is
  /// none (left). Not collective. Stays valid after the transport is gone.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;

  /// Whether ranks can read each other's memory of allocate(). The same on all ranks.
  virtual bool reaches_peers() const noexcept { return false; }
  /// Where memory of allocate() lies, as a number that its peers understand; 0 if it is other
  /// memory. Not collective, any thread.
  virtual std::uint64_t place_of(const void* /*data*/, std::size_t /*bytes*/) const noexcept {
    return 0;
  }
  /// `bytes` of memory at a place that this or another rank told, a multiple of `alignment`; null
  /// if no rank can have memory there. Stays mapped after the transport is gone; what it holds is
  /// between the ranks. Not collective, any thread.
  virtual std::shared_ptr<void> at_place(std::uint64_t /*place*/, std::size_t /*bytes*/,
                                         std::size_t /*alignment*/) {
    return nullptr;
  }

  /// Ends every wait of every rank of the group with Failure(kAborted or the given kind); later
  /// calls fail at once with the same text. Not collective, safe from any thread, never blocks.
  virtual void abort(FailureKind kind, std::vector<int> ranks, const std::string& reason) = 0;
};

}  // namespace tessera::comm
