// Failure lists from another host's launcher: refused, or understood and the same after a round
// trip.

#include <cstdint>
#include <cstdlib>
#include <string>

#include "tessera/launch/failure.h"

using namespace tessera::launch;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<RankFailure> failures;
  try {
    failures = failures_from_json(text);
  } catch (const std::exception&) {
    return 0;
  }
  const std::string once = failures_to_json(failures);
  if (failures_to_json(failures_from_json(once)) != once) std::abort();
  if (!failures.empty()) {
    if (root_cause(failures) >= failures.size()) std::abort();
    format_report(failures, {});
    format_report_json(failures, {});
  }
  return 0;
}
