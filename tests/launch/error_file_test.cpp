#include "tessera/core/error_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/launch/failure.h"

namespace tessera::core {
namespace {

class ErrorFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "error_file_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ + "/error.json";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  size_t num_files() const {
    const std::filesystem::directory_iterator begin(folder_);
    return static_cast<size_t>(std::distance(begin, {}));
  }

  std::string folder_;
  std::string path_;
};

TEST_F(ErrorFile, HasTorchrunsForm) {
  ASSERT_TRUE(write_error_file(path_.c_str(), {.message = "ValueError: x",
                                               .callstack = "a\nb",
                                               .timestamp_ns = 1'700'000'000'123'456'789}));
  EXPECT_EQ(content(),
            R"({"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "a\nb", )"
            R"("timestamp": "1700000000", "timestamp_ns": "1700000000123456789"}}})"
            "\n");
}

TEST_F(ErrorFile, IsReadBackWhateverTheTextHolds) {
  std::string message = "quote \" backslash \\ tab \t bell \a umlaut \xc3\xbc euro \xe2\x82\xac";
  message += std::string(5000, 'x');
  ASSERT_TRUE(write_error_file(path_.c_str(), {.message = message, .is_secondary = true}));
  launch::RankFailure failure;
  ASSERT_TRUE(launch::read_error_file(path_, failure));
  EXPECT_EQ(failure.message, message);
  EXPECT_TRUE(failure.is_secondary);
  EXPECT_TRUE(failure.has_error_file);
}

TEST_F(ErrorFile, BrokenUtf8IsReplacedSoThatTheFileStaysReadable) {
  const std::string message =
      "a\xff"
      "b\xc3"
      "c\xed\xa0\x80"
      "d\xf4\x90\x80\x80"
      "e\xc0\xaf"
      "f\xe2\x82";
  ASSERT_TRUE(write_error_file(path_.c_str(), {.message = message}));
  launch::RankFailure failure;
  ASSERT_TRUE(launch::read_error_file(path_, failure));
  EXPECT_EQ(failure.message, "a?b?c???d????e??f??");
}

TEST_F(ErrorFile, TimestampDefaultsToNow) {
  const int64_t before = time(nullptr);
  ASSERT_TRUE(write_error_file(path_.c_str(), {.message = "x"}));
  launch::RankFailure failure;
  ASSERT_TRUE(launch::read_error_file(path_, failure));
  EXPECT_GE(failure.error_ns / 1'000'000'000, before);
  EXPECT_LE(failure.error_ns / 1'000'000'000, time(nullptr));
}

TEST_F(ErrorFile, FirstReportWinsAndNothingElseIsLeft) {
  EXPECT_TRUE(write_error_file(path_.c_str(), {.message = "first"}));
  EXPECT_FALSE(write_error_file(path_.c_str(), {.message = "second"}));
  EXPECT_NE(content().find("first"), std::string::npos);
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(ErrorFile, OfManyThreadsExactlyOneWrites) {
  std::atomic<int> num_written{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const std::string message = "thread " + std::to_string(i);
      num_written += write_error_file(path_.c_str(), {.message = message}) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_written, 1);
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(ErrorFile, IsPrivateToTheUser) {
  ASSERT_TRUE(write_error_file(path_.c_str(), {.message = "x"}));
  const auto permissions = std::filesystem::status(path_).permissions();
  EXPECT_EQ(permissions & std::filesystem::perms::group_all, std::filesystem::perms::none);
  EXPECT_EQ(permissions & std::filesystem::perms::others_all, std::filesystem::perms::none);
}

TEST_F(ErrorFile, FolderThatDoesNotExistIsNotAnError) {
  EXPECT_FALSE(write_error_file((folder_ + "/no/such/error.json").c_str(), {.message = "x"}));
  EXPECT_FALSE(write_error_file(std::string(5000, 'p').c_str(), {.message = "x"}));
}

TEST_F(ErrorFile, GoesWhereTheLauncherSaid) {
  ASSERT_EQ(setenv("TORCHELASTIC_ERROR_FILE", path_.c_str(), 1), 0);
  EXPECT_TRUE(write_error_file({.message = "by variable"}));
  ASSERT_EQ(unsetenv("TORCHELASTIC_ERROR_FILE"), 0);
  EXPECT_FALSE(write_error_file({.message = "nowhere"}));
  EXPECT_NE(content().find("by variable"), std::string::npos);
}

TEST_F(ErrorFile, CanBeWrittenByASignalHandler) {
  static std::string path;
  path = path_;
  const pid_t pid = fork();
  if (pid == 0) {
    signal(SIGSEGV, [](int) {
      write_error_file(path.c_str(), {.message = "SIGSEGV in step 3"});
      _exit(7);
    });
    raise(SIGSEGV);
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_NE(content().find("SIGSEGV in step 3"), std::string::npos);
}

}  // namespace
}  // namespace tessera::core
