// checkpoint/root_lock.h — one save at a time under a root.

#pragma once

#include <sys/types.h>

#include <string>

#include "tessera/checkpoint/disk.h"

namespace tessera::checkpoint {

/// Holds the lock of a root as long as it lives, and no longer than its process: a child that was
/// forked meanwhile does not have it.
class RootLock {
 public:
  /// Throws Error(kWrite) if another save holds the lock, or the file cannot be made.
  explicit RootLock(const std::string& root, Disk& disk = Disk::real());
  RootLock(const RootLock&) = delete;
  RootLock& operator=(const RootLock&) = delete;
  ~RootLock();

  /// False in a forked child: what belongs to the save is not its to touch.
  bool is_ours() const noexcept;

 private:
  int fd_ = -1;
  pid_t owner_;
};

}  // namespace tessera::checkpoint
