// cli/config_file.h — configuration files, line by line, so that what is wrong can be named by
// place.

#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

struct Setting {
  std::string key;
  std::string value;  // without quotes
  int line = 0;       // from 1
};

/// Reads the `key = value` lines of `text`, a file called `path`. Throws launch::LaunchError,
/// naming `verb`, file and line, for what is not one: sections, lists, lines without a value, a key
/// that stands twice.
std::vector<Setting> settings_in(const std::string& verb, const std::string& path,
                                 const std::string& text);

/// The same of the file itself; throws also if it cannot be read.
std::vector<Setting> read_settings(const std::string& verb, const std::string& path);

}  // namespace tessera::cli
