#include "settings/help_text.h"

#include <algorithm>
#include <vector>

namespace tessera::settings {
namespace {

std::size_t indent_of(std::string_view line) {
  const std::size_t first = line.find_first_not_of(' ');
  return first == std::string_view::npos ? line.size() : first;
}

// Where the text of "  --flag VALUE   text" begins; 0 if the line has no such gap.
std::size_t text_column(std::string_view line) {
  const std::size_t gap = line.find("  ", indent_of(line));
  if (gap == std::string_view::npos) return 0;
  const std::size_t column = line.find_first_not_of(' ', gap);
  return column == std::string_view::npos ? 0 : column;
}

// Columns of UTF-8, which the help texts use for nothing but plain letters and dashes.
std::size_t columns_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

// Words of `text` behind `head`; later lines begin at `column`.
void fill(std::string& result, const std::string& head, std::string_view text, std::size_t column,
          std::size_t width) {
  std::string line = head;
  bool is_first = true;  // of its line
  while (!text.empty()) {
    // Where to read more stays together.
    const std::size_t begin = text.starts_with("More: ") ? 6 : 0;
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (word.empty()) continue;
    if (!is_first && columns_of(line) + 1 + columns_of(word) > width) {
      result += line + "\n";
      line.assign(column, ' ');
      is_first = true;
    }
    if (!is_first) line += ' ';
    line += word;
    is_first = false;
  }
  result += line + "\n";
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

// Whether `next` goes on with what `first` began: below a flag's text, or in a paragraph.
bool goes_on(std::string_view first, std::string_view next) {
  if (first.empty() || next.empty()) return false;
  if (indent_of(first) > 0) return indent_of(next) >= 16 && indent_of(next) > indent_of(first);
  const bool begins_anew = next.starts_with("More:") || next.starts_with("Exit codes:");
  return indent_of(next) == 0 && !begins_anew && text_column(first) == 0;
}

// Whether a line is the title of the flags below it: a word alone.
bool is_title(std::string_view line, std::string_view below) {
  return line.find(' ') == std::string_view::npos && !below.empty() && indent_of(below) > 0;
}

}  // namespace

std::string fitted_help(std::string_view text, std::size_t width) {
  const auto lines = lines_of(text);
  std::string result;
  for (std::size_t begin = 0; begin < lines.size();) {
    std::size_t end = begin + 1;
    while (end < lines.size() && goes_on(lines[begin], lines[end]) &&
           !is_title(lines[end], end + 1 < lines.size() ? lines[end + 1] : "")) {
      ++end;
    }
    const bool fits = std::all_of(lines.begin() + static_cast<long>(begin),
                                  lines.begin() + static_cast<long>(end),
                                  [&](std::string_view line) { return columns_of(line) <= width; });
    if (fits) {
      for (; begin < end; ++begin) result += std::string(lines[begin]) + "\n";
      continue;
    }
    const std::size_t own = text_column(lines[begin]);
    std::string joined(lines[begin].substr(own > 0 ? own : indent_of(lines[begin])));
    for (std::size_t i = begin + 1; i < end; ++i) {
      joined += " " + std::string(lines[i].substr(indent_of(lines[i])));
    }
    std::size_t column = end > begin + 1 ? indent_of(lines[begin + 1]) : own;
    if (column == 0) column = indent_of(lines[begin]);
    // A text that begins far to the right has no room there.
    if (column > width / 2 + 12) column = indent_of(lines[begin]) + 6;
    const std::string head(lines[begin].substr(0, own > 0 ? own : indent_of(lines[begin])));
    fill(result, head, joined, column, width);
    begin = end;
  }
  return result;
}

}  // namespace tessera::settings
