// src/comm/side_thread.h — runs calls that may never return, one at a time, beside their caller.

#pragma once

#include <functional>
#include <future>

namespace tessera::comm {

/// Runs `job` on a thread kept for the calling one, and returns its end. Whoever gives up waiting
/// calls abandon_side_thread: the job keeps the thread, and the next one gets a new thread.
/// Throws an Error of kind unavailable if there is none.
///
/// A thread kept, not one per call: memory that short-lived threads allocate stays with the
/// allocator's many arenas.
std::future<void> run_beside(std::function<void()> job);
void abandon_side_thread();

}  // namespace tessera::comm
