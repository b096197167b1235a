// report/page.h — a run as one HTML page that needs nothing else: no network, no other file.
//
// The page is fixed: page/page.html with its style and its scripts, which draw what is in the JSON
// of `page_data`.

#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "report/run_record.h"

namespace tessera::workloads::report {

/// What the page shows: the record with curves smoothed and thinned. Numbers that are not finite
/// are null.
nlohmann::ordered_json page_data(const RunRecord& run);

/// The page with a script of its own and what it draws.
std::string filled_page(const std::string& title, const char* script,
                        const nlohmann::ordered_json& data);

/// The whole page. What comes from the run stands in it as JSON, and as its title, escaped.
std::string make_page(const RunRecord& run);

/// Reads `folder` and writes its report.html. Returns the path. Throws Error.
std::string write_report(const std::string& folder);

}  // namespace tessera::workloads::report
