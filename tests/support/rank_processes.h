// tests/support/rank_processes.h — ranks that are processes: the test program starts itself again.
//
// For what threads cannot stand in for: LibTorch runs the backward of all threads of a process on
// one thread per GPU, so ranks that are threads cannot meet in a collective there.

#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/group.h"

extern char** environ;

namespace tessera::testing {

/// Runs `body` in `size` processes. A test may call it several times with the same size: the first
/// call starts the processes, each runs the whole test, and the others do nothing here.
class RankProcesses {
 public:
  void run(int size, const std::function<void(const comm::Group&)>& body,
           const comm::GroupOptions& options) {
    const char* rank = std::getenv("TESSERA_TEST_RANK");
    if (rank != nullptr) {
      const std::string prefix = "call" + std::to_string(num_calls_++);
      // Kept: a file store that is closed and opened again forgets who is there.
      static const auto store = c10::make_intrusive<c10d::FileStore>(
          std::string(std::getenv("TESSERA_TEST_STORE")), size);
      body(comm::make_group(c10::make_intrusive<c10d::PrefixStore>(prefix, store), std::atoi(rank),
                            size, options));
    } else if (num_calls_++ == 0) {
      start(size);
    }
  }

 private:
  static void start(int size) {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string filter = "--gtest_filter=";
    filter.append(test->test_suite_name()).append(".").append(test->name());
    std::string folder = (std::filesystem::temp_directory_path() / "tessera-ranks-XXXXXX").string();
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    std::vector<pid_t> children;
    for (int rank = 0; rank < size; ++rank) {
      std::string rank_word = "TESSERA_TEST_RANK=" + std::to_string(rank);
      std::string store_word = "TESSERA_TEST_STORE=";
      store_word.append(folder).append("/store");
      std::vector<char*> environment{rank_word.data(), store_word.data()};
      for (char** word = environ; *word != nullptr; ++word) environment.push_back(*word);
      environment.push_back(nullptr);
      std::string name = "rank";
      std::vector<char*> words{name.data(), filter.data(), nullptr};
      pid_t child = 0;
      ASSERT_EQ(
          posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, words.data(), environment.data()),
          0);
      children.push_back(child);
    }
    for (int rank = 0; rank < size; ++rank) {
      int status = 0;
      waitpid(children[rank], &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << "rank " << rank << " ended with "
          << (WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                                  : "exit code " + std::to_string(WEXITSTATUS(status)));
    }
    std::filesystem::remove_all(folder);
  }

  int num_calls_ = 0;
};

}  // namespace tessera::testing
