// The n-th read, allocation, descriptor or thread fails: a load says so or gets over it, never
// loads an older checkpoint for it, and a save leaves what was there.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <new>
#include <optional>

#include "checkpoint/samples.h"
#include "support/refused_threads.h"

namespace {

// The destructor of the JSON library allocates a list of its values, of 16 bytes each, and nothing
// can catch it there. So small allocations of such sizes do not fail; all others do.
bool is_counted(std::size_t num_bytes) { return num_bytes >= 1024 || num_bytes % 16 != 0; }

// Allocations of this thread until one fails; none does while it is 0.
thread_local std::int64_t allocations_left = 0;
std::atomic<bool> is_any_thread = false;
std::atomic<std::int64_t> all_left = 0;

void* allocate(std::size_t num_bytes) {
  if (is_counted(num_bytes) &&
      (is_any_thread ? --all_left == 0 : allocations_left > 0 && --allocations_left == 0)) {
    throw std::bad_alloc();
  }
  void* memory = std::malloc(num_bytes == 0 ? 1 : num_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t num_bytes) { return allocate(num_bytes); }
void* operator new[](std::size_t num_bytes) { return allocate(num_bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace tessera::checkpoint::testing {
namespace {

using tessera::testing::RefusedThread;

// Lets calls that read fail, from the n-th on, so many of them.
class BadReads final : public Disk {
 public:
  std::int64_t fail_at = 0;
  std::int64_t num_failures = 1;
  int number = EIO;
  std::atomic<std::int64_t> num_calls = 0;
  std::atomic<int> num_pauses = 0;

  int open(int parent, const std::string& name, int flags) override {
    return refused() ? -1 : Disk::open(parent, name, flags);
  }
  ssize_t read(int fd, void* data, std::size_t num_bytes, std::uint64_t begin) override {
    return refused() ? -1 : Disk::read(fd, data, num_bytes, begin);
  }
  void pause(int) override { ++num_pauses; }

 private:
  bool refused() {
    const std::int64_t call = ++num_calls;
    const bool is_refused = call >= fail_at && call < fail_at + num_failures;
    if (is_refused) errno = number;
    return is_refused;
  }
};

int num_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(all, {}));
}

void load_newest(const std::string& root, Disk& disk) {
  const Found found = find_newest(root, INT64_MAX, {}, disk);
  ASSERT_NE(found.reader, nullptr);
  ASSERT_TRUE(found.warnings.empty()) << found.warnings[0];
  ASSERT_EQ(found.reader->manifest().step, 2);
  found.reader->verify();
  expect_sample(*found.reader);
}

std::optional<ErrorKind> kind_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.kind();
  }
  return std::nullopt;
}

TEST(Reads, OneFailureIsGotOver) {
  const TemporaryFolder root;
  for (const int step : {1, 2}) save_sample(root.path(), step);
  for (const int number : {EIO, EMFILE, ENFILE, ENOMEM, EINTR, EAGAIN}) {
    for (std::int64_t n = 1;; ++n) {
      ASSERT_LT(n, 1000);
      BadReads disk;
      disk.fail_at = n;
      disk.number = number;
      load_newest(root.path(), disk);
      if (disk.num_calls < n) break;
      EXPECT_EQ(disk.num_pauses, 1);
    }
  }
}

TEST(Reads, FailuresThatStayAreNoDamageAndLoadNothingOlder) {
  const TemporaryFolder root;
  for (const int step : {1, 2}) save_sample(root.path(), step);
  const int before = num_descriptors();
  for (const int number : {EIO, EMFILE, EACCES}) {
    for (std::int64_t n = 1;; ++n) {
      ASSERT_LT(n, 1000);
      BadReads disk;
      disk.fail_at = n;
      disk.num_failures = number == EACCES ? 1 : 4;
      disk.number = number;
      const auto kind = kind_of([&] { load_newest(root.path(), disk); });
      if (disk.num_calls < n) break;
      EXPECT_EQ(kind, ErrorKind::kRead) << n;
    }
  }
  EXPECT_EQ(num_descriptors(), before);
  BadReads disk;
  disk.fail_at = 1;
  disk.num_failures = 1000;
  EXPECT_EQ(error_of([&] { Reader reader(root.path(), 2, disk); }),
            root.path() +
                ": cannot be read: Input/output error. Nothing is known to be wrong with it: try "
                "again.");
}

TEST(Reads, FailuresDuringASaveLeaveTheOldOnes) {
  const TemporaryFolder root;
  save_sample(root.path(), 1);
  for (std::int64_t n = 1;; ++n) {
    ASSERT_LT(n, 1000);
    BadReads disk;
    disk.fail_at = n;
    disk.num_failures = 4;
    const auto kind = kind_of([&] { save_sample(root.path(), 2, 1, disk); });
    const Found found = find_newest(root.path());
    ASSERT_NE(found.reader, nullptr);
    ASSERT_TRUE(found.warnings.empty()) << found.warnings[0];
    expect_sample(*found.reader);
    if (disk.num_calls < n) {
      EXPECT_EQ(kind, std::nullopt);
      break;
    }
    EXPECT_TRUE(!kind || *kind == ErrorKind::kRead) << n;
    std::filesystem::remove_all(root / "step-000000000002");
    save_sample(root.path(), 1);
  }
}

TEST(Reads, AFileThatIsCutWhileOpenIsDamage) {
  const TemporaryFolder root;
  save_sample(root.path(), 2);
  const Reader reader(root.path(), 2);
  for (const auto& entry : std::filesystem::directory_iterator(root / "step-000000000002")) {
    std::filesystem::resize_file(entry.path(), 0);
  }
  EXPECT_TRUE(error_of([&] { reader.verify(); }).ends_with(": ends too early."));
  EXPECT_EQ(kind_of([&] { expect_sample(reader); }), ErrorKind::kCorrupt);
}

// Whatever `body` has no memory for, it ends with std::bad_alloc or an Error, and holds nothing.
template <typename Body, typename After>
void fail_every_allocation(bool in_any_thread, const Body& body, const After& after) {
  const int before = num_descriptors();
  for (std::int64_t n = 1;; ++n) {
    ASSERT_LT(n, 100'000);
    bool is_clean = false;
    all_left = allocations_left = n;
    is_any_thread = in_any_thread;
    try {
      body();
    } catch (const std::bad_alloc&) {
    } catch (const Error&) {
    }
    is_any_thread = false;
    is_clean = in_any_thread ? all_left > 0 : allocations_left > 0;
    allocations_left = 0;
    after();
    ASSERT_EQ(num_descriptors(), before) << n;
    if (!is_clean) continue;
    EXPECT_GT(n, 5);  // there was something to fail
    return;
  }
}

// A thread that cannot be had is work for the others.
TEST(Threads, EveryOneOfALoadMayBeRefused) {
  const TemporaryFolder root;
  for (const int step : {1, 2}) save_sample(root.path(), step);
  for (std::int64_t n = 1;; ++n) {
    ASSERT_LT(n, 100);
    const RefusedThread refused(n);
    BadReads disk;
    disk.fail_at = INT64_MAX / 2;
    load_newest(root.path(), disk);
    if (refused.was_refused()) continue;
    EXPECT_GT(n, 1);  // there was one to refuse
    break;
  }
}

TEST(Allocations, EveryOneOfALoadMayFail) {
  const TemporaryFolder root;
  for (const int step : {1, 2}) save_sample(root.path(), step);
  for (const bool in_any_thread : {false, true}) {
    fail_every_allocation(
        in_any_thread,
        [&] {
          const Found found = find_newest(root.path());
          found.reader->verify();
          // An older one would be a silent loss.
          if (found.reader->manifest().step != 2 || !found.warnings.empty()) ::abort();
        },
        [] {});
  }
}

TEST(Allocations, EveryOneOfASaveMayFail) {
  const TemporaryFolder root;
  save_sample(root.path(), 1);
  fail_every_allocation(
      false, [&] { save_sample(root.path(), 2, 1); },
      [&] {
        const Found found = find_newest(root.path());
        ASSERT_NE(found.reader, nullptr);
        ASSERT_TRUE(found.warnings.empty()) << found.warnings[0];
        expect_sample(*found.reader);
        if (found.reader->manifest().step == 2) {
          std::filesystem::remove_all(root / "step-000000000002");
          save_sample(root.path(), 1);
        }
      });
}

// Runs `body` with so few descriptors that the n-th more is refused, until it has enough; says how
// often it was refused.
template <typename Body>
int with_few_descriptors(const Body& body) {
  int num_refused = 0;
  for (int more = 0; more < 200; ++more) {
    const pid_t child = ::fork();
    if (child == 0) {
      rlimit limit{};
      ::getrlimit(RLIMIT_NOFILE, &limit);
      const int next = ::open("/dev/null", O_RDONLY);
      ::close(next);
      limit.rlim_cur = static_cast<rlim_t>(next + more);
      ::setrlimit(RLIMIT_NOFILE, &limit);
      ::_exit(body());
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status)) << "with " << more << " descriptors";
    if (!WIFEXITED(status) || WEXITSTATUS(status) == 2) return -1;
    if (WEXITSTATUS(status) == 0) return num_refused;
    ++num_refused;
  }
  return -1;
}

TEST(Descriptors, TooFewAreNoDamage) {
  const TemporaryFolder root;
  for (const int step : {1, 2}) save_sample(root.path(), step);
  EXPECT_GE(with_few_descriptors([&] {
              BadReads disk;  // none; but without its pauses
              disk.fail_at = INT64_MAX / 2;
              try {
                const Found found = find_newest(root.path(), INT64_MAX, {}, disk);
                return found.reader && found.reader->manifest().step == 2 && found.warnings.empty()
                           ? 0
                           : 2;
              } catch (const Error& error) {
                return error.kind() == ErrorKind::kRead ? 1 : 2;
              }
            }),
            3);
  EXPECT_GE(with_few_descriptors([&] {
              BadReads disk;
              disk.fail_at = INT64_MAX / 2;
              try {
                save_sample(root.path(), 3, 0, disk);
                return 0;
              } catch (const Error& error) {
                return error.kind() == ErrorKind::kWrite || error.kind() == ErrorKind::kRead ? 1
                                                                                             : 2;
              }
            }),
            2);
  for (const int step : {1, 2, 3}) expect_sample(Reader(root.path(), step));
}

}  // namespace
}  // namespace tessera::checkpoint::testing
