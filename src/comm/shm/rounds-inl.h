// src/comm/shm/rounds-inl.h — the pipeline that the staged collectives share. Included by
// shm_transport.h.

#pragma once

namespace tessera::comm::shm {

/// Chunks of a ring; a writer runs at most this far ahead of the slowest reader.
inline constexpr int kRingDepth = 4;

template <typename Stage, typename Consume>
void ShmTransport::run_rounds(const Call& call, const Turn& turn, const Rounds& rounds, Stage stage,
                              Consume consume) {
  const bool writes = (rounds.writers & rank_bit(rank_)) != 0;
  const bool reads = (rounds.readers & rank_bit(rank_)) != 0;
  for (std::int64_t step = 0; step < rounds.count + rounds.lag; ++step) {
    if (writes && step < rounds.count) {
      if (step >= kRingDepth) {
        wait_finished(call, turn, rounds.readers & others(), step - kRingDepth + 1);
      }
      stage(step);
      publish_staged(turn, step + 1);
    }
    const std::int64_t behind = step - rounds.lag;
    if (reads && behind >= 0) {
      wait_staged(call, turn, rounds.writers & others(), behind + 1);
      consume(behind);
      publish_finished(turn, behind + 1);
    }
  }
}

}  // namespace tessera::comm::shm
