// What ranks are planned for: the memory that their tables lie in, and speeds of what steps them.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "dlrm/rank_machines.h"
#include "report/run_folder.h"
#include "support/ranks.h"

namespace tessera::workloads::dlrm {
namespace {

using tessera::testing::run_ranks;

constexpr double kGiB = 1 << 30;

// A processor's profile that the doctor keeps.
class KeptProfile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tessera-kept-profile-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_ / "tessera");
    planner::MachineProfile profile;
    profile.machine = planner::processor_name();
    profile.version = "0.1.0";
    profile.engine = "shm";
    profile.num_ranks = 2;
    profile.threads_per_rank = 1;
    profile.rows = {{64, 64 / 20e9}, {256, 256 / 20e9}};
    file_ = folder_ / "tessera" / "machine.json";
    report::write_text(file_, planner::to_json(profile));
    setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
    unsetenv("TESSERA_PROFILE");
  }
  void TearDown() override {
    unsetenv("XDG_CACHE_HOME");
    unsetenv("TESSERA_PROFILE");
    std::filesystem::remove_all(folder_);
  }

  std::filesystem::path folder_;
  std::string file_;
};

TEST(RankMachines, RanksShareMemoryInWholeGibibytes) {
  EXPECT_EQ(memory_of_rank({false, 62.8 * kGiB, 4}), 15 * kGiB);
  EXPECT_EQ(memory_of_rank({true, 139.8 * kGiB, 1}), 139 * kGiB);
  EXPECT_EQ(memory_of_rank({true, 80 * kGiB, 3}), 26 * kGiB);
  EXPECT_EQ(memory_of_rank({false, 3 * kGiB, 8}), kGiB);  // planned, however little it is
  const TableMemory host = host_memory(3);
  EXPECT_FALSE(host.is_gpu);
  EXPECT_GT(host.bytes, 0);
  EXPECT_EQ(host.num_ranks, 3);
}

TEST_F(KeptProfile, CountsForProcessorsAndNotForGpus) {
  EXPECT_TRUE(known_speeds("", {}).is_measured);
  EXPECT_NEAR(known_speeds("", {}).speeds.memory, 20e9, 1);
  const KnownSpeeds gpu = known_speeds("", {}, true);
  EXPECT_FALSE(gpu.is_measured);
  EXPECT_EQ(gpu.note, "speeds   assumed for GPUs: tessera doctor --profile measures processors");
  EXPECT_EQ(gpu.caution, "");
  EXPECT_EQ(gpu.speeds.memory, 897 * kGiB);
  EXPECT_EQ(gpu.speeds.host, 600 * kGiB);
  EXPECT_EQ(gpu.speeds.network, 12.5 * kGiB);
  EXPECT_EQ(known_speeds("assume", {}, true).speeds, gpu.speeds);
  // The variable is for all that a shell starts; the flag is meant for this training.
  setenv("TESSERA_PROFILE", file_.c_str(), 1);
  EXPECT_TRUE(known_speeds("", {}).is_measured);
  EXPECT_FALSE(known_speeds("", {}, true).is_measured);
  const KnownSpeeds named = known_speeds(file_, {}, true);
  EXPECT_TRUE(named.is_measured);
  EXPECT_NEAR(named.speeds.memory, 20e9, 1);
  EXPECT_EQ(named.caution, "profile  " + file_ + " was measured on " + planner::processor_name() +
                               ", and the tables are on GPUs: --profile assume leaves it out\n");
}

TEST_F(KeptProfile, RanksOnGpusArePlannedForThem) {
  run_ranks(2, [](const comm::Group& world) {
    const TableMemory mine{true, (world.rank() == 0 ? 80.9 : 24.4) * kGiB, 1};
    const RankMachines gpus = rank_machines("train", "", {2, 2}, mine, world);
    ASSERT_EQ(gpus.ranks.size(), 2U);
    EXPECT_EQ(gpus.ranks[0].memory, 80 * kGiB);
    EXPECT_EQ(gpus.ranks[1].memory, 24 * kGiB);
    for (const planner::Rank& rank : gpus.ranks) {
      EXPECT_EQ(rank.speeds, known_speeds("assume", {}, true).speeds);
    }
    EXPECT_FALSE(gpus.known.is_measured);  // so nothing is predicted
    const RankMachines host = rank_machines("train", "", {2, 2}, {false, 64 * kGiB, 2}, world);
    EXPECT_EQ(host.ranks[1].memory, 32 * kGiB);
    EXPECT_NEAR(host.ranks[1].speeds.memory, 20e9, 1);
    EXPECT_TRUE(host.known.is_measured);
  });
}

}  // namespace
}  // namespace tessera::workloads::dlrm
