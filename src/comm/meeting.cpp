#include "comm/meeting.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "comm/failure_agreement.h"
#include "comm/rank_list.h"

namespace tessera::comm {
namespace {

constexpr const char* kArrivalsKey = "arrivals";
constexpr const char* kFarewellKey = "farewell";
constexpr const char* kLostKey = "lost";
constexpr std::chrono::milliseconds kLongestPause{20};
// How often those who have come are written down, so that their deaths can be seen.
constexpr std::chrono::milliseconds kNoteInterval{250};

std::string place_of(std::int64_t generation) {
  return "generation/" + std::to_string(generation) + "/";
}
std::string record_key(std::int64_t generation, int rank) {
  return place_of(generation) + "member/" + std::to_string(rank);
}
std::string outcome_key(std::int64_t generation) { return place_of(generation) + "outcome"; }

// An outcome is either of these: this many have met, or a failure, which begins with a digit.
constexpr std::string_view kMet = "met ";
std::string met(int size) { return std::string(kMet) + std::to_string(size); }
bool is_met(const std::string& outcome) { return outcome.starts_with(kMet); }

// Makes `failure` the outcome, unless there is one; returns what those who have not met are told.
Failure settle(SharedKeys& keys, std::int64_t generation, const Failure& failure) {
  const std::string outcome = keys.claim(outcome_key(generation), encode(failure));
  return is_met(outcome) ? failure : decode_failure(outcome);
}

bool is_same(const Member& a, const Member& b) {
  return a.pid == b.pid && a.start_time == b.start_time && a.host == b.host;
}

}  // namespace

Meeting::Meeting(Terms terms, Member self, Clock::time_point now)
    : terms_(std::move(terms)),
      self_(std::move(self)),
      deadline_(now + terms_.limit),
      next_note_(now + kNoteInterval) {}

void Meeting::arrive(SharedKeys& keys) {
  keys.add(kArrivalsKey, 1);
  generation_ = keys.add("claim/" + std::to_string(terms_.rank), 1) - 1;
  for (int rank = 0; rank < terms_.size; ++rank) {
    records_.push_back(record_key(*generation_, rank));
  }
}

bool Meeting::look(SharedKeys& keys, Clock::time_point now) {
  if (!has_place_ && !take_place(keys, now)) return false;
  const std::string key = outcome_key(*generation_);
  if (keys.has_all(records_)) {
    note(keys);
    for (int other = 0; other < terms_.size; ++other) {
      const std::string theirs = keys.get(record_key(*generation_, other) + "/size");
      if (theirs != std::to_string(terms_.size)) refuse_size(keys, other, theirs);
    }
    // Others may have given up a moment ago.
    const std::string outcome = keys.claim(key, met(terms_.size));
    if (is_met(outcome)) return true;
    throw decode_failure(outcome);
  }
  if (keys.has(key)) {
    const std::string outcome = keys.get(key);
    if (outcome == met(terms_.size)) return false;  // the last record has come since
    if (is_met(outcome)) refuse_size(keys, 0, outcome.substr(kMet.size()));
    throw decode_failure(outcome);
  }
  if (now >= next_note_) {
    next_note_ = now + kNoteInterval;
    note(keys);
  }
  return now >= deadline_ && give_up(keys);
}

Clock::duration Meeting::pause() {
  return std::exchange(pause_, std::min<std::chrono::microseconds>(pause_ * 2, kLongestPause));
}

// Writes down who this rank is, if it was the same process each time before; false if that is not
// known yet.
bool Meeting::take_place(SharedKeys& keys, Clock::time_point now) {
  const std::string rank = std::to_string(terms_.rank);
  if (*generation_ > 0) {
    const std::int64_t before = *generation_ - 1;
    const std::string record = record_key(before, terms_.rank);
    if (!keys.has(record)) {
      // Whoever took the place then was refused, or is about to write.
      if (keys.has(outcome_key(before))) {
        const std::string outcome = keys.get(outcome_key(before));
        if (!is_met(outcome)) refuse_place(keys, decode_failure(outcome).what());
      }
      if (now < deadline_) return false;
      refuse_place(keys, "comm.init: rank " + rank +
                             " is claimed by another process too, which has not said who it is. "
                             "Give every process its own RANK.");
    }
    const Member earlier = decode_member(keys.get(record));
    if (!is_same(earlier, self_)) {
      refuse_place(keys, "comm.init: two processes claim rank " + rank + ": pid " +
                             std::to_string(earlier.pid) + " on host " + earlier.host_name +
                             " and pid " + std::to_string(self_.pid) + " on host " +
                             self_.host_name + ". Give every process its own RANK.");
    }
  }
  const std::string own = record_key(*generation_, terms_.rank);
  keys.set(own + "/size", std::to_string(terms_.size));
  keys.set(own, encode(self_));
  has_place_ = true;
  return true;
}

// For those who wait for the other process in the generation before, and for those who would wait
// for this one in its own.
void Meeting::refuse_place(SharedKeys& keys, const std::string& text) const {
  const Failure failure(FailureKind::kMismatch, {}, text);
  throw settle(keys, *generation_, settle(keys, *generation_ - 1, failure));
}

void Meeting::refuse_size(SharedKeys& keys, int other, const std::string& theirs) const {
  throw settle(keys, *generation_,
               Failure(FailureKind::kMismatch, {},
                       "comm.init: rank " + std::to_string(terms_.rank) + " expects " +
                           std::to_string(terms_.size) + " ranks, rank " + std::to_string(other) +
                           " expects " + theirs + ". Give every process the same WORLD_SIZE."));
}

void Meeting::note(SharedKeys& keys) {
  for (int rank = 0; rank < terms_.size; ++rank) {
    const std::string& key = records_[static_cast<std::size_t>(rank)];
    if (!known_.contains(rank) && keys.has(key)) known_.emplace(rank, decode_member(keys.get(key)));
  }
}

// False if all have come at the last moment.
bool Meeting::give_up(SharedKeys& keys) const {
  std::vector<int> missing;
  for (int rank = 0; rank < terms_.size; ++rank) {
    if (!keys.has(records_[static_cast<std::size_t>(rank)])) missing.push_back(rank);
  }
  if (missing.empty()) return false;
  const Failure failure(
      FailureKind::kTimeout, missing,
      "comm.init: " + list_ranks(missing) + " of " + std::to_string(terms_.size) +
          " did not join group '" + terms_.group_name + "' within " +
          std::to_string(static_cast<double>(terms_.limit.count()) / 1000.0).substr(0, 5) +
          " s. Check that all ranks were started with the same WORLD_SIZE, MASTER_ADDR and "
          "MASTER_PORT.");
  const std::string outcome = keys.claim(outcome_key(*generation_), encode(failure));
  if (is_met(outcome)) return false;
  throw decode_failure(outcome);
}

Failure tell_death(SharedKeys& keys, std::optional<std::int64_t> generation, const Failure& mine) {
  const Failure first = decode_failure(keys.claim(kLostKey, encode(mine)));
  return generation ? settle(keys, *generation, first) : first;
}

void say_farewell(SharedKeys& keys) { keys.add(kFarewellKey, 1); }

bool is_everybody_told(SharedKeys& keys) {
  return keys.add(kFarewellKey, 0) >= keys.add(kArrivalsKey, 0);
}

}  // namespace tessera::comm
