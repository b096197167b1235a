// cli/doctor/report.h — what `tessera doctor` found, for people and for programs.

#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "doctor/machine.h"
#include "doctor/memory_speed.h"
#include "doctor/self_test.h"

namespace tessera::cli {

struct Findings {
  Machine machine;
  std::string active_isa;
  std::vector<std::string> available_isas;
  MemorySpeed one_thread;
  MemorySpeed all_threads;
  int num_threads = 0;
  double ping_nanoseconds = 0.0;
  SelfTest self_test;
};

/// Something that works worse than it could, and what to do about it.
struct Warning {
  std::string about;  // the line of the text it belongs to
  std::string text;
  std::string try_next;
};
std::vector<Warning> warnings_of(const Findings& findings);

/// At most 40 lines of at most 100 columns.
std::string as_text(const Findings& findings, bool use_color);

/// docs/doctor.md describes the keys; they stay.
nlohmann::ordered_json as_json(const Findings& findings);

}  // namespace tessera::cli
