// tessera/launch/launch_error.h — a failure of the launcher itself, told in three lines.

#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tessera::launch {

/// Says what happened, why, and what to try, and carries the exit code of the program.
class LaunchError : public std::runtime_error {
 public:
  LaunchError(int exit_code, const std::string& what, std::string why, std::string try_next)
      : std::runtime_error(what),
        exit_code_(exit_code),
        why_(std::move(why)),
        try_next_(std::move(try_next)) {
    // Whatever was tried: it needed a descriptor, and only this helps.
    if (why_.find(std::generic_category().message(EMFILE)) != std::string::npos) {
      try_next_ = "raise the limit of open files: ulimit -n 65536";
    }
  }

  int exit_code() const noexcept { return exit_code_; }
  const std::string& why() const noexcept { return why_; }
  const std::string& try_next() const noexcept { return try_next_; }

  /// Returns the three lines `error:`, `why:` and `try:`, each ended by a newline.
  std::string text() const {
    return std::string("error: ") + what() + "\n  why: " + why_ + "\n  try: " + try_next_ + "\n";
  }

 private:
  int exit_code_;
  std::string why_;
  std::string try_next_;
};

}  // namespace tessera::launch
