#include "comm/monitor.h"

#include <gtest/gtest.h>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/member.h"
#include "comm/rank_list.h"

namespace tessera::comm {

// The library's own lives beside the failure reports, which are not part of this test.
std::int64_t current_step() noexcept { return 17; }

namespace {

using namespace std::chrono_literals;

// A process that does nothing until it is told to.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      while (true) ::pause();
    }
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    ::waitpid(pid_, &status, WUNTRACED);
  }

 private:
  pid_t pid_;
};

Member member_of(int rank, pid_t pid) {
  Member member = this_process(rank);
  member.pid = pid;
  member.start_time = process_start_time(pid);
  member.host_name = "here";
  return member;
}

Call call_with(Clock::duration limit) {
  Call call;
  call.op = Operator::kAllReduce;
  call.dtype = DataType::kFloat32;
  call.count = 25;
  call.sequence = 118;
  call.deadline = Clock::now() + limit;
  return call;
}

std::string failure_of(GroupMonitor& monitor, const Call& call, std::vector<int> missing,
                       Clock::duration waited = 10ms) {
  try {
    monitor.check(call, missing, waited);
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

TEST(Member, SurvivesTheStore) {
  Member member = this_process(3);
  member.host_name = "node-7";
  member.gpus_for_nccl = 8;
  const Member copy = decode_member(encode(member));
  EXPECT_EQ(copy.world_rank, 3);
  EXPECT_EQ(copy.pid, ::getpid());
  EXPECT_EQ(copy.start_time, member.start_time);
  EXPECT_EQ(copy.host, member.host);
  EXPECT_EQ(copy.gpus_for_nccl, 8);
  EXPECT_EQ(copy.describe(), "rank 3 (pid " + std::to_string(::getpid()) + ", host node-7)");
  EXPECT_THROW(decode_member("not a record"), std::invalid_argument);
}

std::vector<Member> members_with(const std::vector<std::pair<std::string, int>>& hosts_and_gpus) {
  std::vector<Member> members;
  for (const auto& [host, gpus] : hosts_and_gpus) {
    Member member;
    member.world_rank = static_cast<int>(members.size());
    member.pid = 40 + member.world_rank;
    member.host = host;
    member.host_name = host;
    member.gpus_for_nccl = gpus;
    members.push_back(decode_member(encode(member)));  // as the others get it
  }
  return members;
}

TEST(Member, NcclWantsAGpuForEveryRankOfAHostSeenByAllOfThem) {
  using Hosts = std::vector<std::pair<std::string, int>>;
  const std::vector<Hosts> over_nccl{{{"a", 1}},
                                     {{"a", 2}, {"a", 2}},
                                     {{"a", 8}, {"a", 2}},
                                     // Hosts of different sizes: what counts is each one's own.
                                     {{"a", 2}, {"a", 2}, {"b", 1}}};
  for (const Hosts& hosts : over_nccl) {
    const CudaWay way = choose_cuda_way(members_with(hosts));
    EXPECT_TRUE(way.is_nccl);
    EXPECT_EQ(way.teller, -1);
  }
  // Nobody can use it, so nobody is surprised.
  for (const Hosts& hosts : {Hosts{{"a", 0}}, Hosts{{"a", 1}, {"a", 1}}}) {
    const CudaWay way = choose_cuda_way(members_with(hosts));
    EXPECT_FALSE(way.is_nccl);
    EXPECT_EQ(way.teller, -1);
  }
}

TEST(Member, RanksThatSeeDifferentGpusTakeOneWay) {
  const CudaWay uneven = choose_cuda_way(members_with({{"a", 1}, {"a", 2}}));
  EXPECT_FALSE(uneven.is_nccl);
  EXPECT_EQ(uneven.teller, 1);
  EXPECT_EQ(uneven.reason,
            "rank 0 (pid 40, host a) has 1 GPU for NCCL, and its host 2 ranks. Let every rank see "
            "all GPUs of its host (CUDA_VISIBLE_DEVICES).");
  const CudaWay without = choose_cuda_way(members_with({{"a", 1}, {"b", 0}}));
  EXPECT_FALSE(without.is_nccl);
  EXPECT_EQ(without.teller, 0);
  EXPECT_EQ(without.reason,
            "rank 1 (pid 41, host b) has 0 GPUs for NCCL, and its host 1 rank. Let every rank see "
            "all GPUs of its host (CUDA_VISIBLE_DEVICES), with the same TESSERA_ENGINE and a "
            "LibTorch with NCCL.");
}

TEST(Member, StartTimeAndStateComeFromTheSystem) {
  Child child;
  EXPECT_GT(process_start_time(child.pid()), 0U);
  EXPECT_GE(process_start_time(child.pid()), process_start_time(::getpid()));
  child.stop();
  EXPECT_EQ(process_state(child.pid()), 'T');
  const pid_t pid = child.pid();
  child.kill();
  EXPECT_EQ(process_start_time(pid), 0U);
  EXPECT_EQ(process_state(pid), '\0');
}

TEST(Member, HasEndedWhenAllItsThreadsHave) {
  Child child;
  const Member member = member_of(1, child.pid());
  EXPECT_FALSE(has_ended(member));
  child.stop();
  EXPECT_FALSE(has_ended(member));
  ::kill(child.pid(), SIGKILL);
  // Nobody waits for it yet: it stays as a zombie.
  const auto limit = Clock::now() + 5s;
  while (!has_ended(member) && Clock::now() < limit) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(has_ended(member));
  child.kill();
  EXPECT_TRUE(has_ended(member));
  Member earlier = this_process(0);
  EXPECT_FALSE(has_ended(earlier));
  earlier.start_time -= 1;
  EXPECT_TRUE(has_ended(earlier));
}

TEST(Member, LivesOnWithoutItsFirstThread) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::thread([] {
      while (true) ::pause();
    }).detach();
    // Ends this thread alone.
    ::syscall(SYS_exit, 0);
  }
  const Member member = member_of(1, pid);
  const auto limit = Clock::now() + 5s;
  while (process_state(pid) != 'Z' && Clock::now() < limit) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(process_state(pid), 'Z');
  EXPECT_FALSE(has_ended(member));
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  EXPECT_TRUE(has_ended(member));
}

TEST(Member, RanksAreListedForPeople) {
  EXPECT_EQ(list_ranks({2}), "rank 2");
  EXPECT_EQ(list_ranks({0, 1}), "ranks 0 and 1");
  EXPECT_EQ(list_ranks({0, 1, 3}), "ranks 0, 1 and 3");
}

TEST(GroupMonitor, DeathOfAMissingRankEndsTheWait) {
  Child child;
  const pid_t pid = child.pid();
  GroupMonitor monitor({member_of(0, ::getpid()), member_of(1, pid)}, 0, "graph");
  const Call call = call_with(10s);
  EXPECT_EQ(failure_of(monitor, call, {1}), "");
  child.kill();
  EXPECT_EQ(failure_of(monitor, call, {1}),
            "comm.all_reduce #118: rank 1 (pid " + std::to_string(pid) +
                ", host here) died before it was done (float32 [25], group 'graph', step 17). Look "
                "at that rank's own output for the reason.");
  ASSERT_TRUE(monitor.find_death(call));
  EXPECT_EQ(monitor.find_death(call)->ranks(), std::vector<int>{1});
  // A dead rank that nobody waits for is no reason to stop.
  EXPECT_EQ(failure_of(monitor, call, {}), "");
}

TEST(GroupMonitor, DeathWhileTheGroupIsMadeHasItsOwnWords) {
  Child child;
  const pid_t pid = child.pid();
  GroupMonitor monitor({member_of(0, ::getpid()), member_of(1, pid)}, 0, "graph");
  const std::vector<int> missing{1};
  EXPECT_NO_THROW(monitor.check_creation(missing));
  child.kill();
  try {
    monitor.check_creation(missing);
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.kind(), FailureKind::kPeerLost);
    EXPECT_EQ(failure.ranks(), missing);
    EXPECT_EQ(failure.what(), "comm.init: rank 1 (pid " + std::to_string(pid) +
                                  ", host here) died while the ranks made a group. Look at that "
                                  "rank's own output for the reason.");
  }
}

TEST(GroupMonitor, PidOfAnotherProcessCountsAsDead) {
  Child child;
  Member impostor = member_of(1, child.pid());
  impostor.start_time -= 1;  // the rank had this pid before the child got it
  GroupMonitor monitor({member_of(0, ::getpid()), impostor}, 0, "world");
  EXPECT_NE(failure_of(monitor, call_with(10s), {1}).find("rank 1 (pid "), std::string::npos);
}

TEST(GroupMonitor, DeadBeforeTheMonitorWasMade) {
  Child child;
  const Member gone = member_of(1, child.pid());
  child.kill();
  GroupMonitor monitor({member_of(0, ::getpid()), gone}, 0, "world");
  EXPECT_NE(failure_of(monitor, call_with(10s), {1}).find("died before it was done"),
            std::string::npos);
}

TEST(GroupMonitor, OtherHostsAreNotWatched) {
  Child child;
  Member far = member_of(1, child.pid());
  far.host = "another";
  child.kill();
  GroupMonitor monitor({member_of(0, ::getpid()), far}, 0, "world");
  EXPECT_EQ(failure_of(monitor, call_with(10s), {1}), "");
  EXPECT_FALSE(monitor.find_death(call_with(10s)));
}

TEST(GroupMonitor, LimitNamesTheMissingAndWhatTheyDo) {
  Child child;
  child.stop();
  Member far = member_of(2, child.pid());
  far.host = "another";
  far.host_name = "there";
  GroupMonitor monitor({member_of(0, ::getpid()), member_of(1, child.pid()), far}, 0, "world");
  const std::string pid = std::to_string(child.pid());
  EXPECT_EQ(failure_of(monitor, call_with(-1ms), {1}, 8s),
            "comm.all_reduce #118: no answer from rank 1 in 8 s (float32 [25], group 'world', step "
            "17). Timed out waiting. Rank 1 (pid " +
                pid + ", host here) is stopped.");
  EXPECT_EQ(
      failure_of(monitor, call_with(-1ms), {2}, 8500ms),
      "comm.all_reduce #118: no answer from rank 2 in 8.5 s (float32 [25], group 'world', step "
      "17). Timed out waiting. Rank 2 (pid " +
          pid + ", host there) is on another host.");
  // Of several suspects, the one that is seen not to move.
  EXPECT_NE(failure_of(monitor, call_with(-1ms), {1, 2}, 8s).find("no answer from rank 1 in"),
            std::string::npos);
}

TEST(GroupMonitor, RollCallKnowsBetter) {
  Child first;
  Child second;
  GroupMonitor monitor(
      {member_of(0, ::getpid()), member_of(1, first.pid()), member_of(2, second.pid())}, 0,
      "world");
  std::vector<std::uint64_t> asked;
  std::vector<std::uint64_t> told;
  monitor.set_roll_call([&](std::uint64_t sequence, bool asks) -> std::optional<std::vector<int>> {
    (asks ? asked : told).push_back(sequence);
    return std::vector<int>{2};
  });
  EXPECT_EQ(failure_of(monitor, call_with(10s), {1, 2}, 500ms), "");
  EXPECT_TRUE(asked.empty());
  EXPECT_EQ(told, std::vector<std::uint64_t>{118});  // for others, who may have waited longer
  EXPECT_EQ(failure_of(monitor, call_with(10s), {1, 2}, 2s), "");
  EXPECT_EQ(asked, std::vector<std::uint64_t>{118});
  EXPECT_NE(failure_of(monitor, call_with(-1ms), {1, 2}, 8s).find("no answer from rank 2 in 8 s"),
            std::string::npos);
}

// With a limit below the second after which others ask, all that Gloo has not heard of were named.
TEST(GroupMonitor, ShortLimitsCallTheRollInTime) {
  Child first;
  Child second;
  GroupMonitor monitor(
      {member_of(0, ::getpid()), member_of(1, first.pid()), member_of(2, second.pid())}, 0,
      "world");
  int num_asked = 0;
  monitor.set_roll_call([&](std::uint64_t, bool asks) -> std::optional<std::vector<int>> {
    num_asked += asks ? 1 : 0;
    return std::nullopt;
  });
  Call call = call_with(10s);
  call.limit = 400ms;
  EXPECT_EQ(failure_of(monitor, call, {1, 2}, 90ms), "");
  EXPECT_EQ(num_asked, 0);
  EXPECT_EQ(failure_of(monitor, call, {1, 2}, 100ms), "");
  EXPECT_EQ(num_asked, 1);
  // Over before there was an answer: it is waited for, a moment.
  call.deadline = Clock::now() - 1ms;
  monitor.set_roll_call([&](std::uint64_t, bool asks) -> std::optional<std::vector<int>> {
    num_asked += asks ? 1 : 0;
    if (num_asked < 6) return std::nullopt;
    return std::vector<int>{2};
  });
  EXPECT_NE(failure_of(monitor, call, {1, 2}, 400ms).find("no answer from rank 2 in 0.4 s"),
            std::string::npos);
}

TEST(GroupMonitor, WarnsOncePerCallAfterFiveSeconds) {
  Child child;
  GroupMonitor monitor({member_of(0, ::getpid()), member_of(1, child.pid())}, 0, "world");
  Call call = call_with(100s);
  ::testing::internal::CaptureStderr();
  failure_of(monitor, call, {1}, 4900ms);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ::testing::internal::CaptureStderr();
  failure_of(monitor, call, {1}, 5s);
  failure_of(monitor, call, {1}, 6s);
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(
      warning.rfind("[tessera] rank 0: comm.all_reduce #118: still waiting for rank 1 after 5 "
                    "s (float32 [25], group 'world', step 17). Rank 1 (pid ",
                    0),
      0U)
      << warning;
  EXPECT_EQ(warning.find("[tessera]", 1), std::string::npos) << "more than one line";
  call.sequence = 119;
  ::testing::internal::CaptureStderr();
  failure_of(monitor, call, {1}, 5s);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("#119"), std::string::npos);
}

TEST(GroupMonitor, PollAndCancelEndTheWait) {
  Child child;
  GroupMonitor monitor({member_of(0, ::getpid()), member_of(1, child.pid())}, 0, "world");
  monitor.set_poll(
      [] { return std::optional<Failure>(Failure(FailureKind::kPeerFailed, {1}, "from afar")); });
  EXPECT_EQ(failure_of(monitor, call_with(10s), {1}), "from afar");
  monitor.set_poll(nullptr);
  monitor.cancel();
  EXPECT_EQ(failure_of(monitor, call_with(10s), {1}),
            "comm.all_reduce #118: rank 0 left the group before it was done (float32 [25], group "
            "'world', step 17).");
}

TEST(GroupMonitor, APartReportsInTheNameOfTheWhole) {
  Child child;
  const auto whole = std::make_shared<GroupMonitor>(
      std::vector<Member>{member_of(10, ::getpid() + 100000), member_of(11, ::getpid()),
                          member_of(12, child.pid())},
      1, "world");
  GroupMonitor part(whole, {1, 2});
  EXPECT_EQ(part.rank(), 0);
  EXPECT_EQ(part.members().size(), 2U);
  const pid_t pid = child.pid();
  child.kill();
  const Call outer = call_with(10s);
  Call step = outer;
  step.op = Operator::kGather;
  step.dtype = DataType::kUInt8;
  step.whole = &outer;
  try {
    part.check(step, std::vector<int>{1}, 1ms);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Failure& failure) {
    // The operation the caller made, and the rank in the whole group.
    EXPECT_EQ(std::string(failure.what()),
              "comm.all_reduce #118: rank 12 (pid " + std::to_string(pid) +
                  ", host here) died before it was done (float32 [25], group 'world', step 17). "
                  "Look at that rank's own output for the reason.");
    EXPECT_EQ(failure.ranks(), std::vector<int>{2});
  }
  whole->cancel();
  EXPECT_THROW(part.check(step, std::vector<int>{0}, 1ms), Failure);
}

}  // namespace
}  // namespace tessera::comm
