// settings/config_file.h — configuration files: TOML without lists, with the line of every setting,
// so that what is wrong can be named by place.

#pragma once

#include <set>
#include <string>
#include <vector>

namespace tessera::settings {

struct FileSetting {
  std::string key;    // "section.key" of one in a section
  std::string value;  // without quotes
  int line = 0;       // from 1
};

/// Reads the settings of a TOML file, in the order of their lines. A word without quotes is taken
/// as a text. Throws launch::LaunchError, naming `verb`, file and line, for what is not
/// `key = value`, a key that stands twice, a section that is not one of `sections`, and a file that
/// cannot be read.
std::vector<FileSetting> read_config(const std::string& verb, const std::string& path,
                                     const std::set<std::string>& sections = {});

/// The same of a text, in any sections. `path` is what errors call it.
std::vector<FileSetting> settings_in(const std::string& verb, const std::string& path,
                                     const std::string& text);

}  // namespace tessera::settings
