// cli/resume_flags.h — the words of a call that goes on with a run.
//
// `tessera` and `tessera-worker` read them alike.

#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// The folder of the run that `words` go on with; empty if there is none.
inline std::string resumed_folder(const std::vector<std::string>& words) {
  std::string folder;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--resume" && i + 1 < words.size()) folder = words[i + 1];
    if (words[i].starts_with("--resume=")) folder = words[i].substr(9);
  }
  return folder;
}

/// `words` with the configuration of the run that they resume, unless they name another.
inline std::vector<std::string> with_resumed_config(std::vector<std::string> words) {
  for (const std::string& word : words) {
    if (word == "--config" || word.starts_with("--config=")) return words;
  }
  const std::string folder = resumed_folder(words);
  if (!folder.empty()) words.insert(words.begin(), {"--config", folder + "/config.toml"});
  return words;
}

}  // namespace tessera::cli
