#include "trainer/progress_line.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace tessera::trainer {
namespace {

constexpr std::size_t kUsualWidth = 80;
constexpr std::string_view kIndent = "         ";  // as wide as "judged   "

// Takes out what stands from `begin` up to the first of `ends`, or up to the end.
void take_out(std::string& text, const std::string& begin, const std::string& end) {
  const std::size_t from = text.find(begin);
  if (from == std::string::npos) return;
  const std::size_t to = text.find(end, from + begin.size());
  text.erase(from, to == std::string::npos ? to : to - from);
}

}  // namespace

std::string fitted(std::string text, std::size_t width) {
  if (text.size() > width) take_out(text, " | mem ", " | ");
  if (text.size() > width) take_out(text, " (exposed comm ", " | ");
  // The time of a step is the part that ends with " ms".
  if (text.size() > width) {
    const std::size_t end = text.find(" ms | ");
    const std::size_t begin = end == std::string::npos ? end : text.rfind(" | ", end);
    if (begin != std::string::npos) text.erase(begin, end + 3 - begin);
  }
  // Then whole parts from the end, and of the last one what there is room for.
  while (text.size() > width && text.rfind(" | ") != std::string::npos) {
    text.erase(text.rfind(" | "));
  }
  if (text.size() > width) text.resize(width);
  return text;
}

std::string wrapped(const std::string& text, std::size_t width) {
  constexpr std::string_view kBar = " | ";
  const std::string first = text.substr(0, text.find('\n'));
  std::string cut;
  std::size_t column = 0;
  for (std::size_t begin = 0; begin <= first.size();) {
    const std::size_t end = std::min(first.find(kBar, begin), first.size());
    const std::size_t columns = end - begin;
    if (begin > 0 && column + kBar.size() + columns > width) {
      cut.append("\n").append(kIndent);
      column = kIndent.size();
    } else if (begin > 0) {
      cut.append(kBar);
      column += kBar.size();
    }
    cut.append(first, begin, columns);
    column += columns;
    begin = end + kBar.size();
  }
  return cut + text.substr(first.size());
}

ProgressLine::ProgressLine(std::int64_t num_steps) : num_steps_(num_steps) {
  const char* columns = std::getenv(kTerminalVariable);
  is_terminal_ = columns != nullptr;
  if (!is_terminal_) return;
  const long width = std::strtol(columns, nullptr, 10);
  width_ = width > 1 ? static_cast<std::size_t>(width) : kUsualWidth;
}

bool ProgressLine::is_due(std::int64_t step) const {
  const auto pause = std::chrono::milliseconds(is_terminal_ ? 100 : 2000);
  return step == 1 || step == num_steps_ || Clock::now() - last_ >= pause;
}

void ProgressLine::show(std::int64_t step, const std::string& text) {
  last_ = Clock::now();
  if (is_terminal_) {
    // Back to the start, the text, and nothing of a longer one behind it. The last column stays
    // free: some terminals begin a new line there.
    is_open_ = step != num_steps_;
    std::printf("\r%s\x1b[K%s", fitted(text, width_ - 1).c_str(), is_open_ ? "" : "\n");
  } else {
    std::printf("%s\n", text.c_str());
  }
  std::fflush(stdout);
}

std::string ProgressLine::in_between(const std::string& text) const {
  return is_terminal_ ? wrapped(text, width_) : text;
}

void ProgressLine::end() {
  if (!is_open_) return;
  is_open_ = false;
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace tessera::trainer
