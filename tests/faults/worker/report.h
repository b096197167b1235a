// tests/faults/worker/report.h — what a rank tells the driver, and how it waits for it.

#pragma once

#include <exception>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/comm/group.h"

namespace tessera::faults {

using Json = nlohmann::json;

/// Appends a line to this process's file in the folder FAULT_REPORT: `fields`, the event's name,
/// the pid, RANK, and the monotonic clock, which driver and ranks share.
void report(const std::string& event, Json fields = Json::object());

/// Reports "ready" with the group's engine, rank and size.
void report_ready(const comm::Group& group);

/// Reports the exception as event `event`: "kind" ("mismatch", ..., or "exception"), "ranks",
/// "text".
void report_error(const std::string& event, std::exception_ptr error, Json fields = Json::object());

/// Waits until the driver has put a file `name` into the folder, at most `seconds`.
bool wait_for_driver(const std::string& name, double seconds);

}  // namespace tessera::faults
