// dlrm/table_problem.h — the tables of a training as a problem for the planner. No LibTorch.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dlrm/click_log.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/planner/problem.h"

namespace tessera::workloads::dlrm {

/// One table per feature of a log. Bags that vary are `bag_size` long in the mean.
std::vector<planner::Table> planner_tables(const ClickSchema& schema, std::int64_t embedding_dim,
                                           std::int64_t bag_size);

/// Speeds that a plan is made for, and where they come from.
struct KnownSpeeds {
  planner::Speeds speeds;
  planner::MachineProfile profile;  // of a machine that was measured
  bool is_measured = false;
  std::string differs;  // where and how the profile was measured, if not as it is used; in words
  std::string note;     // one line for people: "speeds   …"
  std::string caution;  // one more if the profile was measured elsewhere than `here`: "profile  …"
};

/// `profile` is a file of `tessera doctor --profile`, "assume", or empty: the file that the doctor
/// keeps, if there is one; $TESSERA_PROFILE may be either. A file that is named is used wherever it
/// was measured; the kept one is not if that was another machine. Throws
/// planner::PlanError(kBadProblem) for a file that is not there or no profile.
///
/// Profiles are of processors: tables on GPUs take one only if `profile` names it, else what is
/// assumed of a GPU.
KnownSpeeds known_speeds(const std::string& profile, const planner::Here& here,
                         bool is_on_gpus = false);

/// Gives tables what a file of `tessera data stats` says of their ids. Throws
/// planner::PlanError(kBadProblem) for a file that is none, or has none of the tables.
void apply_statistics(const std::string& path, std::vector<planner::Table>& tables);

/// What a training is planned for.
struct PlanRequest {
  int num_ranks = 1;
  int ranks_per_host = 1;
  std::int64_t batch = 2048;                        // samples per rank and step
  std::string table_optimizer = "rowwise_adagrad";  // a word of --table-optimizer
  planner::Rank rank;
  double reserve = 15;  // percent of the memory
};

/// Tables may be cut in every way, and copied to all ranks where the fused kernel steps them.
planner::Problem table_problem(std::vector<planner::Table> tables, const PlanRequest& request);

/// The memory that a rank lays its tables into: its host's, or its GPU's.
struct TableMemory {
  bool is_gpu = false;
  double bytes = 0;   // all of it
  int num_ranks = 1;  // that share it
};

/// This host's memory, for so many ranks.
TableMemory host_memory(int ranks_per_host);

/// Bytes of one of the ranks that share it, in whole GiB: the same on machines of one kind.
double memory_of_rank(const TableMemory& memory);

}  // namespace tessera::workloads::dlrm
