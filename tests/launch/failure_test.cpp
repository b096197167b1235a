#include "tessera/launch/failure.h"

#include <csignal>

#include <gtest/gtest.h>

namespace tessera::launch {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

RankFailure failed(int rank, int code, int64_t ended_ns) {
  RankFailure failure;
  failure.rank = rank;
  failure.pid = 1000 + rank;
  failure.exit_code = code;
  failure.ended_ns = ended_ns;
  failure.order = rank;
  return failure;
}

RankFailure reported(int rank, int code, int64_t error_ns, int64_t ended_ns) {
  RankFailure failure = failed(rank, code, ended_ns);
  failure.has_error_file = true;
  failure.error_ns = error_ns;
  failure.message = "error of " + std::to_string(rank);
  return failure;
}

TEST(RootCause, IsTheFirstToEndWithoutFiles) {
  EXPECT_EQ(root_cause({failed(0, 1, 30), failed(1, 2, 10), failed(2, 3, 20)}), 1U);
}

TEST(RootCause, IsTheEarliestErrorWhateverTheOrderOfEnds) {
  EXPECT_EQ(root_cause({reported(0, 1, 5 * kSecond + 2, 6 * kSecond),
                        reported(1, 1, 5 * kSecond + 1, 9 * kSecond)}),
            1U);
}

TEST(RootCause, IsNotARankThatReportsAPeer) {
  RankFailure survivor = reported(0, 75, 1, 2);
  survivor.is_secondary = true;
  EXPECT_EQ(root_cause({survivor, failed(1, 3, 100)}), 1U);
  EXPECT_EQ(root_cause({failed(0, 75, 1), failed(1, 3, 100)}), 1U);
}

TEST(RootCause, IsNotARankTheLauncherStopped) {
  RankFailure stopped = failed(0, 0, 1);
  stopped.signal_number = SIGTERM;
  stopped.was_stopped = true;
  EXPECT_EQ(root_cause({stopped, failed(1, 3, 100)}), 1U);
}

TEST(RootCause, WholeSecondsCountAsTheirEnd) {
  // Written in second 5 and ended at 5.9; the other died at 5.5.
  EXPECT_EQ(root_cause({reported(0, 1, 5 * kSecond, 5 * kSecond + kSecond * 9 / 10),
                        failed(1, 9, 5 * kSecond + kSecond / 2)}),
            1U);
  // Ended before the other died, so it was first all the same.
  EXPECT_EQ(root_cause({reported(0, 1, 5 * kSecond, 5 * kSecond + kSecond / 4),
                        failed(1, 9, 5 * kSecond + kSecond / 2)}),
            0U);
}

TEST(RootCause, IsAReportOfAPeerIfNothingElseIsKnown) {
  RankFailure survivor = reported(0, 75, 1, 2);
  survivor.is_secondary = true;
  EXPECT_EQ(root_cause({survivor}), 0U);
  EXPECT_EQ(exit_code_of(survivor), 75);
}

TEST(ExitCode, IsTheRanksOwnOr128PlusItsSignal) {
  EXPECT_EQ(exit_code_of(failed(0, 42, 1)), 42);
  RankFailure killed = failed(0, 0, 1);
  killed.signal_number = SIGSEGV;
  EXPECT_EQ(exit_code_of(killed), 139);
}

TEST(ExitCode, IsOneForAReportedErrorCutShortByTheLauncher) {
  RankFailure cut = reported(0, 0, 1, 2);
  cut.signal_number = SIGTERM;
  cut.was_stopped = true;
  EXPECT_EQ(exit_code_of(cut), 1);
}

TEST(Report, TravelsBetweenHosts) {
  RankFailure failure = reported(3, 0, 11, 22);
  failure.node = 1;
  failure.host = "b";
  failure.signal_number = SIGABRT;
  failure.was_stopped = true;
  failure.is_secondary = true;
  failure.callstack = "frame";
  failure.tail = "broken utf-8 \xff tail";
  const std::vector<RankFailure> back = failures_from_json(failures_to_json({failure}));
  ASSERT_EQ(back.size(), 1U);
  EXPECT_EQ(back[0].rank, 3);
  EXPECT_EQ(back[0].node, 1);
  EXPECT_EQ(back[0].host, "b");
  EXPECT_EQ(back[0].pid, 1003);
  EXPECT_EQ(back[0].signal_number, SIGABRT);
  EXPECT_EQ(back[0].error_ns, 11);
  EXPECT_EQ(back[0].ended_ns, 22);
  EXPECT_TRUE(back[0].was_stopped && back[0].is_secondary && back[0].has_error_file);
  EXPECT_EQ(back[0].message, "error of 3");
  EXPECT_EQ(back[0].callstack, "frame");
  EXPECT_THROW(failures_from_json("[{}]"), std::exception);
  EXPECT_THROW(failures_from_json("nonsense"), std::exception);
}

TEST(Report, SaysLikelyOutOfMemoryWhenTheKernelStruck) {
  RankFailure killed = failed(0, 0, 1);
  killed.signal_number = SIGKILL;
  ReportContext context;
  context.memory_kill_seen = true;
  EXPECT_NE(format_report({killed}, context).find("likely out of memory"), std::string::npos);
}

TEST(Report, KeepsItsWidthWithLongMessages) {
  RankFailure failure = reported(0, 1, 1, 2);
  for (int i = 0; i < 100; ++i) failure.message += "\xc3\xbc long";
  ReportContext context;
  context.world_size = 2;
  context.width = 80;
  const std::string text = format_report({failure}, context);
  const std::string row = text.substr(text.rfind('\n', text.size() - 2) + 1);
  EXPECT_LE(row.size(), 81U);
  EXPECT_EQ(row.substr(row.size() - 4), "...\n");
}

TEST(Report, NamesALostNode) {
  RankFailure lost;
  lost.node = 2;
  lost.exit_code = 75;
  lost.message = "its launcher is lost: no sign of life for 20 s";
  ReportContext context;
  context.world_size = 6;
  context.num_nodes = 3;
  const std::string text = format_report({lost}, context);
  EXPECT_EQ(text.find("error: node 2 failed first: its launcher is lost"), 0U);
}

}  // namespace
}  // namespace tessera::launch
