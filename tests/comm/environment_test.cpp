#include "tessera/comm/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "support/ranks.h"
#include "tessera/comm/topology.h"

namespace tessera::comm {
namespace {

using tessera::testing::text_of;

const char* const kVariables[] = {"RANK",
                                  "WORLD_SIZE",
                                  "LOCAL_RANK",
                                  "LOCAL_WORLD_SIZE",
                                  "GROUP_RANK",
                                  "MASTER_ADDR",
                                  "MASTER_PORT",
                                  "TORCHELASTIC_USE_AGENT_STORE",
                                  "TORCHELASTIC_RUN_ID",
                                  "TESSERA_STORE",
                                  "TORCHELASTIC_RESTART_COUNT",
                                  "SLURM_PROCID",
                                  "SLURM_NTASKS",
                                  "SLURM_LOCALID",
                                  "SLURM_NODEID",
                                  "SLURM_STEP_TASKS_PER_NODE",
                                  "SLURM_TASKS_PER_NODE",
                                  "SLURM_JOB_ID",
                                  "SLURM_STEP_ID",
                                  "SLURM_RESTART_COUNT",
                                  "SLURM_STEP_NODELIST",
                                  "SLURM_JOB_NODELIST",
                                  "OMPI_COMM_WORLD_RANK",
                                  "OMPI_COMM_WORLD_SIZE",
                                  "OMPI_COMM_WORLD_LOCAL_RANK",
                                  "OMPI_COMM_WORLD_LOCAL_SIZE",
                                  "OMPI_MCA_ess_base_jobid",
                                  "PMIX_NAMESPACE"};

class EnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }

  void clear() {
    for (const char* name : kVariables) ::unsetenv(name);
  }
  Environment read(const std::map<std::string, std::string>& variables) {
    clear();
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    return read_environment();
  }
  std::string error(const std::map<std::string, std::string>& variables) {
    try {
      read(variables);
    } catch (...) {
      return text_of(std::current_exception());
    }
    return "";
  }
};

TEST_F(EnvironmentTest, WithoutALauncherIsAWorldOfOne) {
  const Environment environment = read({});
  EXPECT_EQ(environment.launcher, "none");
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.world_size, 1);
}

TEST_F(EnvironmentTest, ReadsTorchrun) {
  const Environment environment = read({{"RANK", "5"},
                                        {"WORLD_SIZE", "8"},
                                        {"LOCAL_RANK", "1"},
                                        {"LOCAL_WORLD_SIZE", "4"},
                                        {"GROUP_RANK", "1"},
                                        {"MASTER_ADDR", "10.0.0.7"},
                                        {"MASTER_PORT", "29501"},
                                        {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                        {"TORCHELASTIC_RUN_ID", "job-9"},
                                        {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(environment.launcher, "torchrun");
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.world_size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 4);
  EXPECT_EQ(environment.node_rank, 1);
  EXPECT_EQ(environment.master_addr, "10.0.0.7");
  EXPECT_EQ(environment.master_port, 29501);
  EXPECT_TRUE(environment.agent_store);
  EXPECT_EQ(environment.run_id, "job-9");
  EXPECT_EQ(environment.restart_count, 2);
}

TEST_F(EnvironmentTest, TheLaunchersStoreStandsForOneAddressOnly) {
  std::map<std::string, std::string> variables{{"RANK", "1"},
                                               {"WORLD_SIZE", "2"},
                                               {"MASTER_ADDR", "127.0.0.1"},
                                               {"MASTER_PORT", "29501"},
                                               {"TESSERA_STORE", "127.0.0.1:29501=unix:/a/b"}};
  EXPECT_EQ(read(variables).store, "unix:/a/b");
  variables["MASTER_PORT"] = "2950";  // a group that a rank's own child makes elsewhere
  EXPECT_EQ(read(variables).store, "");
  variables.erase("TESSERA_STORE");
  EXPECT_EQ(read(variables).store, "");
}

TEST_F(EnvironmentTest, FourVariablesByHandAreEnough) {
  const Environment environment = read(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 2);
  EXPECT_FALSE(environment.agent_store);
}

TEST_F(EnvironmentTest, WrongValuesAreNamed) {
  const std::map<std::string, std::string> good{
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}};
  const auto with = [&](const std::string& name, const std::string& value) {
    auto variables = good;
    variables[name] = value;
    return error(variables);
  };
  EXPECT_EQ(with("RANK", "x"), "comm.init: RANK is 'x', not a whole number.");
  EXPECT_EQ(with("RANK", "1 "), "comm.init: RANK is '1 ', not a whole number.");
  EXPECT_EQ(with("WORLD_SIZE", "99999999999"),
            "comm.init: WORLD_SIZE is '99999999999', not a whole number.");
  EXPECT_EQ(with("RANK", "7"), "comm.init: RANK is 7, but WORLD_SIZE is 2. Ranks run from 0 to 1.");
  EXPECT_EQ(with("WORLD_SIZE", "-1"), "comm.init: WORLD_SIZE is -1. A job has at least one rank.");
  EXPECT_EQ(with("MASTER_PORT", "0"), "comm.init: MASTER_PORT is 0. Ports run from 1 to 65535.");
  EXPECT_EQ(with("LOCAL_WORLD_SIZE", "3"),
            "comm.init: LOCAL_WORLD_SIZE is 3, but WORLD_SIZE is 2.");
  EXPECT_EQ(with("LOCAL_RANK", "2"), "comm.init: LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2.");
  EXPECT_EQ(
      with("MASTER_PORT", ""),
      "comm.init: WORLD_SIZE is 2 but MASTER_PORT is not set. Start the program with `tessera "
      "run` or torchrun, or set MASTER_ADDR and MASTER_PORT.");
  EXPECT_EQ(with("WORLD_SIZE", ""),
            "comm.init: RANK is set but WORLD_SIZE is not. Start the program with `tessera run` or "
            "torchrun, or set both.");
}

TEST_F(EnvironmentTest, ReadsSlurm) {
  const Environment environment = read({{"SLURM_PROCID", "9"},
                                        {"SLURM_NTASKS", "11"},
                                        {"SLURM_LOCALID", "1"},
                                        {"SLURM_NODEID", "2"},
                                        {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"},
                                        {"SLURM_JOB_ID", "123"},
                                        {"SLURM_STEP_ID", "4"},
                                        {"SLURM_RESTART_COUNT", "1"},
                                        {"SLURM_STEP_NODELIST", "node[03-05]"}});
  EXPECT_EQ(environment.launcher, "slurm");
  EXPECT_EQ(environment.rank, 9);
  EXPECT_EQ(environment.world_size, 11);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 3);
  EXPECT_EQ(environment.node_rank, 2);
  EXPECT_EQ(environment.run_id, "slurm-123.4");
  EXPECT_EQ(environment.restart_count, 1);
  EXPECT_EQ(environment.master_addr, "node03");
  EXPECT_GE(environment.master_port, 15000);
  EXPECT_LT(environment.master_port, 30000);
}

TEST_F(EnvironmentTest, SlurmTasksPerNodeAreRunLengthCoded) {
  const struct {
    const char* tasks;
    int node;
    int expected;
  } cases[] = {{"4", 0, 4},
               {"4(x2)", 1, 4},
               {"4(x2),3", 0, 4},
               {"4(x2),3", 1, 4},
               {"4(x2),3", 2, 3},
               {"1,2,3", 0, 1},
               {"1,2,3", 1, 2},
               {"1,2,3", 2, 3},
               {"2(x3),1(x2),8", 4, 1},
               {"2(x3),1(x2),8", 5, 8}};
  for (const auto& c : cases) {
    const Environment environment = read({{"SLURM_PROCID", "0"},
                                          {"SLURM_NTASKS", "16"},
                                          {"SLURM_STEP_ID", "0"},
                                          {"SLURM_NODEID", std::to_string(c.node)},
                                          {"SLURM_STEP_TASKS_PER_NODE", c.tasks}});
    EXPECT_EQ(environment.local_world_size, c.expected) << c.tasks << " node " << c.node;
  }
}

TEST_F(EnvironmentTest, FirstSlurmHostIsFound) {
  const struct {
    const char* list;
    const char* first;
  } cases[] = {{"alone", "alone"},
               {"a,b", "a"},
               {"node[03-07,12]", "node03"},
               {"node[7,9]", "node7"},
               {"gpu[001]", "gpu001"},
               {"login,node[1-2]", "login"},
               {"rack[1-2]-node[04-05]", "rack1-node04"},
               {"node[1-2].cluster", "node1.cluster"}};
  for (const auto& c : cases) {
    const Environment environment = read({{"SLURM_PROCID", "0"},
                                          {"SLURM_NTASKS", "1"},
                                          {"SLURM_STEP_ID", "0"},
                                          {"SLURM_STEP_NODELIST", c.list}});
    EXPECT_EQ(environment.master_addr, c.first) << c.list;
  }
}

TEST_F(EnvironmentTest, SlurmPortDependsOnJobAndStepOnly) {
  const auto port = [&](const char* rank, const char* job, const char* step) {
    return read({{"SLURM_PROCID", rank},
                 {"SLURM_NTASKS", "4"},
                 {"SLURM_JOB_ID", job},
                 {"SLURM_STEP_ID", step}})
        .master_port;
  };
  EXPECT_EQ(port("0", "77", "0"), port("3", "77", "0"));
  EXPECT_NE(port("0", "77", "0"), port("0", "78", "0"));
  EXPECT_NE(port("0", "77", "0"), port("0", "77", "1"));
}

TEST_F(EnvironmentTest, MasterVariablesWinUnderSlurm) {
  const Environment environment = read({{"SLURM_PROCID", "0"},
                                        {"SLURM_NTASKS", "2"},
                                        {"SLURM_STEP_ID", "0"},
                                        {"SLURM_STEP_NODELIST", "a,b"},
                                        {"MASTER_ADDR", "10.1.1.1"},
                                        {"MASTER_PORT", "4000"}});
  EXPECT_EQ(environment.master_addr, "10.1.1.1");
  EXPECT_EQ(environment.master_port, 4000);
}

TEST_F(EnvironmentTest, AnInteractiveSlurmShellIsNoRank) {
  // salloc sets the job's variables in a shell that no step started.
  EXPECT_EQ(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).launcher, "none");
}

TEST_F(EnvironmentTest, ReadsOpenMpi) {
  const Environment environment = read({{"OMPI_COMM_WORLD_RANK", "3"},
                                        {"OMPI_COMM_WORLD_SIZE", "4"},
                                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                        {"OMPI_MCA_ess_base_jobid", "55"},
                                        {"MASTER_ADDR", "first"}});
  EXPECT_EQ(environment.launcher, "openmpi");
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.world_size, 4);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 2);
  EXPECT_EQ(environment.node_rank, 1);
  EXPECT_EQ(environment.master_addr, "first");
  EXPECT_EQ(environment.run_id, "ompi-55");
  EXPECT_NE(environment.master_port, 0);
}

TEST_F(EnvironmentTest, OpenMpiOverHostsNeedsTheMaster) {
  EXPECT_EQ(
      error({{"OMPI_COMM_WORLD_RANK", "3"},
             {"OMPI_COMM_WORLD_SIZE", "4"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
      "comm.init: the job runs on several hosts but MASTER_ADDR is not set. Open MPI does not "
      "say which host is the first: pass it with `mpirun -x MASTER_ADDR=host`.");
}

TEST_F(EnvironmentTest, TorchrunsVariablesComeFirst) {
  EXPECT_EQ(read({{"RANK", "0"},
                  {"WORLD_SIZE", "1"},
                  {"OMPI_COMM_WORLD_RANK", "3"},
                  {"OMPI_COMM_WORLD_SIZE", "4"}})
                .launcher,
            "torchrun");
}

TEST_F(EnvironmentTest, LocalSizesFollowTheLauncher) {
  read({{"RANK", "5"},
        {"WORLD_SIZE", "8"},
        {"LOCAL_RANK", "1"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"MASTER_PORT", "29500"}});
  EXPECT_EQ(get_local_size(), 4);
  EXPECT_EQ(get_local_size(12), 4);
  EXPECT_EQ(get_local_size(6), 6);  // 4 does not divide 6
  EXPECT_EQ(get_local_rank(), 1);
  EXPECT_EQ(get_local_rank(8, 7), 3);
  EXPECT_EQ(get_group_rank(), 1);
  EXPECT_EQ(get_group_rank(8, 3), 0);
  EXPECT_EQ(get_num_groups(), 2);
  EXPECT_EQ(get_num_groups(12), 3);
}

TEST_F(EnvironmentTest, WithoutALauncherAllRanksAreOnOneHost) {
  read({});
  EXPECT_EQ(get_local_size(4), 4);
  EXPECT_EQ(get_local_rank(4, 3), 3);
  EXPECT_EQ(get_group_rank(4, 3), 0);
  EXPECT_EQ(get_num_groups(4), 1);
}

TEST_F(EnvironmentTest, IntraAndCrossNodeGroups) {
  read({{"RANK", "0"},
        {"WORLD_SIZE", "4"},
        {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"MASTER_PORT", "29500"}});
  tessera::testing::run_ranks(4, [](const Group& world) {
    const auto [intra, cross] = intra_and_cross_node_pg(world);
    EXPECT_EQ(intra.size(), 2);
    EXPECT_EQ(cross.size(), 2);
    EXPECT_EQ(intra.rank(), world.rank() % 2);
    EXPECT_EQ(cross.rank(), world.rank() / 2);
    EXPECT_EQ(intra.world_rank(0), world.rank() / 2 * 2);
    EXPECT_EQ(cross.world_rank(1), 2 + world.rank() % 2);
    const auto [same, also_same] = intra_and_cross_node_pg(world);
    EXPECT_TRUE(same == intra && also_same == cross);
  });
}

}  // namespace
}  // namespace tessera::comm
