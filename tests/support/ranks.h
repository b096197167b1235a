// tests/support/ranks.h — ranks for tests: threads of this process, or processes of their own.

#pragma once

#include <sys/types.h>

#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/group.h"

namespace tessera::testing {

/// Ten seconds: a mismatch is a red test, never a stuck one.
inline comm::GroupOptions test_options(comm::Engine engine = comm::Engine::kAuto) {
  comm::GroupOptions options;
  options.engine = engine;
  options.timeout = std::chrono::seconds(10);
  return options;
}

/// Runs `body` once per rank, each in a thread of its own, and returns what each threw.
inline std::vector<std::exception_ptr> run_ranks_collecting(
    int size, const std::function<void(const comm::Group&)>& body,
    const comm::GroupOptions& options = test_options()) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(comm::make_group(store, rank, size, options));
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

/// Runs `body` once per rank in threads; the first exception is thrown on.
inline void run_ranks(int size, const std::function<void(const comm::Group&)>& body,
                      const comm::GroupOptions& options = test_options()) {
  for (const auto& error : run_ranks_collecting(size, body, options)) {
    if (error) std::rethrow_exception(error);
  }
}

/// The text of an exception, without LibTorch's stack; empty if there is none.
inline std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "unknown exception";
  }
}

}  // namespace tessera::testing
