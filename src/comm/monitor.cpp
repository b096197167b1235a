#include "comm/monitor.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <thread>

#include "comm/rank_list.h"

namespace tessera::comm {
namespace {

constexpr auto kWarnAfter = std::chrono::seconds(5);
// A wait this long is no ordinary one: from here on the ranks tell each other where they are.
constexpr auto kRollCallAfter = std::chrono::seconds(1);
// How long a wait that is over may wait for the answer of the others, and how often it looks.
constexpr auto kRollCallLimit = std::chrono::milliseconds(250);
constexpr auto kRollCallLook = std::chrono::milliseconds(10);
constexpr int kNotWatched = -1;
constexpr int kDeadAlready = -2;
constexpr int kLookedAt = -3;

int open_pidfd(const Member& member) {
  const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, member.pid, 0));
  // Some sandboxes refuse the call, and there may be no descriptor left: /proc tells as well.
  if (descriptor < 0) return errno == ESRCH ? kDeadAlready : kLookedAt;
  // The pid may have been reused since the member wrote it down; the start time tells.
  if (process_start_time(member.pid) != member.start_time) {
    ::close(descriptor);
    return kDeadAlready;
  }
  return descriptor;
}

bool is_stopped(const Member& member) {
  const char state = process_state(member.pid);
  return state == 'T' || state == 't';
}

bool is_message(const Call& call) {
  return call.op == Operator::kSend || call.op == Operator::kRecv;
}

const Call& shown(const Call& call) { return call.whole != nullptr ? *call.whole : call; }

// Rounded down to tenths, from ten on to whole seconds.
std::string seconds(Clock::duration duration) {
  const auto tenths = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count() / 100;
  std::string text = std::to_string(tenths / 10);
  if (tenths < 100 && tenths % 10 != 0) text.append(".").append(std::to_string(tenths % 10));
  return text.append(" s");
}

const char* describe_state(char state) {
  switch (state) {
    case 'T':
    case 't':
      return "is stopped";
    case 'D':
      return "is blocked in the kernel";
    case 'Z':
    case 'X':
    case '\0':
      return "has ended";
    case 'R':
      return "is computing";
    default:
      return "is alive, waiting for something else";
  }
}

}  // namespace

Failure death_in_creation(const Member& member, int group_rank) {
  return {FailureKind::kPeerLost,
          {group_rank},
          "comm.init: " + member.describe() +
              " died while the ranks made a group. Look at that rank's own output for the reason."};
}

GroupMonitor::GroupMonitor(std::vector<Member> members, int rank, std::string group_name)
    : members_(std::move(members)), rank_(rank), group_name_(std::move(group_name)) {
  const Member& self = members_.at(rank);
  pidfds_.reserve(members_.size());
  live_ = core::take_live_slot(group_name_);
  for (const Member& member : members_) {
    const bool is_watchable = member.host == self.host && member.pid != self.pid;
    pidfds_.push_back(is_watchable ? open_pidfd(member) : kNotWatched);
  }
}

GroupMonitor::GroupMonitor(std::shared_ptr<GroupMonitor> whole, std::vector<int> ranks)
    : group_name_(whole->group_name()),
      pidfds_(ranks.size(), kNotWatched),
      whole_(std::move(whole)),
      ranks_(std::move(ranks)) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    members_.push_back(whole_->members()[ranks_[i]]);
    if (ranks_[i] == whole_->rank()) rank_ = static_cast<int>(i);
  }
}

GroupMonitor::~GroupMonitor() {
  core::give_back_live_slot(live_);
  for (const int descriptor : pidfds_) {
    if (descriptor >= 0) ::close(descriptor);
  }
}

bool GroupMonitor::is_dead(int group_rank) const {
  const int descriptor = pidfds_[group_rank];
  if (descriptor == kDeadAlready) return true;
  if (descriptor == kNotWatched) return false;
  if (descriptor != kLookedAt) {
    pollfd request{.fd = descriptor, .events = POLLIN, .revents = 0};
    if (::poll(&request, 1, 0) > 0) return true;
  }
  // A large process that was killed first gives back its memory, for up to a second.
  return has_ended(members_[group_rank]);
}

std::optional<Failure> GroupMonitor::find_death(const Call& call) const {
  if (whole_) return whole_->find_death(call);
  for (int group_rank = 0; group_rank < static_cast<int>(members_.size()); ++group_rank) {
    if (is_dead(group_rank)) return death_of(call, group_rank);
  }
  return std::nullopt;
}

std::vector<int> GroupMonitor::ranks_in_whole(std::span<const int> group_ranks) const {
  std::vector<int> ranks;
  for (const int group_rank : group_ranks) ranks.push_back(ranks_[group_rank]);
  return ranks;
}

void GroupMonitor::note_wait(const Call& part, std::span<const int> missing) const {
  if (live_ == nullptr) return;
  const Call& call = shown(part);
  std::string text;
  if (call.op != Operator::kBarrier) {
    text.append(name_of(call.dtype)).append(" [").append(std::to_string(call.count)).append("]");
  }
  std::vector<int> world_ranks;
  for (const int group_rank : missing) world_ranks.push_back(members_[group_rank].world_rank);
  core::note_live_wait(is_message(call) ? live_->messages : live_->collectives, world_ranks, text);
}

std::string GroupMonitor::title(const Call& call) {
  std::ostringstream text;
  text << "comm." << name_of(shown(call).op) << " #" << call.sequence;
  return text.str();
}

std::string GroupMonitor::details(const Call& part) const {
  const Call& call = shown(part);
  std::ostringstream text;
  text << '(';
  if (call.op != Operator::kBarrier) text << name_of(call.dtype) << " [" << call.count << "], ";
  text << "group '" << group_name_ << '\'';
  if (current_step() >= 0) text << ", step " << current_step();
  text << ')';
  return text.str();
}

Failure GroupMonitor::death_of(const Call& call, int group_rank) const {
  return {FailureKind::kPeerLost,
          {group_rank},
          title(call) + ": " + members_[group_rank].describe() + " died before it was done " +
              details(call) + ". Look at that rank's own output for the reason."};
}

std::string GroupMonitor::whereabouts(std::span<const int> missing) const {
  std::ostringstream text;
  for (const int group_rank : missing) {
    const Member& member = members_[group_rank];
    if (member.host != members_[rank_].host) {
      text << ' ' << "Rank" << member.describe().substr(4) << " is on another host.";
    } else if (member.pid != members_[rank_].pid) {
      text << " Rank" << member.describe().substr(4) << ' '
           << describe_state(process_state(member.pid)) << '.';
    }
  }
  return text.str();
}

// Messages are between two ranks; nobody else is there.
bool GroupMonitor::has_roll(const Call& call) const { return roll_call_ && !is_message(call); }

void GroupMonitor::await_roll(const Call& call) const {
  const auto limit = Clock::now() + kRollCallLimit;
  while (!roll_call_(call.sequence, true) && Clock::now() < limit) {
    // Another rank may be over as well, and have told.
    if (auto failure = poll_ ? poll_() : std::nullopt) throw std::move(*failure);
    std::this_thread::sleep_for(kRollCallLook);
  }
}

std::vector<int> GroupMonitor::find_late(const Call& call, std::span<const int> missing) const {
  if (has_roll(call)) {
    if (auto late = roll_call_(call.sequence, true); late && !late->empty()) return *late;
  }
  // Without a roll call, a rank that can be seen not to move is a better guess than all of them.
  std::vector<int> stopped;
  for (const int group_rank : missing) {
    const Member& member = members_[group_rank];
    if (member.host == members_[rank_].host && is_stopped(member)) stopped.push_back(group_rank);
  }
  return stopped.empty() ? std::vector<int>(missing.begin(), missing.end()) : stopped;
}

void GroupMonitor::check(const Call& call, std::span<const int> missing, Clock::duration waited) {
  if (whole_) return whole_->check(call, ranks_in_whole(missing), waited);
  for (const int group_rank : missing) {
    if (is_dead(group_rank)) throw death_of(call, group_rank);
  }
  check_limits(call, missing, waited);
}

void GroupMonitor::check_creation(std::span<const int> missing) {
  if (whole_) return whole_->check_creation(ranks_in_whole(missing));
  for (const int group_rank : missing) {
    if (is_dead(group_rank)) {
      throw death_in_creation(members_[group_rank], group_rank);
    }
  }
}

void GroupMonitor::check_limits(const Call& call, std::span<const int> missing,
                                Clock::duration waited) {
  if (whole_) return whole_->check_limits(call, ranks_in_whole(missing), waited);
  if (poll_) {
    if (auto failure = poll_()) throw std::move(*failure);
  }
  if (cancelled_.load(std::memory_order_acquire)) {
    throw Failure(FailureKind::kAborted, {rank_},
                  title(call) + ": rank " + std::to_string(members_[rank_].world_rank) +
                      " left the group before it was done " + details(call) + ".");
  }

  const bool is_over = Clock::now() >= call.deadline;
  note_wait(call, missing);
  // Short limits need an answer before they are over.
  const Clock::duration roll_after = call.limit.count() > 0
                                         ? std::min<Clock::duration>(kRollCallAfter, call.limit / 4)
                                         : kRollCallAfter;
  if (!is_over && waited < roll_after) {
    if (has_roll(call)) roll_call_(call.sequence, false);
    return;
  }
  if (is_over && has_roll(call)) await_roll(call);
  const std::vector<int> late = find_late(call, missing);
  note_wait(call, late);
  std::vector<int> world_ranks;
  for (const int group_rank : late) world_ranks.push_back(members_[group_rank].world_rank);
  if (is_over) {
    // The limit rather than the wait, which differs by the steps of the operation: ranks that
    // cannot ask each other any more should still say the same.
    const Clock::duration limit = call.limit.count() > 0 ? call.limit : waited;
    throw Failure(FailureKind::kTimeout, late,
                  title(call) + ": no answer from " + list_ranks(world_ranks) + " in " +
                      seconds(limit) + ' ' + details(call) + ". Timed out waiting." +
                      whereabouts(late));
  }
  if (waited >= kWarnAfter && warned_sequence_.exchange(call.sequence) != call.sequence) {
    std::fprintf(stderr, "[tessera] rank %d: %s: still waiting for %s after %s %s.%s\n",
                 members_[rank_].world_rank, title(call).c_str(), list_ranks(world_ranks).c_str(),
                 seconds(waited).c_str(), details(call).c_str(), whereabouts(late).c_str());
  }
}

}  // namespace tessera::comm
