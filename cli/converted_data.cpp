#include "converted_data.h"

#include <chrono>
#include <cstdio>

#include "data/converted.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::cli {

std::string say_converted(const std::string& verb, const std::string& names,
                          const std::string& schema, const workloads::data::TableOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    const auto made = workloads::data::convert_once(names, schema, options);
    if (made.is_new) {
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      std::fprintf(stderr, "note: %s: converted %lld samples of %s in %.1f s; kept as %s\n",
                   verb.c_str(), static_cast<long long>(made.report.num_samples), names.c_str(),
                   seconds.count(), made.path.c_str());
    }
    return made.path;
  } catch (const workloads::data::DataError& error) {
    throw launch::LaunchError(launch::kExitData, verb + ": " + names + " cannot be read",
                              error.what(),
                              "tessera data check " + names + " --schema " +
                                  (schema.empty() ? "FILE" : schema) + " names what is bad");
  }
}

}  // namespace tessera::cli
