#include "checkpoint/root_lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint {
namespace {

// flock belongs to the open file, which a forked child shares and would hold after its parent is
// gone; so children close it before anything else. Locks of fcntl belong to the process, but go
// when any descriptor of the file is closed, such as that of a program that copies the folder.
struct Held {
  std::mutex mutex;
  std::vector<int> fds;
};

Held& held() {
  static Held* const all = [] {
    static Held* made = new Held;  // never destroyed: saves may outlive static objects
    ::pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                     [] {
                       for (const int fd : made->fds) ::close(fd);
                       made->fds.clear();
                       made->mutex.unlock();
                     });
    return made;
  }();
  return *all;
}

}  // namespace

RootLock::RootLock(const std::string& root, Disk& disk) : owner_(::getpid()) {
  const std::string path = root + "/.lock";
  Held& all = held();
  const std::lock_guard guard(all.mutex);  // no fork between the open and the note of it
  all.fds.reserve(all.fds.size() + 1);
  // Nobody else may open it: whoever can read a file can lock it.
  fd_ = disk.open_lock(path);
  if (fd_ < 0) throw_write_error("create", path);
  struct stat facts{};
  if (::fstat(fd_, &facts) == 0 && (facts.st_mode & 077) != 0 && facts.st_uid == ::geteuid()) {
    ::fchmod(fd_, 0600);  // of an earlier version
  }
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd_);
    throw Error(ErrorKind::kWrite, "checkpoint.save: another process is saving into " + root +
                                       ". Give every job a folder of its own.");
  }
  all.fds.push_back(fd_);
}

RootLock::~RootLock() {
  if (!is_ours()) return;  // closed by the fork
  Held& all = held();
  const std::lock_guard guard(all.mutex);
  std::erase(all.fds, fd_);
  ::flock(fd_, LOCK_UN);  // for everybody who may still have the file open
  ::close(fd_);
}

bool RootLock::is_ours() const noexcept { return owner_ == ::getpid(); }

}  // namespace tessera::checkpoint
