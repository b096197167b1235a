// data/json_lines.h — a line of JSON with the numbers that JSON has no words for. No LibTorch.

#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "data/numbers.h"

namespace tessera::workloads::data {

/// The line with numbers that are not finite (NaN and -Infinity as programs write them, 1e999) as
/// texts, so that they are named, or stand for no value, as they do in cells.
inline std::string with_texts_for_infinities(std::string_view line) {
  constexpr std::string_view kOfWords =
      "+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::string text;
  bool is_quoted = false;
  for (std::size_t at = 0; at < line.size();) {
    const bool is_escape = is_quoted && line[at] == '\\';
    if (line[at] == '"') is_quoted = !is_quoted;
    const std::size_t end =
        is_quoted ? at : std::min(line.find_first_not_of(kOfWords, at), line.size());
    if (end == at) {
      text += line.substr(at, is_escape ? 2 : 1);
      at += is_escape ? 2 : 1;
      continue;
    }
    const std::string_view word = line.substr(at, end - at);
    double value = 0;
    const bool is_odd = parse_real(word, value) && !std::isfinite(value);
    text += is_odd ? '"' + std::string(word) + '"' : std::string(word);
    at = end;
  }
  return text;
}

/// Something else than an object if the line is none.
template <class Json>
Json json_of_line(std::string_view line) {
  Json record = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (record.is_object()) return record;
  return Json::parse(with_texts_for_infinities(line), nullptr, /*allow_exceptions=*/false);
}

}  // namespace tessera::workloads::data
