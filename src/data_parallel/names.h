// src/data_parallel/names.h — parameters and buffers that options name.

#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace tessera::data_parallel {

inline bool is_listed(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace tessera::data_parallel
