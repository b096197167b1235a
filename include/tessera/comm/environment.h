// tessera/comm/environment.h — which rank this process is, as its launcher told it.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/core/export.h"

namespace tessera::comm {

/// What a launcher says about this process and its job.
struct Environment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // rank among the processes of this host
  int local_world_size = 1;  // processes of this job on this host
  int node_rank = 0;         // which host
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;
  bool agent_store = false;  // the launcher hosts the store; no rank may
  std::string store;   // the launcher's own store, which asks for the job's secret: unix:PATH or
                       // tcp:HOST:PORT; empty if it has none
  std::string run_id;  // separates jobs and attempts that meet on one store
  int restart_count = 0;
  std::string launcher;  // "torchrun", "slurm", "openmpi", or "none" for a single process
};

/// Reads the variables of `tessera run` and torchrun (RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_*, TESSERA_STORE), else
/// Slurm's (SLURM_PROCID, ...), else Open MPI's (OMPI_COMM_WORLD_RANK, ...). A process without any
/// of them is a world of one.
///
/// Under Slurm and Open MPI, MASTER_ADDR and MASTER_PORT are taken from the environment if set;
/// else the first host of the job and a port derived from the job's id. Throws ValueError naming
/// the variable and its value when they make no sense together. Not collective.
TESSERA_API Environment read_environment();

}  // namespace tessera::comm
