#include "comm/shm/waiter.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "comm/rank_list.h"

namespace tessera::comm::shm {

namespace {

constexpr std::uint32_t kWell = 0;
constexpr std::uint32_t kBeingWritten = 1;
constexpr std::uint32_t kReadable = 2;

std::string timeout_text(const Call& call, const std::vector<int>& missing,
                         Clock::duration waited) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f", std::chrono::duration<double>(waited).count());
  return "comm." + std::string(name_of(call.op)) + " #" + std::to_string(call.sequence) +
         ": no answer from " + (missing.empty() ? "the group" : list_ranks(missing, ", ")) +
         " in " + seconds + " s. Find out what they are doing, or raise the time limit.";
}

}  // namespace

void Waiter::sleep_until(Doorbell& bell, const Call& call, Clock::time_point begin,
                         FunctionRef<bool()> ready, FunctionRef<RankSet()> missing) {
  Clock::time_point consulted = begin;
  while (true) {
    // See Note [Why no wake is lost].
    const std::uint32_t heard = bell.rings.load(std::memory_order_seq_cst);
    {
      const SleeperMark mark(bell);
      if (ready()) return;
      check();
      bell.sleep(heard, kSlice);
    }
    if (ready()) return;
    check();
    const Clock::time_point now = Clock::now();
    if (now - consulted < kSlice) continue;
    consulted = now;
    consult(call, missing(), begin);
  }
}

void Waiter::consult(const Call& call, RankSet missing, Clock::time_point begin) {
  check();
  const std::vector<int> ranks = ranks_in(missing);
  const Clock::time_point now = Clock::now();
  try {
    monitor_.check(call, ranks, now - begin);
  } catch (const Failure& failure) {
    RankSet at_fault = 0;
    for (const int rank : failure.ranks()) {
      if (rank >= 0 && rank < kMaxRanks) at_fault |= rank_bit(rank);
    }
    fail(failure.kind(), at_fault, failure.what());
    raise();
  } catch (const std::exception& error) {
    fail(FailureKind::kPeerFailed, rank_bit(rank_), error.what());
    throw;
  }
  // The monitor is expected to know the deadline; this holds even if it does not.
  if (call.deadline != Clock::time_point{} && now >= call.deadline) {
    fail(FailureKind::kTimeout, missing, timeout_text(call, ranks, now - begin));
    raise();
  }
}

void Waiter::fail(FailureKind kind, RankSet ranks, const std::string& text) noexcept {
  std::uint32_t expected = kWell;
  if (!failure_.state.compare_exchange_strong(expected, kBeingWritten, std::memory_order_seq_cst)) {
    return;
  }
  failure_.kind = static_cast<std::uint32_t>(kind);
  failure_.ranks = ranks;
  failure_.length =
      static_cast<std::uint32_t>(std::min(text.size(), std::size_t{FailureRecord::kMaxText}));
  std::memcpy(failure_.text, text.data(), failure_.length);
  failure_.state.store(kReadable, std::memory_order_seq_cst);
  for (int rank = 0; rank < board_.size(); ++rank) {
    RankBlock& block = board_.rank(rank);
    block.progress.ring();
    block.inbox.ring();
    block.outbox.ring();
  }
}

void Waiter::raise() const {
  // Whoever writes the record needs microseconds. If it was killed while writing, go on without.
  const Clock::time_point limit = Clock::now() + std::chrono::milliseconds(200);
  while (failure_.state.load(std::memory_order_acquire) != kReadable) {
    if (Clock::now() >= limit) {
      throw Failure(FailureKind::kAborted, {},
                    "comm: the group was ended by a rank that died before it could say why. "
                    "Look at the output of the other ranks.");
    }
    sched_yield();
  }
  const auto last = static_cast<std::uint32_t>(FailureKind::kUnavailable);
  const std::uint32_t kind = failure_.kind;
  const std::size_t length = std::min<std::size_t>(failure_.length, FailureRecord::kMaxText);
  // The ranks may be those of a larger group whose part on this host we are; they are only named.
  throw Failure(kind <= last ? static_cast<FailureKind>(kind) : FailureKind::kAborted,
                ranks_in(failure_.ranks), std::string(failure_.text, length));
}

}  // namespace tessera::comm::shm
