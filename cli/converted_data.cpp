#include "converted_data.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "data/converted.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::cli {
namespace {

using workloads::data::DataError;
using workloads::data::TableOptions;

class Watch {
 public:
  void say(const std::string& verb, const std::string& names,
           const workloads::data::Converted& made) const {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin_;
    std::fprintf(stderr, "note: %s: converted %lld samples of %s in %.1f s; kept as %s\n",
                 verb.c_str(), static_cast<long long>(made.report.num_samples), names.c_str(),
                 seconds.count(), made.path.c_str());
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

void convert(const std::string& verb, const std::string& names, const std::string& schema,
             const TableOptions& options) {
  const Watch watch;
  const auto made = workloads::data::convert_once(names, schema, options);
  if (made.is_new) watch.say(verb, names, made);
}

[[noreturn]] void refuse(const std::string& verb, const std::string& names,
                         const std::string& problem, const std::string& check) {
  throw launch::LaunchError(launch::kExitData, verb + ": " + names + " cannot be read", problem,
                            "tessera data check " + check + " names what is bad");
}

// Arrow starts threads, and a launcher must have one: a process of its own converts. Returns what
// is wrong, or nothing.
std::string convert_apart(const std::string& verb, const std::string& names,
                          const std::string& schema, const TableOptions& options) {
  int ends[2];
  if (::pipe(ends) != 0) return "there is no pipe for the process that converts.";
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody would be told of what it makes
    if (::getppid() != parent) ::_exit(launch::kExitData);
    ::close(ends[0]);
    std::string problem;
    try {
      convert(verb, names, schema, options);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const ssize_t told = ::write(ends[1], problem.data(), problem.size());
    ::_exit(problem.empty() && told == 0 ? launch::kExitOk : launch::kExitData);
  }
  ::close(ends[1]);
  std::string problem;
  char buffer[4096];
  for (;;) {
    const ssize_t more = child < 0 ? 0 : ::read(ends[0], buffer, sizeof(buffer));
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) break;
    problem.append(buffer, static_cast<std::size_t>(more));
  }
  ::close(ends[0]);
  if (child < 0) return "the process that converts cannot be started.";
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (problem.empty() && status != 0) problem = "the process that converts was ended.";
  return problem;
}

}  // namespace

std::string say_converted(const std::string& verb, const std::string& names,
                          const std::string& schema, const TableOptions& options) {
  std::string path;
  std::string problem;
  try {
    path = workloads::data::converted_path(names, schema, options);
    if (!std::filesystem::exists(path)) problem = convert_apart(verb, names, schema, options);
  } catch (const DataError& error) {
    problem = error.what();
  }
  if (problem.empty()) return path;
  refuse(verb, names, problem, names + " --schema " + (schema.empty() ? "FILE" : schema));
}

std::string say_converted_input(const std::string& verb, const std::string& schema) {
  const Watch watch;
  try {
    // No process apart: a pipe holds text, which Arrow has nothing to do with.
    const auto made = workloads::data::convert_standard_input(schema);
    watch.say(verb, "standard input", made);
    return made.path;
  } catch (const DataError& error) {
    refuse(verb, "standard input", error.what(), "- --schema " + schema);
  }
}

}  // namespace tessera::cli
