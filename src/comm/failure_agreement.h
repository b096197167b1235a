// src/comm/failure_agreement.h — how the ranks of a group come to one reason why it ended, and to
// whom they wait for, through a store they share. No threads and no LibTorch: the simulator runs it
// too.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/shared_keys.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Failures as text, for the store and for letters.
std::string encode(const Failure& failure);
Failure decode_failure(const std::string& text);

/// One rank's part. What a rank wants from the store is noted at once and done as one errand, by
/// whoever has the time: take, run, settle. Not thread-safe; `run` may be beside the others.
class FailureAgreement {
 public:
  FailureAgreement(int rank, int size) : rank_(rank), size_(size) {}

  /// What the next errand is to do.
  struct Errand {
    std::optional<Failure> to_publish;
    std::optional<std::uint64_t> waits_in;  // the collective in which this rank waits
    bool asks = false;                      // it wants to know who else does
    bool to_inquire = false;
  };
  /// What it found.
  struct Tidings {
    std::optional<Failure> failure;
    bool has_inquiry = false;
    std::optional<std::vector<int>> roll;
  };

  // Wishes. See FailureChannel, which has the same verbs.
  void publish(const Failure& failure);
  void poll(Clock::time_point now);
  void inquire();
  std::optional<std::vector<int>> call_roll(std::uint64_t sequence, bool asks);
  /// The store has not answered: what this rank wanted to publish is what it goes by.
  void give_up();
  /// What the other ranks are to be told by letter; there is a failure.
  std::string letter() const;
  /// A letter of another rank. One that the store had not settled is settled first, as if this rank
  /// had seen the failure itself. Returns whether somebody should run an errand.
  bool hear(const std::string& letter);

  bool has_errand() const noexcept { return to_publish_ || has_poll_; }
  Errand take();
  /// Throws what the store throws; the errand is then settled without tidings. One at a time.
  Tidings run(const Errand& errand, SharedKeys& keys,
              const std::function<Clock::time_point()>& now);
  void settle(const Errand& errand, std::optional<Tidings> tidings);

  const std::optional<Failure>& known() const noexcept { return failure_; }
  bool has_inquiry() const noexcept { return has_inquiry_; }

 private:
  std::optional<std::vector<int>> ask_roll(std::uint64_t sequence, SharedKeys& keys,
                                           const std::function<Clock::time_point()>& now);
  void answer(std::uint64_t sequence, SharedKeys& keys);

  const int rank_;
  const int size_;
  std::optional<Failure> failure_;
  bool is_settled_ = false;  // by the store, so that all ranks have the same
  std::optional<Failure> to_publish_;
  bool has_poll_ = false;
  bool to_inquire_ = false;
  bool has_inquiry_ = false;
  std::optional<std::uint64_t> waits_in_;  // taken by the next errand
  bool asks_ = false;
  std::optional<std::uint64_t> roll_sequence_;  // what roll_ is about
  std::vector<int> roll_;                       // ranks that are late there
  Clock::time_point next_poll_{};
  // Of errands alone: how often this rank has said that it waits, what it has asked about and since
  // when, and what it last heard.
  std::uint64_t num_beats_ = 0;
  std::optional<std::uint64_t> asked_about_;
  Clock::time_point asked_since_{};
  struct Word {
    std::string text;
    Clock::time_point since{};
  };
  std::vector<Word> heard_;
};

}  // namespace tessera::comm
