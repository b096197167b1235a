#include "comm/monitor.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <sstream>

namespace tessera::comm {
namespace {

constexpr auto kWarnAfter = std::chrono::seconds(5);
constexpr int kNotWatched = -1;
constexpr int kDeadAlready = -2;

int open_pidfd(const Member& member) {
  const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, member.pid, 0));
  if (descriptor < 0) return errno == ESRCH ? kDeadAlready : kNotWatched;
  // The pid may have been reused since the member wrote it down; the start time tells.
  if (process_start_time(member.pid) != member.start_time) {
    ::close(descriptor);
    return kDeadAlready;
  }
  return descriptor;
}

std::string seconds(Clock::duration duration) {
  std::ostringstream text;
  text.precision(3);
  text << std::chrono::duration<double>(duration).count() << " s";
  return text.str();
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

GroupMonitor::GroupMonitor(std::vector<Member> members, int rank, std::string group_name)
    : members_(std::move(members)), rank_(rank), group_name_(std::move(group_name)) {
  const Member& self = members_.at(rank);
  pidfds_.reserve(members_.size());
  for (const Member& member : members_) {
    const bool is_watchable = member.host == self.host && member.pid != self.pid;
    pidfds_.push_back(is_watchable ? open_pidfd(member) : kNotWatched);
  }
}

GroupMonitor::~GroupMonitor() {
  for (const int descriptor : pidfds_) {
    if (descriptor >= 0) ::close(descriptor);
  }
}

bool GroupMonitor::is_dead(int group_rank) const {
  const int descriptor = pidfds_[group_rank];
  if (descriptor == kDeadAlready) return true;
  if (descriptor == kNotWatched) return false;
  pollfd request{.fd = descriptor, .events = POLLIN, .revents = 0};
  return ::poll(&request, 1, 0) > 0;
}

std::optional<int> GroupMonitor::find_dead() const {
  for (int group_rank = 0; group_rank < static_cast<int>(members_.size()); ++group_rank) {
    if (is_dead(group_rank)) return group_rank;
  }
  return std::nullopt;
}

std::string GroupMonitor::title(const Call& call) {
  std::ostringstream text;
  text << "comm." << name_of(call.op) << " #" << call.sequence;
  return text.str();
}

std::string GroupMonitor::details(const Call& call) const {
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

void GroupMonitor::check(const Call& call, std::span<const int> missing, Clock::duration waited) {
  for (const int group_rank : missing) {
    if (is_dead(group_rank)) throw death_of(call, group_rank);
  }
  check_limits(call, missing, waited);
}

void GroupMonitor::check_limits(const Call& call, std::span<const int> missing,
                                Clock::duration waited) {
  if (poll_) {
    if (auto failure = poll_()) throw std::move(*failure);
  }
  if (cancelled_.load(std::memory_order_acquire)) {
    throw Failure(FailureKind::kAborted, {rank_},
                  title(call) + ": rank " + std::to_string(members_[rank_].world_rank) +
                      " left the group before it was done " + details(call) + ".");
  }

  std::vector<int> late;
  for (const int group_rank : missing) late.push_back(members_[group_rank].world_rank);
  if (Clock::now() >= call.deadline) {
    throw Failure(FailureKind::kTimeout, {missing.begin(), missing.end()},
                  title(call) + ": no answer from " + list_ranks(late) + " in " + seconds(waited) +
                      ' ' + details(call) + "." + whereabouts(missing));
  }
  if (waited >= kWarnAfter && warned_sequence_.exchange(call.sequence) != call.sequence) {
    std::fprintf(stderr, "[tessera] rank %d: %s: still waiting for %s after %s %s.%s\n",
                 members_[rank_].world_rank, title(call).c_str(), list_ranks(late).c_str(),
                 seconds(waited).c_str(), details(call).c_str(), whereabouts(missing).c_str());
  }
}

}  // namespace tessera::comm
