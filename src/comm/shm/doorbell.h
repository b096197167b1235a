// src/comm/shm/doorbell.h — lets ranks sleep until another rank has news, without losing a wake.
//
// Note [Why no wake is lost]
// A publisher first changes the state and then reads `sleepers`; a sleeper first counts itself in
// `sleepers` and then reads the state. All four accesses are sequentially consistent, so at least
// one of the two sees the other: either the sleeper finds the new state, or the publisher finds a
// sleeper and rings. The sleeper notes `rings` before it counts itself, so a ring that comes
// between its last look at the state and the system call changes the word and the call returns at
// once.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::comm::shm {

/// Lives in shared memory; zero bytes are a valid doorbell. Wakes processes and threads alike.
struct alignas(128) Doorbell {
  std::atomic<std::uint32_t> rings;     // the futex word
  std::atomic<std::uint32_t> sleepers;  // ranks that sleep or are about to

  /// Wakes every sleeper.
  void ring() noexcept;

  /// Wakes the sleepers, if there are any. No system call if there are none. The news must have
  /// been published by a sequentially consistent store.
  void ring_if_heard() noexcept {
    if (sleepers.load(std::memory_order_seq_cst) != 0) ring();
  }

  /// Sleeps until a ring, at most `limit`, unless `rings` is no longer `heard`. May return early.
  void sleep(std::uint32_t heard, std::chrono::nanoseconds limit) noexcept;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(Doorbell) == 128);

/// Counts the caller among a doorbell's sleepers for as long as it lives.
class SleeperMark {
 public:
  explicit SleeperMark(Doorbell& bell) noexcept : bell_(bell) {
    bell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  ~SleeperMark() { bell_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  SleeperMark(const SleeperMark&) = delete;
  SleeperMark& operator=(const SleeperMark&) = delete;

 private:
  Doorbell& bell_;
};

/// Publishes a counter that others wait for on `bell`.
inline void publish(std::atomic<std::uint64_t>& counter, std::uint64_t value,
                    Doorbell& bell) noexcept {
  counter.store(value, std::memory_order_seq_cst);
  bell.ring_if_heard();
}

/// Whether a counter has come as far as `target`; right across the wrap of the numbers.
inline bool has_reached(const std::atomic<std::uint64_t>& counter, std::uint64_t target) noexcept {
  return static_cast<std::int64_t>(counter.load(std::memory_order_seq_cst) - target) >= 0;
}

}  // namespace tessera::comm::shm
