#include "tessera/comm/environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<int> integer(const char* name) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  TESSERA_CHECK_VALUE(error == std::errc() && end == text->data() + text->size(),
                      "comm.init: ", name, " is '", *text, "', not a whole number.");
  return value;
}

int required(const char* name, const char* because) {
  const auto value = integer(name);
  TESSERA_CHECK_VALUE(value, "comm.init: ", because, " is set but ", name,
                      " is not. Start the program with `tessera run` or torchrun, or set both.");
  return *value;
}

void check_consistency(const Environment& environment) {
  TESSERA_CHECK_VALUE(environment.world_size >= 1, "comm.init: WORLD_SIZE is ",
                      environment.world_size, ". A job has at least one rank.");
  TESSERA_CHECK_VALUE(environment.rank >= 0 && environment.rank < environment.world_size,
                      "comm.init: RANK is ", environment.rank, ", but WORLD_SIZE is ",
                      environment.world_size, ". Ranks run from 0 to ", environment.world_size - 1,
                      ".");
  TESSERA_CHECK_VALUE(
      environment.local_world_size >= 1 && environment.local_world_size <= environment.world_size,
      "comm.init: LOCAL_WORLD_SIZE is ", environment.local_world_size, ", but WORLD_SIZE is ",
      environment.world_size, ".");
  TESSERA_CHECK_VALUE(
      environment.local_rank >= 0 && environment.local_rank < environment.local_world_size,
      "comm.init: LOCAL_RANK is ", environment.local_rank, ", but LOCAL_WORLD_SIZE is ",
      environment.local_world_size, ".");
}

void read_master(Environment& environment) {
  if (const auto address = variable("MASTER_ADDR")) environment.master_addr = *address;
  if (const auto port = integer("MASTER_PORT")) {
    TESSERA_CHECK_VALUE(*port > 0 && *port < 65536, "comm.init: MASTER_PORT is ", *port,
                        ". Ports run from 1 to 65535.");
    environment.master_port = static_cast<std::uint16_t>(*port);
  }
}

// The launcher's own store, which it offers in place of that at MASTER_ADDR and MASTER_PORT. Those
// of a program that was started from a rank, but meets elsewhere, are others.
std::string store_for(const Environment& environment) {
  const std::string text = variable("TESSERA_STORE").value_or("");
  const std::string master =
      environment.master_addr + ":" + std::to_string(environment.master_port) + "=";
  return text.starts_with(master) ? text.substr(master.size()) : "";
}

// The first host of a Slurm list such as "node[03-07,12],gpu1": node03. Names may hold several
// ranges.
std::string first_slurm_host(const std::string& list) {
  std::string host;
  for (std::size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const std::size_t end = std::min(list.find_first_of(",-]", at), list.size());
    host += list.substr(at + 1, end - at - 1);
    at = std::min(list.find(']', at), list.size() - 1);
  }
  return host;
}

// Every rank computes the same port without talking: outside the range handed out to clients.
std::uint16_t port_of_job(const std::string& job) {
  std::uint32_t hash = 2166136261U;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return static_cast<std::uint16_t>(15000 + hash % 15000);
}

/// What a launcher says by two variables, of which each needs the other.
Environment started_by(const char* launcher, const char* rank, const char* world_size) {
  Environment environment;
  environment.launcher = launcher;
  environment.rank = required(rank, world_size);
  environment.world_size = required(world_size, rank);
  return environment;
}

Environment from_torchrun() {
  Environment environment = started_by("torchrun", "RANK", "WORLD_SIZE");
  environment.local_rank = integer("LOCAL_RANK").value_or(environment.rank);
  environment.local_world_size = integer("LOCAL_WORLD_SIZE").value_or(environment.world_size);
  environment.node_rank = integer("GROUP_RANK").value_or(0);
  read_master(environment);
  environment.store = store_for(environment);
  environment.agent_store = variable("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  environment.run_id = variable("TORCHELASTIC_RUN_ID").value_or("");
  environment.restart_count = integer("TORCHELASTIC_RESTART_COUNT").value_or(0);
  TESSERA_CHECK_VALUE(environment.world_size == 1 || environment.master_port != 0,
                      "comm.init: WORLD_SIZE is ", environment.world_size,
                      " but MASTER_PORT is not set. Start the program with `tessera run` or "
                      "torchrun, or set MASTER_ADDR and MASTER_PORT.");
  return environment;
}

Environment from_slurm() {
  Environment environment = started_by("slurm", "SLURM_PROCID", "SLURM_NTASKS");
  environment.local_rank = integer("SLURM_LOCALID").value_or(0);
  environment.node_rank = integer("SLURM_NODEID").value_or(0);
  // "4" or "4(x2),3": tasks per node, run-length coded. The number for this node is looked up.
  const std::string tasks =
      variable("SLURM_STEP_TASKS_PER_NODE").value_or(variable("SLURM_TASKS_PER_NODE").value_or(""));
  environment.local_world_size = environment.world_size;
  int node = 0;
  for (std::size_t at = 0; at < tasks.size();) {
    const std::size_t comma = std::min(tasks.find(',', at), tasks.size());
    const std::string item = tasks.substr(at, comma - at);
    const std::size_t repeat = item.find("(x");
    const int count = std::atoi(item.c_str());
    node += repeat == std::string::npos ? 1 : std::atoi(item.c_str() + repeat + 2);
    if (environment.node_rank < node) {
      environment.local_world_size = count;
      break;
    }
    at = comma + 1;
  }
  const std::string job =
      variable("SLURM_JOB_ID").value_or("0") + "." + variable("SLURM_STEP_ID").value_or("0");
  environment.run_id = "slurm-" + job;
  environment.restart_count = integer("SLURM_RESTART_COUNT").value_or(0);
  environment.master_port = port_of_job(environment.run_id);
  if (const auto hosts = variable("SLURM_STEP_NODELIST") ? variable("SLURM_STEP_NODELIST")
                                                         : variable("SLURM_JOB_NODELIST")) {
    environment.master_addr = first_slurm_host(*hosts);
  }
  read_master(environment);
  return environment;
}

Environment from_open_mpi() {
  Environment environment = started_by("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  environment.local_rank = integer("OMPI_COMM_WORLD_LOCAL_RANK").value_or(environment.rank);
  environment.local_world_size =
      integer("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(environment.world_size);
  environment.node_rank = environment.rank / std::max(environment.local_world_size, 1);
  environment.run_id =
      "ompi-" +
      variable("OMPI_MCA_ess_base_jobid").value_or(variable("PMIX_NAMESPACE").value_or("0"));
  environment.master_port = port_of_job(environment.run_id);
  read_master(environment);
  TESSERA_CHECK_VALUE(
      environment.local_world_size == environment.world_size || variable("MASTER_ADDR"),
      "comm.init: the job runs on several hosts but MASTER_ADDR is not set. Open MPI does not say "
      "which host is the first: pass it with `mpirun -x MASTER_ADDR=host`.");
  return environment;
}

}  // namespace

Environment read_environment() {
  Environment environment;
  if (variable("RANK") || variable("WORLD_SIZE")) {
    environment = from_torchrun();
  } else if (variable("OMPI_COMM_WORLD_RANK")) {
    environment = from_open_mpi();
  } else if (variable("SLURM_PROCID") && variable("SLURM_STEP_ID")) {
    environment = from_slurm();
  } else {
    environment.launcher = "none";
  }
  check_consistency(environment);
  return environment;
}

}  // namespace tessera::comm
