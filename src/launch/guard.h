// launch/guard.h — what remains to be done if the launcher is killed.
//
// The parent-death signal ends the ranks themselves, but not the processes they have started. The
// guard is a forked child that waits for the launcher's end of a pipe to close and then kills the
// process groups it was told of and removes the launcher's scratch folder. Every child tells the
// guard of itself before it becomes its program, so there is no moment at which the launcher's
// death goes unnoticed.

#pragma once

#include <string>

#include <sys/types.h>

#include "file_descriptor.h"

namespace tessera::launch {

class Guard {
 public:
  /// Forks the guard. `scratch_dir`, which need not exist yet, is removed when the launcher ends,
  /// however it ends.
  explicit Guard(const std::string& scratch_dir);
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Lets the guard finish and waits for it; a matter of microseconds.
  ~Guard();

  /// May be called between fork and exec.
  void add(pid_t group);
  void remove(pid_t group);
  pid_t pid() const noexcept { return pid_; }

 private:
  void tell(pid_t group, int action);

  pid_t pid_ = -1;
  FileDescriptor to_guard_;
};

}  // namespace tessera::launch
