#include "secret.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "file_descriptor.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {

core::Secret launcher_secret(const RunOptions& options) {
  if (options.goes_without_secret) return core::Secret::known_to_all();
  try {
    if (!options.secret_file.empty()) return core::Secret::from_file(options.secret_file);
    if (const auto given = core::Secret::from_environment()) return *given;
  } catch (const core::SecretError& error) {
    throw LaunchError(kExitConfiguration, "run: the job's secret cannot be used", error.what(),
                      "give every host the same file, of mode 0600, by --secret-file or "
                      "TESSERA_JOB_SECRET_FILE");
  }
  if (options.num_nodes == 1) return core::Secret::random();
  throw LaunchError(
      kExitUsage, "run: --nnodes " + std::to_string(options.num_nodes) + " needs a secret",
      "without one, whoever reaches the endpoint could join, disturb or end the job",
      "(umask 077; head -c 32 /dev/urandom | base64 > job.secret), copy it to every host and add "
      "--secret-file job.secret; on a network that only the job's hosts reach, --insecure-no-auth");
}

std::string write_rank_secret(const std::string& folder, const core::Secret& secret) {
  const std::string path = folder + "/secret";
  const FileDescriptor file(
      open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  const std::string text = secret.text();
  if (!file.is_open() ||
      write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    throw LaunchError(kExitInternal, "run: cannot write " + path, std::strerror(errno),
                      "set TMPDIR to a folder with space");
  }
  return path;
}

}  // namespace tessera::launch
