#include "report/run_facts.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace tessera::workloads::report {

std::string command_text(const std::vector<std::string>& words) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += ' ';
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
      text += word;
      continue;
    }
    text += '\'';
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    text += '\'';
  }
  return text;
}

std::string typed_command() {
  if (const char* typed = std::getenv(kCommandVariable)) return typed;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return command_text(words);
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

nlohmann::ordered_json described(const std::vector<std::string>& files) {
  auto list = nlohmann::ordered_json::array();
  for (const std::string& path : files) {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    list.push_back({{"path", path}, {"bytes", nullptr}});
    if (!error) list.back()["bytes"] = bytes;
  }
  return list;
}

}  // namespace tessera::workloads::report
