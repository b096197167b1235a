// src/comm/monitor.h — decides when a wait for other ranks has to end.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/member.h"
#include "comm/transport.h"
#include "core/live_record.h"

namespace tessera::comm {

/// Watches the members of one group on behalf of one rank. Safe to share between threads.
class GroupMonitor final : public WaitMonitor {
 public:
  /// Asks for a failure that arrived by a way the transport does not see; called while waiting.
  using FailurePoll = std::function<std::optional<Failure>()>;
  /// Says that this rank waits in the collective with this number. If it `asks`, tells which ranks
  /// do not: those that have not arrived, or else that no longer move; nothing while that is not
  /// known.
  using RollCall = std::function<std::optional<std::vector<int>>(std::uint64_t, bool asks)>;

  GroupMonitor(std::vector<Member> members, int rank, std::string group_name);
  /// Watches the members `ranks` of `whole`, of which this process is one, and reports in the name
  /// of `whole`: by its ranks, its limits and its polls.
  GroupMonitor(std::shared_ptr<GroupMonitor> whole, std::vector<int> ranks);
  ~GroupMonitor() override;
  GroupMonitor(const GroupMonitor&) = delete;
  GroupMonitor& operator=(const GroupMonitor&) = delete;

  /// Throws Failure when a missing rank's process has ended, when the poll brings a failure, when
  /// the wait was cancelled, or when the deadline has passed. Warns once per call after 5 s.
  void check(const Call& call, std::span<const int> missing, Clock::duration waited) override;

  /// Throws Failure, the same on all ranks, when a missing rank's process has ended.
  void check_creation(std::span<const int> missing) override;

  /// As check, without looking for dead processes.
  void check_limits(const Call& call, std::span<const int> missing, Clock::duration waited);

  /// The failure to report if a member other than this rank has ended on this host: of the first
  /// one.
  std::optional<Failure> find_death(const Call& call) const;

  /// "comm.all_reduce #118".
  static std::string title(const Call& call);
  /// "(float32 [4096], group 'graph', step 17)".
  std::string details(const Call& call) const;

  /// Ends every wait of this rank: its group is being destroyed.
  void cancel() noexcept { cancelled_.store(true, std::memory_order_release); }
  /// Set before the first wait, and reset after the last.
  void set_poll(FailurePoll poll) { poll_ = std::move(poll); }
  void set_roll_call(RollCall roll_call) { roll_call_ = std::move(roll_call); }

  /// Where operations of the group are noted for those who look; null if nobody can.
  core::LiveLane* live_collectives() const noexcept {
    return live_ ? &live_->collectives : nullptr;
  }
  core::LiveLane* live_messages() const noexcept { return live_ ? &live_->messages : nullptr; }

  const std::vector<Member>& members() const noexcept { return members_; }
  const std::string& group_name() const noexcept { return group_name_; }
  int rank() const noexcept { return rank_; }

 private:
  bool is_dead(int group_rank) const;
  Failure death_of(const Call& call, int group_rank) const;
  bool has_roll(const Call& call) const;
  /// Waits a moment for the roll call of a wait that is over before it had an answer.
  void await_roll(const Call& call) const;
  /// Who is to blame for the wait: the missing ones, unless more is known.
  std::vector<int> find_late(const Call& call, std::span<const int> missing) const;
  std::string whereabouts(std::span<const int> missing) const;
  std::vector<int> ranks_in_whole(std::span<const int> group_ranks) const;
  void note_wait(const Call& call, std::span<const int> missing) const;

  std::vector<Member> members_;
  int rank_;
  std::string group_name_;
  // -1: not a process of this host, or this process itself; -2: dead already; -3: no descriptor
  std::vector<int> pidfds_;
  std::shared_ptr<GroupMonitor> whole_;  // null if this is one
  std::vector<int> ranks_;               // of the members in whole_
  core::LiveSlot* live_ = nullptr;
  FailurePoll poll_;
  RollCall roll_call_;
  std::atomic<bool> cancelled_{false};
  std::atomic<std::uint64_t> warned_sequence_{UINT64_MAX};
};

/// What is reported when a member dies before its group is there. Without the group's name: some
/// ranks may be at the next group already.
Failure death_in_creation(const Member& member, int group_rank);

/// The step named by comm::set_step, -1 if none.
std::int64_t current_step() noexcept;

}  // namespace tessera::comm
