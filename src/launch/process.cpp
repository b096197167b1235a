#include "process.h"

#include <fcntl.h>
#include <sys/prctl.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "guard.h"

namespace tessera::launch {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const std::string& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

// Places `from` at number `to`, open across exec.
bool place(int from, int to) {
  if (from == to) return fcntl(to, F_SETFD, 0) == 0;
  return dup2(from, to) == to;
}

std::vector<pid_t> children_of(const std::string& process, const std::string& thread) {
  std::vector<pid_t> children;
  std::ifstream file("/proc/" + process + "/task/" + thread + "/children");
  for (pid_t pid = 0; file >> pid;) children.push_back(pid);
  return children;
}

// Runs between fork and exec: system calls only.
[[noreturn]] void become(const ProcessSpec& spec, char* const* arguments, char* const* environment,
                         const SignalState& signals, Guard& guard, pid_t launcher, int null_fd,
                         int report_fd) {
  setpgid(0, 0);
  guard.add(getpid());
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have died before the line above took effect.
  if (getppid() != launcher) _exit(128 + SIGKILL);
  const bool placed = place(spec.stdin_fd >= 0 ? spec.stdin_fd : null_fd, 0) &&
                      (spec.stdout_fd < 0 || place(spec.stdout_fd, 1)) &&
                      (spec.stderr_fd < 0 || place(spec.stderr_fd, 2)) &&
                      (spec.inherited_fd < 0 || fcntl(spec.inherited_fd, F_SETFD, 0) == 0);
  if (placed) {
    signals.restore();
    execve(spec.path.c_str(), arguments, environment);
  }
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(report_fd, &error, sizeof(error));
  _exit(127);
}

}  // namespace

sigset_t handled_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) sigaddset(&set, number);
  return set;
}

SignalState SignalState::take_over() {
  SignalState before{};
  sigset_t handled = handled_signals();
  // What the caller ignores (nohup) stays ignored; once blocked it would be delivered.
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction current{};
    sigaction(number, nullptr, &current);
    if (current.sa_handler == SIG_IGN) sigdelset(&handled, number);
  }
  sigprocmask(SIG_BLOCK, &handled, &before.mask);
  // A parent that ignores SIGCHLD would make the kernel throw exit codes away.
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, &before.on_pipe);
  return before;
}

void SignalState::restore() const {
  sigaction(SIGPIPE, &on_pipe, nullptr);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
}

pid_t spawn(const ProcessSpec& spec, const SignalState& signals, Guard& guard) {
  const std::vector<char*> arguments = pointers(spec.arguments);
  const std::vector<char*> environment = pointers(spec.environment);
  const FileDescriptor null_file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  Pipe report = make_pipe();
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid == 0) {
    become(spec, arguments.data(), environment.data(), signals, guard, launcher, null_file.get(),
           report.write_end.get());
  }
  setpgid(pid, pid);  // also done by the child; whoever comes first
  report.write_end.reset();
  int error = 0;
  ssize_t size = 0;
  do {
    size = read(report.read_end.get(), &error, sizeof(error));
  } while (size < 0 && errno == EINTR);
  if (size == static_cast<ssize_t>(sizeof(error))) {
    guard.remove(pid);
    throw std::system_error(error, std::generic_category(), spec.path);
  }
  return pid;
}

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

std::string signal_name(int signal_number) {
  const char* name = sigabbrev_np(signal_number);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(signal_number);
}

bool group_exists(pid_t group) { return kill(-group, 0) == 0 || errno == EPERM; }

std::vector<pid_t> child_processes() {
  const std::string self = std::to_string(getpid());
  return children_of(self, self);
}

std::set<uid_t> users_of_descendants() {
  std::set<uid_t> users;
  std::vector<pid_t> unseen = child_processes();
  while (!unseen.empty()) {
    const std::string pid = std::to_string(unseen.back());
    unseen.pop_back();
    // Not the owner of its folder there: that is root, if the process has changed its user itself.
    std::ifstream status("/proc/" + pid + "/status");
    for (std::string word; status >> word;) {
      uid_t real = 0;
      uid_t effective = 0;
      if (word == "Uid:" && status >> real >> effective) users.insert(effective);
    }
    // A child of a thread other than the first is a child of the process all the same.
    std::error_code ignored;
    for (const auto& task :
         std::filesystem::directory_iterator("/proc/" + pid + "/task", ignored)) {
      const std::vector<pid_t> more = children_of(pid, task.path().filename().string());
      unseen.insert(unseen.end(), more.begin(), more.end());
    }
  }
  return users;
}

}  // namespace tessera::launch
