// checkpoint/run_beside.h — the same work by several threads.

#pragma once

#include <cstddef>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace tessera::checkpoint {

/// Runs `work`, which must not throw, in this thread and `num_threads` - 1 others. Where the system
/// gives no further thread or memory for one, fewer do it.
template <typename Work>
void run_beside(std::size_t num_threads, const Work& work) {
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 1; i < num_threads; ++i) threads.emplace_back([&work] { work(); });
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tessera::checkpoint
