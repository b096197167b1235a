// src/comm/meeting.h — how the ranks of a group find each other on a store they share, or learn why
// they cannot. No threads, no clock and no LibTorch: the simulator runs it too.

#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/member.h"
#include "comm/shared_keys.h"
#include "comm/transport.h"

namespace tessera::comm {

/// One rank's part in one meeting. Ranks may meet again and again on one store; each time is a
/// generation. It has one outcome, the first that a rank writes down: all have met, or a failure,
/// which is then the same on all. So no rank goes on with others that have given up.
class Meeting {
 public:
  struct Terms {
    int rank = 0;
    int size = 1;
    std::string group_name;
    std::chrono::milliseconds limit{};
  };
  Meeting(Terms terms, Member self, Clock::time_point now);

  /// Takes this rank's place in the next generation. Once, before looking.
  void arrive(SharedKeys& keys);
  /// Looks whether all have come. To be called again after `pause` until it returns true.
  ///
  /// Throws Failure: kTimeout naming the ranks that did not come within the limit, kMismatch for a
  /// rank of two processes or for other sizes, kPeerLost for a death that a rank has told.
  bool look(SharedKeys& keys, Clock::time_point now);
  Clock::duration pause();

  /// How often the ranks met here before; nothing until this one has arrived.
  std::optional<std::int64_t> generation() const noexcept { return generation_; }
  /// Those who are known to have come, by rank. All, once `look` has returned true.
  const std::map<int, Member>& known() const noexcept { return known_; }

 private:
  bool take_place(SharedKeys& keys, Clock::time_point now);
  [[noreturn]] void refuse_place(SharedKeys& keys, const std::string& text) const;
  [[noreturn]] void refuse_size(SharedKeys& keys, int other, const std::string& theirs) const;
  void note(SharedKeys& keys);
  bool give_up(SharedKeys& keys) const;

  const Terms terms_;
  const Member self_;
  const Clock::time_point deadline_;
  std::optional<std::int64_t> generation_;
  bool has_place_ = false;
  std::vector<std::string> records_;  // the keys of all ranks of the generation
  std::map<int, Member> known_;
  Clock::time_point next_note_;
  std::chrono::microseconds pause_{100};
};

/// A rank has died while a group was being made: the death that all ranks tell, which is `mine` if
/// no rank has told another. Survivors end because of it, and would be taken for the cause by those
/// who look later. May be what else has ended the meeting of that generation.
Failure tell_death(SharedKeys& keys, std::optional<std::int64_t> generation, const Failure& mine);

/// Says that this rank, which had arrived, has read why the group cannot be made.
void say_farewell(SharedKeys& keys);
/// Whether all who have arrived have said so: until then the store should stay.
bool is_everybody_told(SharedKeys& keys);

}  // namespace tessera::comm
