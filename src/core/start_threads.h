// src/core/start_threads.h — as many threads for the same work as the system gives.

#pragma once

#include <cstddef>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace tessera::core {

/// At most `most` threads that run `body`; fewer, also none, where the system gives no further one
/// or no memory for it. Who starts threads one by one into a vector, and lets the error of the last
/// one out, ends the process: those that run already are not joined.
template <typename Body>
std::vector<std::thread> start_threads(std::size_t most, const Body& body) {
  std::vector<std::thread> threads;
  try {
    while (threads.size() < most) threads.emplace_back(body);
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  return threads;
}

}  // namespace tessera::core
