#include "tessera/comm/leader.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::text_of;

TEST(Leader, ResultReachesAllRanks) {
  for (const int size : {1, 2, 3, 4}) {
    run_ranks(size, [&](const Group& group) {
      for (int leader = 0; leader < size; ++leader) {
        EXPECT_EQ(is_leader(group, leader), group.rank() == leader);
        int calls = 0;
        const int number = invoke_on_rank_and_broadcast_result(group, leader, [&] {
          ++calls;
          return 40 + group.rank();
        });
        EXPECT_EQ(number, 40 + leader);
        EXPECT_EQ(calls, group.rank() == leader ? 1 : 0);
        const std::string text = invoke_on_rank_and_broadcast_result(
            group, leader, [&] { return "from " + std::to_string(group.rank()); });
        EXPECT_EQ(text, "from " + std::to_string(leader));
        EXPECT_EQ(invoke_on_rank_and_broadcast_result(group, leader, [] { return std::string(); }),
                  "");
      }
    });
  }
}

TEST(Leader, LargeResultReachesAllRanks) {
  run_ranks(3, [](const Group& group) {
    const std::string text =
        invoke_on_rank_and_broadcast_result(group, 1, [] { return std::string(3'000'000, 'x'); });
    EXPECT_EQ(text.size(), 3'000'000U);
    EXPECT_EQ(text.find_first_not_of('x'), std::string::npos);
  });
}

TEST(Leader, RunOnLeaderTakesArguments) {
  run_ranks(3, [](const Group& group) {
    const auto add = run_on_leader(group, 2, [](int a, int b) { return a + b; });
    EXPECT_EQ(add(3, group.rank()), 3 + 2);  // the leader's arguments count
    EXPECT_EQ(add(1, 1), 2);
  });
}

TEST(Leader, ExceptionReachesAllRanksAndTheGroupStaysUsable) {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    run_ranks(
        3,
        [](const Group& group) {
          for (int i = 0; i < 3; ++i) {
            try {
              invoke_on_rank_and_broadcast_result(
                  group, 1, []() -> int { throw std::runtime_error("the disk is full"); });
              ADD_FAILURE() << "nothing was thrown";
            } catch (const Error& error) {
              EXPECT_NE(group.rank(), 1);
              EXPECT_EQ(error.kind(), ErrorKind::kPeerFailed);
              EXPECT_EQ(error.ranks(), std::vector<int>{1});
              EXPECT_STREQ(error.what(), "comm.invoke_on_rank: rank 1 raised: the disk is full");
            } catch (const std::runtime_error& error) {
              // Where it happened it is the exception itself.
              EXPECT_EQ(group.rank(), 1);
              EXPECT_STREQ(error.what(), "the disk is full");
            }
            at::Tensor ones = at::ones({1});
            all_reduce_(ones, group);
            EXPECT_EQ(ones.item<float>(), 3);
          }
        },
        tessera::testing::test_options(engine));
  }
}

TEST(Leader, OwnErrorsKeepTheirKind) {
  const auto errors = run_ranks_collecting(2, [](const Group& group) {
    invoke_on_rank_and_broadcast_result(group, 0, []() -> int {
      TESSERA_CHECK_VALUE(false, "reader: no file 'a'.");
      return 0;
    });
  });
  EXPECT_THROW(std::rethrow_exception(errors[0]), c10::ValueError);
  EXPECT_THROW(std::rethrow_exception(errors[1]), Error);
  EXPECT_EQ(text_of(errors[1]), "comm.invoke_on_rank: rank 0 raised: reader: no file 'a'.");
}

TEST(Leader, UnknownExceptionsReachAllRanksToo) {
  const auto errors = run_ranks_collecting(2, [](const Group& group) {
    invoke_on_rank_and_broadcast_result(group, 0, []() -> int { throw 5; });
  });
  EXPECT_THROW(std::rethrow_exception(errors[0]), int);
  EXPECT_EQ(text_of(errors[1]).rfind("comm.invoke_on_rank: rank 0 raised: ", 0), 0U);
}

TEST(Leader, WrongRankIsRefused) {
  const auto errors = run_ranks_collecting(2, [](const Group& group) {
    invoke_on_rank_and_broadcast_result(group, 2, [] { return 1; });
  });
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error), "comm.invoke_on_rank: 2 is not a rank of a group of 2.");
  }
}

}  // namespace
}  // namespace tessera::comm
