// cli/plan_tables_flags.h — the flags of `tessera plan tables`.
//
// All flags of `tessera train dlrm` are taken, so that a command line or the configuration of a run
// can be explained as it is; those that have nothing to do with tables are read and not used.
// `tessera` reads the flags to find mistakes; `tessera-worker` reads them again.

#pragma once

#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "dlrm/settings.h"
#include "flags.h"

namespace tessera::cli {

struct PlanTablesWords : workloads::dlrm::Settings {
  int num_hosts = 1;
  std::string table_list;
  std::string memory;  // bytes, "16GB"; empty: no limit
  double reserve = 15;
  double memory_speed = 0;  // GB/s, as are the next two; 0: the profile's, or assumed
  double host_speed = 0;
  double network_speed = 0;
  std::string write;
  std::string picture;  // a file
  bool search = false;
  std::string explain;    // a table
  std::string check;      // a file
  std::string previous;   // a plan
  std::string max_moved;  // of its bytes; empty: 5%
  double steps_left = 0;  // that are to pay for moves; 0: moves are free
  std::string calibrate;  // a run
  std::string objective = "sum";
  std::string effort = "normal";
  std::vector<std::string> pins;
  std::vector<std::string> apart;     // lists of tables
  std::vector<std::string> together;  // the same
};

/// A number of bytes: 16GB, 512MiB, 1e9. Returns -1 for other texts.
inline double bytes_of(const std::string& text) {
  const std::size_t end = text.find_first_not_of("0123456789.");
  const std::string number = text.substr(0, end);
  const std::string unit = end == std::string::npos ? "" : text.substr(end);
  double value = 0;
  if (number.empty() || !CLI::detail::lexical_cast(number, value)) return -1;
  static const std::pair<const char*, double> kUnits[] = {
      {"", 1},          {"B", 1},
      {"kB", 1e3},      {"MB", 1e6},
      {"GB", 1e9},      {"TB", 1e12},
      {"KiB", 1 << 10}, {"MiB", 1 << 20},
      {"GiB", 1 << 30}, {"TiB", 1e0 * (std::int64_t{1} << 40)}};
  for (const auto& [name, size] : kUnits) {
    if (unit == name) return value * size;
  }
  return -1;
}

inline void define_flags(CLI::App& app, PlanTablesWords& words) {
  define(app, words.table());
  static const std::set<std::string> kUsed = {
      "ranks", "sharding",        "plan", "data",   "tables", "rows",         "bag",     "dim",
      "batch", "table-optimizer", "json", "config", "help",   "print-config", "profile", "stats"};
  for (CLI::Option* option : app.get_options()) {
    if (!option->get_lnames().empty() && kUsed.count(option->get_lnames()[0]) == 0) {
      option->group("");
    }
  }
  const auto value = [&](const char* name, auto& target) {
    return app.add_option(name, target)->capture_default_str()->take_last();
  };
  const CLI::Validator bytes(
      [](std::string& text) {
        return text.empty() || bytes_of(text) > 0
                   ? std::string()
                   : "'" + text + "' is not a number of bytes such as 16GB or 512MiB";
      },
      "BYTES");
  value("--hosts", words.num_hosts)->check(CLI::Range(1, 4096));
  value("--table-list", words.table_list);
  value("--memory", words.memory)->check(bytes);
  value("--reserve", words.reserve)->check(CLI::Range(0.0, 99.0));
  for (auto [name, target] : {std::pair{"--memory-speed", &words.memory_speed},
                              std::pair{"--host-speed", &words.host_speed},
                              std::pair{"--network-speed", &words.network_speed}}) {
    value(name, *target)->check(not_negative());
  }
  value("--write", words.write)->configurable(false);
  value("--picture", words.picture)->configurable(false);
  app.add_flag("--search", words.search)->configurable(false);
  value("--explain", words.explain)->configurable(false);
  value("--check", words.check)->configurable(false);
  value("--previous", words.previous)->configurable(false);
  value("--max-moved", words.max_moved)->configurable(false);
  value("--steps-left", words.steps_left)->configurable(false)->check(CLI::Range(1.0, 1e15));
  value("--calibrate", words.calibrate)->configurable(false);
  value("--objective", words.objective)->check(CLI::IsMember({"sum", "phases"}));
  value("--effort", words.effort)->check(CLI::IsMember({"low", "normal", "high"}));
  for (auto [name, target] : {std::pair{"--pin", &words.pins}, std::pair{"--apart", &words.apart},
                              std::pair{"--together", &words.together}}) {
    app.add_option(name, *target)->allow_extra_args(false)->configurable(false);
  }
}

}  // namespace tessera::cli
