#include "comm/obituary.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <future>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/side_thread.h"
#include "support/refused_threads.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

// A job of three ranks. One process plays them in turn: the words of each death are asked for once.
class Obituary : public ::testing::Test {
 protected:
  Member member(int rank) const { return {rank, 100 * job_ + rank, 7, "a", "a"}; }
  Failure death(int rank, const std::string& where) const {
    return {
        FailureKind::kPeerLost, {rank}, where + ": " + member(rank).describe() + " died there."};
  }
  // What `rank` tells of the death of `dead`.
  Failure told(int rank, int dead, const std::string& where) {
    remember_store(c10::make_intrusive<c10d::PrefixStore>("world", store_), member(rank));
    return in_first_words(death(dead, where), {{0, member(0)}, {1, member(1)}, {2, member(2)}});
  }

  c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  int job_ = [] {
    static int num_jobs = 0;
    return ++num_jobs;
  }();
};

TEST_F(Obituary, OneDeathHasOneText) {
  EXPECT_STREQ(told(1, 0, "comm.init").what(), death(0, "comm.init").what());
  // Asked of the store by another process, whose own words come later.
  EXPECT_EQ(store_->compareSet("tessera//0/death of " + member(0).describe(), {}, {'x'}).size(),
            std::string(death(0, "comm.init").what()).size());
}

TEST_F(Obituary, WhoEndsBecauseOfADeathIsNotNamed) {
  told(1, 0, "comm.all_reduce");
  const Failure second = told(2, 1, "comm.init");  // rank 1 has ended since
  EXPECT_STREQ(second.what(), death(0, "comm.all_reduce").what());
  EXPECT_EQ(second.ranks(), std::vector<int>{0});
  // And again, without the store.
  EXPECT_STREQ(told(2, 1, "comm.barrier").what(), death(0, "comm.all_reduce").what());
}

TEST_F(Obituary, WhoWentOnAfterADeathIsNamedByItsOwn) {
  told(1, 0, "comm.all_reduce");
  c10d::PrefixStore next("next group", store_);
  note_new_group(next);
  const Failure second = told(2, 1, "comm.barrier");
  EXPECT_STREQ(second.what(), death(1, "comm.barrier").what());
  EXPECT_EQ(second.ranks(), std::vector<int>{1});
}

// Whoever cannot ask for the first words tells its own, and asks again next time.
TEST_F(Obituary, WithoutAThreadADeathIsToldInOnesOwnWords) {
  EXPECT_STREQ(told(1, 0, "comm.init").what(), death(0, "comm.init").what());
  abandon_side_thread();
  {
    const tessera::testing::RefusedThread refused(1);
    EXPECT_STREQ(told(1, 2, "comm.barrier").what(), death(2, "comm.barrier").what());
    EXPECT_TRUE(refused.was_refused());
  }
  const Failure next = told(2, 1, "comm.init");
  EXPECT_STREQ(next.what(), death(0, "comm.init").what());
}

TEST(SideThread, OneThatWasRefusedIsNotWaitedFor) {
  abandon_side_thread();
  {
    const tessera::testing::RefusedThread refused(1);
    EXPECT_THROW(run_beside([] {}), Error);
  }
  auto end = run_beside([] {});
  EXPECT_EQ(end.wait_for(std::chrono::seconds(10)), std::future_status::ready);
}

TEST_F(Obituary, RanksThatNameEachOtherEndTheSearch) {
  told(1, 0, "comm.all_reduce");
  told(0, 1, "comm.init");
  EXPECT_EQ(told(2, 1, "comm.barrier").kind(), FailureKind::kPeerLost);
}

// The store of a launcher stays when the ranks are started anew, and in a container they have the
// numbers of before.
TEST_F(Obituary, DeathsOfAnotherAttemptAreNotThisOnes) {
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "1", 1);
  told(1, 0, "comm.all_reduce");
  ::setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
  const Failure again = told(2, 1, "comm.init");
  for (const char* name : {"RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"}) ::unsetenv(name);
  EXPECT_STREQ(again.what(), death(1, "comm.init").what());
  EXPECT_EQ(again.ranks(), std::vector<int>{1});
}

TEST_F(Obituary, OtherFailuresStayAsTheyAre) {
  remember_store(store_, member(1));
  const Failure late(FailureKind::kTimeout, {0}, "comm.barrier: rank 0 is late.");
  EXPECT_STREQ(in_first_words(late, {}).what(), late.what());
}

}  // namespace
}  // namespace tessera::comm
