// src/comm/call_exchange.h — brings a small record of every rank to all ranks, without a thread.
//
// What ranks compare before an operation is a few words. Sent as an operation of Gloo's they would
// change threads several times on the way. Here the calling thread reads and writes connections of
// its own, in log2(ranks) rounds. Why: docs/decisions/0012-calls-over-own-connections.md.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/network.h"
#include "core/secret.h"

namespace tessera::comm {

/// A connection of an exchange has ended, here or on the other side.
class ConnectionLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The connections of one rank of one group. One exchange at a time, announcements beside it.
class CallExchange {
 public:
  /// Called about every 20 ms of a wait, with the ranks whose records have not come yet, ascending;
  /// throws to end it.
  using Look = std::function<void(std::span<const int> late)>;

  /// Collective over the group, whose ranks find each other on `store`. Listens on `address` until
  /// all are connected, and on nothing else. With a `secret`, both sides of every connection prove
  /// it; without, the one who connects says a word from the store. Throws Error(kRendezvous) that
  /// names the ranks which are not connected, after `limit`, or at once if one has another secret;
  /// ConnectionLost if one has gone.
  CallExchange(c10d::Store& store, int rank, int size, const std::string& address,
               std::chrono::milliseconds limit,
               const std::optional<core::Secret>& secret = std::nullopt);

  /// Sends `mine` before its exchange begins, as far as it goes without waiting, so that peers need
  /// not wait for the thread that will run it. The next exchanges take over what was announced, in
  /// that order, and are given the same records. Not collective. From any thread, one at a time.
  void announce(std::span<const std::byte> mine) noexcept;

  /// Puts `mine` of rank r at `all + r * mine.size()`, on all ranks. Collective, with equal sizes.
  /// Throws ConnectionLost, and whatever `look` throws; the exchange is of no use after that.
  void all_gather(std::span<const std::byte> mine, std::byte* all, const Look& look);

  /// Ends the exchange that is under way and all later ones, here and on ranks that wait for what
  /// this one would send. From any thread.
  void close() const noexcept;

 private:
  using Moment = std::chrono::steady_clock::time_point;

  /// A connection to write to. What has not gone yet waits here, in order.
  struct Outlet {
    Socket socket;
    std::mutex mutex;
    std::vector<std::byte> waiting;
    std::uint64_t num_put = 0;       // bytes since the beginning
    std::deque<std::uint64_t> ends;  // where announced records end, counted as num_put
  };

  class Meeting;
  [[noreturn]] void throw_missing(std::vector<int> missing) const;
  /// Puts bytes behind those that wait, unless they were announced; returns where they end.
  std::uint64_t put(std::size_t round, std::span<const std::byte> bytes);
  /// Writes what can go at present; whether everything before `end` has gone.
  bool flush(std::size_t round, std::uint64_t end);
  /// One round: sends what is there, and receives as many records.
  void pass(std::size_t round, std::size_t num_known, std::size_t num_records, std::size_t bytes,
            const Look& look);
  int source_of(std::size_t round) const noexcept { return (rank_ + (1 << round)) % size_; }
  int target_of(std::size_t round) const noexcept { return (rank_ + size_ - (1 << round)) % size_; }

  const int rank_;
  const int size_;
  const std::chrono::milliseconds limit_;
  std::deque<Outlet> targets_;     // per round, towards rank - 2^round
  std::vector<Socket> sources_;    // per round, from rank + 2^round
  std::vector<std::byte> blocks_;  // records in the order of ranks, beginning with this one's
};

}  // namespace tessera::comm
