#include "job_text.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

namespace tessera::cli {

int64_t seconds_since(int64_t begin_ns) {
  const auto now = static_cast<int64_t>(time(nullptr));
  return std::max<int64_t>(now - begin_ns / 1'000'000'000, 0);
}

std::string duration_text(int64_t seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%ld:%02ld:%02ld", static_cast<long>(seconds / 3600),
                static_cast<long>(seconds / 60 % 60), static_cast<long>(seconds % 60));
  return text;
}

std::string command_text(const std::vector<std::string>& words, std::size_t longest) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = ' ';
  }
  return text.size() > longest ? text.substr(0, longest - 3) + "..." : text;
}

}  // namespace tessera::cli
