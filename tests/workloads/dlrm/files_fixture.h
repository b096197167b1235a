// tests/workloads/dlrm/files_fixture.h — a folder per test, and what is said of files in it.

#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "dlrm/click_log.h"
#include "dlrm/synthetic.h"

namespace tessera::workloads::dlrm {

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              ("dlrm-files-" + std::to_string(::getpid()) + "-" + test->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  static std::string read(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The error's text without the folder.
  std::string error(const std::function<void()>& work) const {
    try {
      work();
    } catch (const DataError& failure) {
      std::string text = failure.what();
      const auto at = text.find(folder_.string() + "/");
      if (at != std::string::npos) text.erase(at, folder_.string().size() + 1);
      return text;
    }
    return "";
  }
  std::filesystem::path folder_;
};

inline void expect_equal(const SampleBlock& a, const SampleBlock& b) {
  EXPECT_EQ(a.num_samples, b.num_samples);
  EXPECT_EQ(a.labels, b.labels);
  EXPECT_EQ(a.dense, b.dense);
  EXPECT_EQ(a.lengths, b.lengths);
  EXPECT_EQ(a.ids, b.ids);
}

/// A log whose features have one, any number of and three ids.
inline SyntheticOptions mixed_options() {
  SyntheticOptions options;
  options.schema = {3, {{"one", 50, 1}, {"any", 200, 0}, {"three", 1000, 3}}};
  options.num_samples = 1000;
  return options;
}

}  // namespace tessera::workloads::dlrm
