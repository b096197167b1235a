// Which way to stage: through the cache, or past it.
//
// Note [Near and far cores]
// On virtual machines the two cores of a pair may share a cache or not, and the answer can change
// while the program runs. A line that was written by the other core then costs 50 to 75 ns or 260
// ns, and staging through the cache is faster than past it, or four to six times slower. A server
// with one large mesh of cores lies between, at 130 ns, and does better through the cache. Nothing
// but a measurement tells which. Rank 0 asks for one now and then; it decides for the group,
// because both sides must take the same path.

#include "comm/shm/shm_transport.h"

#include <algorithm>

namespace tessera::comm::shm {

namespace {

constexpr std::chrono::milliseconds kProbeInterval{100};
constexpr int kBatches = 8;
constexpr int kPingsPerBatch = 8;
constexpr int kMaxLooks = 20000;      // about 10 us; a peer that does not run must not delay us
constexpr int kFarNanoseconds = 180;  // one way; see Note [Near and far cores]
constexpr int kUnknown = -1;

std::uint64_t ping_value(std::uint64_t number, int ping) {
  return (number << 8) + static_cast<std::uint64_t>(ping);
}

bool see(const std::atomic<std::uint64_t>& word, std::uint64_t value, int looks) {
  for (int i = 0; i < looks; ++i) {
    if (word.load(std::memory_order_acquire) == value) return true;
  }
  return false;
}

}  // namespace

void ShmTransport::request_probe(const Turn& turn) {
  if (rank_ != 0 || size_ == 1 || staging_ != Staging::kMeasured) return;
  const Clock::time_point now = Clock::now();
  if (now - probed_ < kProbeInterval) return;
  probed_ = now;
  turn.header.flags |= kProbe;
}

kernels::Store ShmTransport::choose_staging(const Call& call, const Turn& turn) {
  const std::uint32_t flags = board_.header(0, turn.parity).flags;
  if ((flags & kProbe) != 0) {
    RankBlock& first = board_.rank(0);
    if (rank_ == 0) {
      const int distance = measure_distance(turn);
      if (distance != kUnknown) cores_are_far_ = distance >= kFarNanoseconds;
      publish(first.verdict.value, turn.number << 1 | (cores_are_far_ ? 1 : 0), first.progress);
    } else {
      if (rank_ == 1) answer_pings(turn);
      waiter_.wait_for(call, rank_bit(0), turn.number << 1,
                       [&](int) -> auto& { return first.verdict.value; });
      cores_are_far_ = (first.verdict.value.load(std::memory_order_acquire) & 1) != 0;
    }
  } else {
    cores_are_far_ = (flags & kFarCores) != 0;
  }
  return cores_are_far_ ? kernels::Store::kStreaming : kernels::Store::kCached;
}

/// Nanoseconds that a line needs from one core to the other: the best batch of a few.
int ShmTransport::measure_distance(const Turn& turn) {
  std::atomic<std::uint64_t>& mine = board_.rank(0).ping.value;
  const std::atomic<std::uint64_t>& theirs = board_.rank(1).ping.value;
  std::int64_t best = kUnknown;
  int ping = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kPingsPerBatch; ++i) {
      const std::uint64_t value = ping_value(turn.number, ++ping);
      mine.store(value, std::memory_order_release);
      // The peer may still be on its way here at the first ping.
      if (!see(theirs, value, ping == 1 ? 10 * kMaxLooks : kMaxLooks)) {
        return static_cast<int>(best);
      }
    }
    const auto time = std::chrono::nanoseconds(Clock::now() - begin).count();
    const std::int64_t one_way = time / (2 * kPingsPerBatch);
    // The first batch includes the wait for the peer to come.
    if (batch > 0) best = best == kUnknown ? one_way : std::min(best, one_way);
  }
  return static_cast<int>(best);
}

void ShmTransport::answer_pings(const Turn& turn) {
  const std::atomic<std::uint64_t>& theirs = board_.rank(0).ping.value;
  std::atomic<std::uint64_t>& mine = board_.rank(1).ping.value;
  for (int ping = 1; ping <= kBatches * kPingsPerBatch; ++ping) {
    const std::uint64_t value = ping_value(turn.number, ping);
    if (!see(theirs, value, ping == 1 ? 10 * kMaxLooks : kMaxLooks)) return;
    mine.store(value, std::memory_order_release);
  }
}

}  // namespace tessera::comm::shm
