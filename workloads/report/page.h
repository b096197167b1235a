// report/page.h — a run as one HTML page that needs nothing else: no network, no other file.

#pragma once

#include <string>

#include "report/run_record.h"

namespace tessera::workloads::report {

/// The whole page. Everything from the run is escaped; without scripts all pictures and numbers are
/// still there.
std::string make_page(const RunRecord& run);

/// Reads `folder` and writes its report.html. Returns the path. Throws Error.
std::string write_report(const std::string& folder);

}  // namespace tessera::workloads::report
