// Tables that grow until there is no memory, in processes of their own.

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "collision/memory_headroom.h"
#include "support/sanitizers.h"
#include "tessera/collision/id_table.h"

namespace tessera::collision {
namespace {

using Ids = std::vector<std::int64_t>;

constexpr int kGood = 7;
constexpr std::size_t kMegabyte = std::size_t{1} << 20;

/// How a child ended: kGood, another code, or minus the signal.
int in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    bool is_good = false;
    try {
      is_good = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    _exit(is_good ? kGood : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

Ids batch_of(std::int64_t step) {
  std::mt19937_64 random(static_cast<std::uint64_t>(step));
  Ids ids(50000);
  for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random());
  return ids;
}

/// Grows until it is told to stop; then the table must be as it was, and go on.
bool ends_with_a_clear_error(std::int64_t most_steps) {
  IdTable table({.name = "user"});
  Ids rows(50000);
  std::int64_t step = 0;
  for (; step < most_steps; ++step) {
    const std::int64_t size = table.size();
    try {
      table.admit(batch_of(step), {}, step, rows);
    } catch (const IdMemoryError& error) {
      const std::string text = error.what();
      std::fprintf(stderr, "after %lld ids: %s\n", static_cast<long long>(size), error.what());
      bool is_good = size > 0 && table.size() == size && text.find("'user'") != std::string::npos &&
                     text.find("bytes") != std::string::npos &&
                     text.find(std::to_string(size) + " ids are held") != std::string::npos;
      table.find(batch_of(step), rows);
      for (const std::int64_t row : rows) is_good &= row == -1;
      const IdChanges again = table.admit(batch_of(step - 1), {}, step, rows);
      is_good &= again.num_found == 50000 && again.new_ids.empty();
      table.erase(batch_of(0));
      is_good &= table.size() == size - 50000;
      return is_good;
    }
  }
  std::fprintf(stderr, "%lld ids were admitted\n", static_cast<long long>(table.size()));
  return false;
}

bool evicts(std::int64_t steps) {
  IdTable table({.name = "user", .capacity = 1'000'000, .eviction = {.kind = EvictionKind::kLru}});
  Ids rows(50000);
  std::int64_t num_evicted = 0;
  for (std::int64_t step = 0; step < steps; ++step) {
    const IdChanges changes = table.admit(batch_of(step), {}, step, rows);
    num_evicted += static_cast<std::int64_t>(changes.evicted_ids.size());
  }
  table.find(batch_of(steps - 1), rows);
  for (const std::int64_t row : rows) {
    if (row < 0) return false;
  }
  std::fprintf(stderr, "%lld ids, %lld evicted\n", static_cast<long long>(table.size()),
               static_cast<long long>(num_evicted));
  return num_evicted > 0 && table.size() + num_evicted == steps * 50000;
}

std::size_t address_space() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

void limit_addresses(std::size_t more) {
  const rlimit limit{address_space() + more, address_space() + more};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

class FullMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::kIsSanitized) GTEST_SKIP() << "the sanitizer takes memory of its own";
  }
};

TEST_F(FullMemory, OfAddressesIsAClearError) {
  EXPECT_EQ(in_child([] {
              limit_addresses(256 * kMegabyte);
              return ends_with_a_clear_error(200);
            }),
            kGood);
}

TEST_F(FullMemory, ACapacityKeepsWithinTheAddresses) {
  EXPECT_EQ(in_child([] {
              limit_addresses(256 * kMegabyte);
              return evicts(140);
            }),
            kGood);
}

TEST_F(FullMemory, ManyTablesLeaveAddressesToOthers) {
  EXPECT_EQ(in_child([] {
              limit_addresses(2048 * kMegabyte);
              const std::size_t before = address_space();
              std::vector<IdTable> tables;
              for (int i = 0; i < 50; ++i) tables.emplace_back(IdTableOptions{.name = "user"});
              Ids rows(50000);
              for (IdTable& table : tables) table.admit(batch_of(1), {}, 0, rows);
              for (IdTable& table : tables) {
                table.find(batch_of(1), rows);
                if (rows[49999] != 49999) return false;
              }
              std::fprintf(stderr, "%zu bytes of addresses\n", address_space() - before);
              return address_space() - before < 512 * kMegabyte;
            }),
            kGood);
}

/// A group of the kernel for memory, which only root may make.
class Group {
 public:
  explicit Group(std::size_t bytes) {
    const std::string name = "tessera_full_memory_" + std::to_string(getpid());
    const std::string first = "/sys/fs/cgroup/memory/";
    const std::string second = "/sys/fs/cgroup/";
    const bool is_first = access((first + "memory.limit_in_bytes").c_str(), F_OK) == 0 ||
                          access((first + "cgroup.procs").c_str(), F_OK) == 0;
    folder_ = (is_first ? first : second) + name;
    if (mkdir(folder_.c_str(), 0700) != 0) return;
    is_there_ = true;
    std::ofstream limit(folder_ + (is_first ? "/memory.limit_in_bytes" : "/memory.max"));
    limit << bytes << std::flush;
    is_limited_ = limit.good();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (is_there_) rmdir(folder_.c_str());
  }
  bool is_usable() const { return is_limited_; }
  bool enter() const {
    std::ofstream members(folder_ + "/cgroup.procs");
    members << getpid() << std::flush;
    return members.good();
  }

 private:
  std::string folder_;
  bool is_there_ = false;
  bool is_limited_ = false;
};

TEST_F(FullMemory, OfAControlGroupIsAClearErrorNotAKill) {
  const Group group(192 * kMegabyte);
  if (!group.is_usable()) GTEST_SKIP() << "groups of memory cannot be made here";
  EXPECT_EQ(in_child([&] { return group.enter() && ends_with_a_clear_error(200); }), kGood);
}

TEST_F(FullMemory, ACapacityKeepsWithinTheControlGroup) {
  const Group group(192 * kMegabyte);
  if (!group.is_usable()) GTEST_SKIP() << "groups of memory cannot be made here";
  EXPECT_EQ(in_child([&] { return group.enter() && evicts(120); }), kGood);
}

TEST_F(FullMemory, HeadroomFollowsTheLimit) {
  EXPECT_EQ(in_child([] {
              limit_addresses(256 * kMegabyte);
              const std::size_t left = memory_headroom();
              return left < 245 * kMegabyte && left > 150 * kMegabyte;
            }),
            kGood);
}

}  // namespace
}  // namespace tessera::collision
