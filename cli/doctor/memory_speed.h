// cli/doctor/memory_speed.h — how fast this machine moves bytes; the floor under every figure.

#pragma once

#include <cstddef>

namespace tessera::cli {

/// Bytes per second. A copy counts what it reads and what it writes.
struct MemorySpeed {
  double read = 0.0;
  double copy = 0.0;
};

/// Streams through `bytes` of memory per thread, `repetitions` times, and returns the best.
/// Starts and joins `num_threads` - 1 threads.
MemorySpeed measure_memory(int num_threads, std::size_t bytes, int repetitions);

/// Nanoseconds that a cache line takes from one core to another: the best of a few batches between
/// the first two cores this process may use. 0 if it may use only one.
double measure_ping();

/// Whether cores with that ping do not share a cache. The same limit as the shared-memory engine's.
inline bool is_far(double ping_nanoseconds) { return ping_nanoseconds >= 130.0; }

}  // namespace tessera::cli
