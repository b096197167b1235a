#include "dlrm/mapped_file.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "dlrm/click_log.h"
#include "support/sanitizers.h"

namespace tessera::workloads::dlrm {
namespace {

class MappedFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/mapped-XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    path_ = folder_ + "/clicks.bin";
    std::ofstream(path_, std::ios::binary) << std::string(3 * page_, 'x');
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  const std::size_t page_ = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::string folder_;
  std::string path_;
};

using MappedFileDeathTest = MappedFileTest;

char read_at(std::string_view bytes, std::size_t place) {
  return *const_cast<const volatile char*>(bytes.data() + place);
}

TEST_F(MappedFileDeathTest, AFileThatIsCutShortIsNamedWithBothSizes) {
  const MappedFile other(path_);  // of several, the right one
  const std::string second = folder_ + "/day \"2\".bin";
  std::ofstream(second, std::ios::binary) << std::string(2 * page_, 'y');
  const std::string report = folder_ + "/error.json";
  ::setenv("TORCHELASTIC_ERROR_FILE", report.c_str(), 1);
  const std::string expected = "day \"2\"\\.bin: was cut short while it was read: it had " +
                               std::to_string(2 * page_) + " bytes, and now has 10\\. Write";
  EXPECT_EXIT(
      {
        const MappedFile file(second);
        std::filesystem::resize_file(second, 10);
        if (read_at(file.bytes(), 5) != 'y') std::_Exit(1);  // what is there can be read
        std::_Exit(read_at(file.bytes(), page_ + 5));
      },
      ::testing::ExitedWithCode(65), expected);
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  std::ifstream file(report);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(text.find("day \\\"2\\\".bin: was cut short"), std::string::npos) << text;
  EXPECT_EQ(read_at(other.bytes(), 2 * page_), 'x');
}

TEST_F(MappedFileDeathTest, OtherBusErrorsAreAsBefore) {
  if (testing::kIsSanitized) GTEST_SKIP() << "the sanitizer takes the signal";
  const MappedFile file(path_);
  EXPECT_EXIT(
      {
        // A file of somebody else's that is mapped and cut.
        const int fd = ::memfd_create("other", 0);
        if (::ftruncate(fd, static_cast<off_t>(page_)) != 0) std::_Exit(1);
        void* data = ::mmap(nullptr, page_, PROT_READ, MAP_SHARED, fd, 0);
        if (::ftruncate(fd, 0) != 0) std::_Exit(1);
        std::_Exit(read_at({static_cast<char*>(data), page_}, 0));
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

TEST_F(MappedFileTest, PlacesAreGivenBack) {
  for (int i = 0; i < 3000; ++i) {
    const MappedFile file(path_);
    ASSERT_EQ(file.bytes().size(), 3 * page_);
  }
  EXPECT_THROW(MappedFile(folder_ + "/none"), DataError);
  EXPECT_THROW(MappedFile{folder_}, DataError);
}

}  // namespace
}  // namespace tessera::workloads::dlrm
