// settings/usage.h — wrong words on the command line: one line, a suggestion, exit code 2.

#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::settings {

/// A mistake of the caller; its text is the whole line after `error: `.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Returns the candidate that is closest to `word`, empty if none is close.
std::string closest(std::string_view word, const std::vector<std::string>& candidates);

/// Returns `: did you mean x?`, or an empty string if no candidate is close.
std::string suggestion(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace tessera::settings
