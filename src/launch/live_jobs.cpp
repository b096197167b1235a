#include "live_jobs.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <nlohmann/json.hpp>

#include "scratch.h"

namespace tessera::launch {
namespace {

constexpr char kFile[] = "/job.json";

std::vector<std::string> folders_of_launchers() {
  std::vector<std::string> folders;
  std::error_code ignored;
  for (const std::string& parent : scratch_parents()) {
    for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
      folders.push_back(entry.path().string());
    }
  }
  return folders;
}

}  // namespace

void record_job(const std::string& folder, const LiveJob& job) {
  const nlohmann::json object = {{"name", job.name},         {"pid", job.pid},
                                 {"begin_ns", job.begin_ns}, {"local_ranks", job.num_local_ranks},
                                 {"nodes", job.num_nodes},   {"node_rank", job.node_rank},
                                 {"attempt", job.attempt},   {"command", job.command},
                                 {"live", job.live_folder},  {"pids", job.pids}};
  const std::string path = folder + kFile;
  std::ofstream(path + ".new") << object.dump(-1, ' ', false,
                                              nlohmann::json::error_handler_t::replace);
  std::rename((path + ".new").c_str(), path.c_str());  // readers see the old one or the new one
}

std::vector<LiveJob> live_jobs() {
  std::vector<LiveJob> jobs;
  for (const std::string& folder : folders_of_launchers()) {
    std::ifstream file(folder + kFile);
    const nlohmann::json object = nlohmann::json::parse(file, nullptr, false);
    if (!object.is_object() || !scratch_is_in_use(folder)) continue;
    try {
      LiveJob job;
      job.name = object.at("name");
      job.pid = object.at("pid");
      job.begin_ns = object.at("begin_ns");
      job.num_local_ranks = object.at("local_ranks");
      job.num_nodes = object.at("nodes");
      job.node_rank = object.at("node_rank");
      job.attempt = object.at("attempt");
      job.command = object.at("command").get<std::vector<std::string>>();
      job.live_folder = object.at("live");
      job.pids = object.at("pids").get<std::vector<int64_t>>();
      jobs.push_back(std::move(job));
    } catch (const nlohmann::json::exception&) {
      // Of another version of this program.
    }
  }
  std::sort(jobs.begin(), jobs.end(),
            [](const LiveJob& a, const LiveJob& b) { return a.begin_ns < b.begin_ns; });
  return jobs;
}

}  // namespace tessera::launch
