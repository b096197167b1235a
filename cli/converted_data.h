// cli/converted_data.h — tables that a verb reads as logs: converted once, and told.

#pragma once

#include <string>

#include "data/read_table.h"

namespace tessera::cli {

/// The path of the log of the tables `names`; says on standard error what it made. Throws
/// LaunchError, exit code 65.
std::string say_converted(const std::string& verb, const std::string& names,
                          const std::string& schema, const workloads::data::TableOptions& options);

/// The same of the table of text that standard input holds.
std::string say_converted_input(const std::string& verb, const std::string& schema);

}  // namespace tessera::cli
