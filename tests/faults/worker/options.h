// tests/faults/worker/options.h — what a mode of the worker is told on its command line.

#pragma once

#include <cstdlib>
#include <map>
#include <string>

namespace tessera::faults {

/// `key=value` words after the mode's name. A key that nobody asks for is harmless.
class Options {
 public:
  Options(int argc, char** argv) {
    for (int i = 2; i < argc; ++i) {
      const std::string word = argv[i];
      const auto equals = word.find('=');
      values_[word.substr(0, equals)] = equals == std::string::npos ? "" : word.substr(equals + 1);
    }
  }

  std::string text(const std::string& key, const std::string& otherwise = "") const {
    const auto found = values_.find(key);
    return found == values_.end() ? otherwise : found->second;
  }

  long number(const std::string& key, long otherwise) const {
    const auto found = values_.find(key);
    return found == values_.end() ? otherwise : std::strtol(found->second.c_str(), nullptr, 10);
  }

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace tessera::faults
