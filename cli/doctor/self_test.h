// cli/doctor/self_test.h — two real ranks that check and measure the engines of this build.

#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace tessera::cli {

struct SelfTest {
  bool passed = false;
  std::string error;     // why there is no answer, or which checks failed; empty if all is well
  std::string try_next;  // what to do about it
  double seconds = 0.0;
  nlohmann::ordered_json answer;  // what rank 0 found; null if it could not say
};

/// Starts `tessera run -n 2` on `tessera-worker doctor-rank` and waits for it, 20 s at most.
SelfTest run_self_test(bool is_quick);

}  // namespace tessera::cli
