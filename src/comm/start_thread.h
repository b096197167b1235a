// src/comm/start_thread.h — threads, which the system may refuse.

#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "tessera/comm/error.h"

namespace tessera::comm {

/// The error, of kind unavailable, for an operation that was refused a thread: names this process,
/// says how many threads it has and which limits it is under. `operation` is as in "comm.init".
Error refused_thread(const std::string& operation, const std::system_error& refusal);

/// A thread that runs `body`. Throws refused_thread if the system has none to give; then nothing
/// has begun.
template <typename Body>
std::thread start_thread(const std::string& operation, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& refusal) {
    throw refused_thread(operation, refusal);
  }
}

}  // namespace tessera::comm
