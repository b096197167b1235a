// trainer/progress_line.h — how far a training is: one line that rewrites itself on a terminal,
// a line now and then elsewhere.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::trainer {

/// Set by `tessera train` for its ranks, whose output goes through a pipe, if its own goes to a
/// terminal: the number of its columns.
inline constexpr const char* kTerminalVariable = "TESSERA_TERMINAL";

/// The text without its least important parts (memory, waiting, time per step), so that it has at
/// most `width` columns; cut if it must be. Parts stand between " | ".
std::string fitted(std::string text, std::size_t width);

/// The text with its first line cut at " | " into lines of at most `width` columns, where the parts
/// allow it; the new ones are indented as far as the words behind "judged". Other lines may be of a
/// text that was written, and stay.
std::string wrapped(const std::string& text, std::size_t width);

class ProgressLine {
 public:
  explicit ProgressLine(std::int64_t num_steps);

  /// Whether step `step` (from 1) is to be shown: the first, the last, and in between one every
  /// tenth of a second on a terminal, every two seconds elsewhere.
  bool is_due(std::int64_t step) const;
  void show(std::int64_t step, const std::string& text);
  /// What is said in between, as a terminal has room for it.
  std::string in_between(const std::string& text) const;
  /// Before anything else is printed: what comes next begins on a line of its own.
  void end();

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t num_steps_;
  bool is_terminal_;
  bool is_open_ = false;  // the cursor is behind a text
  std::size_t width_ = 0;
  Clock::time_point last_;
};

}  // namespace tessera::trainer
