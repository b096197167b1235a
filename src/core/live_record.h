// src/core/live_record.h — what a rank is doing, in a file that `tessera inspect` reads.
//
// The launcher names a file in its own folder (TESSERA_LIVE_FILE); the rank maps it and writes a
// few numbers where an operation begins, where it waits, and where it ends. Whoever looks reads the
// file: the rank is neither asked nor interrupted. Without the variable nothing is written. No
// LibTorch.
//
// For stacks the rank is asked, by a signal whose handler writes the frames of the thread it hits
// to a file beside the record. See Note [Stacks of a living rank].

#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <span>
#include <string_view>

namespace tessera::core {

inline constexpr const char* kLiveVariable = "TESSERA_LIVE_FILE";

/// Text of a fixed length that may be read while it is written: then it is a mixture.
template <std::size_t kSize>
class SharedText {
 public:
  void set(std::string_view text) noexcept {
    char bytes[kSize] = {};
    text.copy(bytes, kSize - 1);
    for (std::size_t i = 0; i < kSize / 8; ++i) {
      std::uint64_t word = 0;
      __builtin_memcpy(&word, bytes + 8 * i, 8);
      words_[i].store(word, std::memory_order_relaxed);
    }
  }
  void copy_to(char (&bytes)[kSize]) const noexcept {
    for (std::size_t i = 0; i < kSize / 8; ++i) {
      const std::uint64_t word = words_[i].load(std::memory_order_relaxed);
      __builtin_memcpy(bytes + 8 * i, &word, 8);
    }
    bytes[kSize - 1] = '\0';
  }

 private:
  static_assert(kSize % 8 == 0);
  std::atomic<std::uint64_t> words_[kSize / 8];
};

/// The operations of one kind, collectives or messages, of one group. Times are of the monotonic
/// clock, in nanoseconds.
struct LiveLane {
  std::atomic<std::int64_t> begin_ns;  // when the one under way began; 0: none is
  std::atomic<std::int64_t> end_ns;    // when the last one ended; 0: none has
  std::atomic<std::uint64_t> sequence;
  SharedText<24> operation;
  // As of the last look of a wait, every 20 ms; num_missing is 0 before.
  std::atomic<std::int32_t> num_missing;
  std::atomic<std::int32_t> missing[8];  // world ranks; the first of them
  SharedText<64> details;
};

struct LiveSlot {
  std::atomic<std::uint32_t> is_taken;
  SharedText<48> group;
  LiveLane collectives;
  LiveLane messages;
};

struct LiveRecord {
  static constexpr std::uint64_t kMagic = 0x0131657669737374;  // changes with the layout

  std::atomic<std::uint64_t> magic;  // written last
  std::int64_t pid;
  std::uint64_t start_time;  // of the process, in ticks: tells it from a later one of that number
  std::atomic<std::int64_t> step;  // -1: none was named
  std::atomic<std::int64_t> step_ns;
  LiveSlot slots[24];
};

/// A place in this process's record for a group; null if there is no record or no place in it.
LiveSlot* take_live_slot(std::string_view group) noexcept;
void give_back_live_slot(LiveSlot* slot) noexcept;
/// Notes the step in the record, if there is one.
void note_live_step(std::int64_t step) noexcept;

/// An operation, from here to the end of the scope. Does nothing without a lane.
class LiveOperation {
 public:
  LiveOperation(LiveLane* lane, std::string_view operation, std::uint64_t sequence) noexcept;
  ~LiveOperation();
  LiveOperation(const LiveOperation&) = delete;
  LiveOperation& operator=(const LiveOperation&) = delete;

 private:
  LiveLane* lane_;
  std::int64_t begin_ns_ = 0;
};

/// Notes whom the operation under way waits for, by world rank.
void note_live_wait(LiveLane& lane, std::span<const int> missing,
                    std::string_view details) noexcept;

/// Of a few milliseconds' precision: it is read twice in every operation, and a precise clock can
/// cost more than the rest.
inline std::int64_t live_clock_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

/// By which a rank is asked for the stack of a thread, and a Python program for its own.
inline int stack_signal() noexcept { return SIGRTMAX - 5; }
inline int python_stack_signal() noexcept { return SIGRTMAX - 6; }
/// Added to the record's name: the stack of one thread, then its number; all stacks of Python.
inline constexpr const char* kStackSuffix = ".stack.";
inline constexpr const char* kPythonStackSuffix = ".python";
/// The last line of a stack.
inline constexpr std::string_view kStackEnd = "end of stack\n";

}  // namespace tessera::core
