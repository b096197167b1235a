// launch/process.h — starting a child that cannot outlive the launcher.

#pragma once

#include <csignal>
#include <set>
#include <string>
#include <vector>

#include <sys/types.h>

#include "file_descriptor.h"

namespace tessera::launch {

class Guard;

/// What to run and with which files. A descriptor of -1 means /dev/null for stdin and the
/// launcher's own file for stdout and stderr.
struct ProcessSpec {
  std::string path;
  std::vector<std::string> arguments;    // the first one is the name the program sees
  std::vector<std::string> environment;  // NAME=value
  int stdin_fd = -1;
  int stdout_fd = -1;
  int stderr_fd = -1;
  int inherited_fd = -1;  // stays open in the child under the same number
};

/// Signal dispositions and mask of the launcher as it was started; children get them back.
struct SignalState {
  sigset_t mask;
  struct sigaction on_pipe;

  /// Blocks the signals the launcher reads through a signalfd, except those that are ignored, and
  /// ignores SIGPIPE. Returns the state before.
  static SignalState take_over();
  void restore() const;
};

/// The signals the launcher reads through a signalfd.
sigset_t handled_signals();

/// Starts a process in a process group of its own, with SIGKILL as its parent-death signal, and has
/// it told to the guard before its program begins. Throws std::system_error with the errno of exec
/// if the program cannot be executed.
pid_t spawn(const ProcessSpec& spec, const SignalState& signals, Guard& guard);

/// A pipe whose two ends close on exec.
struct Pipe {
  FileDescriptor read_end;
  FileDescriptor write_end;
};
Pipe make_pipe();

/// Returns the usual name, `SIGKILL` for 9.
std::string signal_name(int signal_number);

/// Returns whether a process of this group is left.
bool group_exists(pid_t group);

/// Returns the children of this process, adopted ones included.
std::vector<pid_t> child_processes();

/// Returns the users of the processes that descend from this one.
std::set<uid_t> users_of_descendants();

}  // namespace tessera::launch
