#include "trainer/progress_line.h"

#include <cstdio>
#include <cstdlib>

namespace tessera::trainer {

ProgressLine::ProgressLine(std::int64_t num_steps)
    : num_steps_(num_steps), is_terminal_(std::getenv(kTerminalVariable) != nullptr) {}

bool ProgressLine::is_due(std::int64_t step) const {
  const auto pause = std::chrono::milliseconds(is_terminal_ ? 100 : 2000);
  return step == 1 || step == num_steps_ || Clock::now() - last_ >= pause;
}

void ProgressLine::show(std::int64_t step, const std::string& text) {
  last_ = Clock::now();
  if (is_terminal_) {
    // Back to the start, the text, and nothing of a longer one behind it.
    std::printf("\r%s\x1b[K%s", text.c_str(), step == num_steps_ ? "\n" : "");
  } else {
    std::printf("%s\n", text.c_str());
  }
  std::fflush(stdout);
}

}  // namespace tessera::trainer
