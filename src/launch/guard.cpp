#include "guard.h"

#include <sys/prctl.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <set>
#include <system_error>

#include "process.h"
#include "scratch.h"

namespace tessera::launch {
namespace {

struct Record {
  int action;  // 1: add, 0: remove
  pid_t group;
};

[[noreturn]] void guard_main(int from_launcher, const std::string& scratch_dir) {
  // A session of its own keeps signals of the terminal and of the launcher's group away.
  setsid();
  prctl(PR_SET_NAME, "tessera-guard");
  if (from_launcher != 3) dup2(from_launcher, 3);
  for (int fd = 0; fd < 3; ++fd) close(fd);
  close_range(4, ~0U, 0);
  std::set<pid_t> groups;
  Record record{};
  while (true) {
    const ssize_t size = read(3, &record, sizeof(record));
    if (size < 0 && errno == EINTR) continue;
    if (size != sizeof(record)) break;
    if (record.action == 1) {
      groups.insert(record.group);
    } else {
      groups.erase(record.group);
    }
  }
  for (const pid_t group : groups) kill(-group, SIGKILL);
  if (!scratch_dir.empty()) remove_scratch(scratch_dir);
  _exit(0);
}

}  // namespace

Guard::Guard(const std::string& scratch_dir) {
  Pipe pipe = make_pipe();
  pid_ = fork();
  if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid_ == 0) {
    pipe.write_end.reset();
    guard_main(pipe.read_end.get(), scratch_dir);
  }
  to_guard_ = std::move(pipe.write_end);
}

Guard::~Guard() {
  to_guard_.reset();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guard::add(pid_t group) { tell(group, 1); }
void Guard::remove(pid_t group) { tell(group, 0); }

void Guard::tell(pid_t group, int action) {
  const Record record{action, group};
  // A guard that was killed costs the job its protection, nothing else.
  [[maybe_unused]] const ssize_t written = write(to_guard_.get(), &record, sizeof(record));
}

}  // namespace tessera::launch
