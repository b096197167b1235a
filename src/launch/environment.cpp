#include "environment.h"

#include <cstdlib>
#include <cstring>
#include <map>

#include "core/live_record.h"
#include "core/secret.h"

extern char** environ;

namespace tessera::launch {

std::vector<std::string> rank_environment(const RunOptions& options, const Attempt& attempt,
                                          int local_rank, const std::string& error_file) {
  const std::string rank = std::to_string(options.node_rank * options.num_local_ranks + local_rank);
  const std::string world = std::to_string(options.num_nodes * options.num_local_ranks);
  std::map<std::string, std::string> ours = {
      {"RANK", rank},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", world},
      {"LOCAL_WORLD_SIZE", std::to_string(options.num_local_ranks)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(options.num_nodes)},
      {"ROLE_RANK", rank},
      {"ROLE_NAME", options.role},
      {"ROLE_WORLD_SIZE", world},
      {"MASTER_ADDR", attempt.master_address},
      {"MASTER_PORT", std::to_string(attempt.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt.number)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
      {"TORCHELASTIC_RUN_ID", attempt.job_name},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_ERROR_FILE", error_file},
      {"TESSERA_RUN_ID", attempt.run_id},
      // A program that makes a group of its own at another address must not end up here.
      {"TESSERA_STORE",
       attempt.master_address + ":" + std::to_string(attempt.master_port) + "=" + attempt.store},
      {core::kSecretFileVariable, attempt.secret_file},
  };
  if (!attempt.live_folder.empty()) ours[core::kLiveVariable] = attempt.live_folder + "/" + rank;
  const auto set_if_unset = [&](const char* name, const char* value) {
    if (std::getenv(name) == nullptr) ours[name] = value;
  };
  set_if_unset("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  // One thread per rank unless told otherwise: every rank would start a thread per core.
  if (options.num_local_ranks > 1) set_if_unset("OMP_NUM_THREADS", "1");

  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = std::strchr(*entry, '=');
    const size_t length = equals != nullptr ? static_cast<size_t>(equals - *entry) : 0;
    const std::string name(*entry, length);
    if (ours.count(name) != 0 || name == core::kSecretVariable) continue;
    result.emplace_back(*entry);
  }
  for (const auto& [name, value] : ours) result.push_back(name + "=" + value);
  return result;
}

std::string random_hex(size_t num_bytes) { return core::hex_of(core::random_bytes(num_bytes)); }

}  // namespace tessera::launch
