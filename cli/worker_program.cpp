#include "worker_program.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "launch/store_host.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::cli {

std::string worker_program(const std::string& verb) {
  const std::string path = launch::find_worker_program();
  if (!path.empty()) return path;
  throw launch::LaunchError(launch::kExitNotFound, verb + ": there is no tessera-worker program",
                            "it is not beside tessera, and TESSERA_WORKER does not name it",
                            "build it, or set TESSERA_WORKER to its path");
}

void become_worker(const std::string& verb, std::vector<std::string> words) {
  words.insert(words.begin(), worker_program(verb));
  become_program(verb, std::move(words));
}

void become_program(const std::string& verb, std::vector<std::string> words) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execv(words[0].c_str(), arguments.data());
  throw launch::LaunchError(launch::kExitNotExecutable,
                            verb + ": " + words[0] + " cannot be started", std::strerror(errno),
                            "check its permissions");
}

}  // namespace tessera::cli
