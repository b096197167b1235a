// report/run_facts.h — what a run notes of how it was started, on what, and with which data.

#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::workloads::report {

/// Set by `tessera train` for its ranks: the command line that was typed.
inline constexpr const char* kCommandVariable = "TESSERA_COMMAND";

/// Words as a shell would take them: those with other letters than names and paths have are quoted.
std::string command_text(const std::vector<std::string>& words);

/// The command line that was typed, or that of this process.
std::string typed_command();

/// What the system calls the processor; empty where it does not say.
std::string processor_name();

/// Path and bytes of each file. One that cannot be looked at, a pipe for instance, has null bytes.
nlohmann::ordered_json described(const std::vector<std::string>& files);

}  // namespace tessera::workloads::report
