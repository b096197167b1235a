// launch/scratch.h — the folder a launcher keeps small files in while its job runs.
//
// All launchers of a user share one folder of mode 0700, $TMPDIR/tessera-<uid>, or the next of a
// few such names if another user was quicker to take it. Each has a folder in it that is named by
// its process and holds a lock for as long as it lives; what launchers that were killed have left
// is removed by the next one.

#pragma once

#include <string>
#include <vector>

#include "file_descriptor.h"

namespace tessera::launch {

class Scratch {
 public:
  /// Chooses the path; nothing is there yet, so that a guard can be told first.
  Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  /// Removes the folder.
  ~Scratch();

  /// Makes the folder and removes those of launchers that are gone. Throws LaunchError.
  void make();

  const std::string& path() const noexcept { return path_; }

 private:
  std::string parent_;
  std::string path_;
  FileDescriptor lock_;
};

/// Removes a launcher's folder, and the one around it if it was the last.
void remove_scratch(const std::string& path);

/// Returns where launchers of this user make their folders from now on.
std::string scratch_parent();

/// Returns all folders in which launchers of this user may have theirs. Nobody else can put
/// anything there.
std::vector<std::string> scratch_parents();

/// Returns the names of such folders that somebody else has taken.
std::vector<std::string> taken_scratch_parents();

/// Returns whether the launcher whose folder this is still lives.
bool scratch_is_in_use(const std::string& folder);

}  // namespace tessera::launch
