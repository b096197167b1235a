// checkpoint/run_beside.h — the same work by several threads.

#pragma once

#include <cstddef>
#include <thread>
#include <vector>

#include "core/start_threads.h"

namespace tessera::checkpoint {

/// Runs `work`, which must not throw, in this thread and `num_threads` - 1 others. Where the system
/// gives no further thread or memory for one, fewer do it.
template <typename Work>
void run_beside(std::size_t num_threads, const Work& work) {
  std::vector<std::thread> threads =
      core::start_threads(num_threads > 0 ? num_threads - 1 : 0, [&work] { work(); });
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tessera::checkpoint
