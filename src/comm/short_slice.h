// src/comm/short_slice.h — lets threads that only pass things on run as soon as they are woken.

#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tessera::comm {

/// While it lives, this thread asks the scheduler for short slices, and threads that it starts do
/// so for good. On Linux 6.12 and later such a thread, when it wakes, takes the core from one that
/// computes, instead of waiting for the end of its slice, a few milliseconds; before, nothing
/// changes. It gets no more time than others. Only threads of the ordinary policy are changed.
class ShortSliceGuard {
 public:
  ShortSliceGuard() {
    if (::syscall(SYS_sched_getattr, 0, &before_, sizeof(before_), 0) != 0) return;
    if (before_.policy != SCHED_OTHER) return;
    Attributes attributes = before_;
    attributes.runtime = kSlice;
    is_set_ = ::syscall(SYS_sched_setattr, 0, &attributes, 0) == 0;
  }
  ~ShortSliceGuard() {
    if (is_set_) ::syscall(SYS_sched_setattr, 0, &before_, 0);
  }
  ShortSliceGuard(const ShortSliceGuard&) = delete;
  ShortSliceGuard& operator=(const ShortSliceGuard&) = delete;

 private:
  // The kernel's sched_attr in its first version; its header and the C library's exclude each
  // other.
  struct Attributes {
    std::uint32_t size = sizeof(Attributes);
    std::uint32_t policy = 0;
    std::uint64_t flags = 0;
    std::int32_t nice = 0;
    std::uint32_t priority = 0;
    std::uint64_t runtime = 0;
    std::uint64_t deadline = 0;
    std::uint64_t period = 0;
  };
  static constexpr std::uint64_t kSlice = 100'000;  // nanoseconds, the least there is
  Attributes before_;
  bool is_set_ = false;
};

}  // namespace tessera::comm
