// cli/data_answer.h — what `tessera data convert` and `check` say of what they read.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::cli {

struct DataAnswer {
  const char* unit = "records";  // what was counted: lines or records
  std::int64_t num_read = 0;
  std::int64_t num_samples = 0;
  std::int64_t num_bad = 0;
  std::int64_t num_bytes = 0;
  std::vector<std::string> first_bad{};  // for people
  nlohmann::ordered_json bad_for_machines = nlohmann::ordered_json::array();
  double seconds = 0;
};

// Each returns the exit code.
int say_converted(const DataAnswer& answer, const std::string& to, bool wants_json);
int say_checked(const DataAnswer& answer, const std::string& path, bool wants_json);

void print(const nlohmann::ordered_json& answer);

}  // namespace tessera::cli
