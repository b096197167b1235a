// tests/checkpoint/quiet.h — saves and loads that say nothing.

#pragma once

#include <string>

#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"

namespace tessera::checkpoint::testing {

inline SaveOptions quiet() {
  SaveOptions options;
  options.log = [](const std::string&) {};
  return options;
}

inline LoadOptions quiet_load() {
  LoadOptions options;
  options.log = [](const std::string&) {};
  return options;
}

}  // namespace tessera::checkpoint::testing
