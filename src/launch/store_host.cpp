#include "store_host.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "comm/store/server.h"
#include "core/listening.h"
#include "tessera/launch/exit_code.h"

extern char** environ;

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

constexpr char kNoStore[] = "run: the store of the job cannot be started";
constexpr size_t kMostTurnedAway = 1024;  // before other work is looked at
constexpr std::chrono::seconds kPauseOfStarting{1};

// Where `pip install` puts the worker, in an environment whose programs are in `prefix`/bin.
void add_places_in_python_packages(const fs::path& prefix, std::vector<fs::path>& places) {
  for (const char* library : {"lib", "lib64"}) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(prefix / library, ignored)) {
      if (!entry.path().filename().string().starts_with("python3.")) continue;
      for (const char* packages : {"site-packages", "dist-packages"}) {
        places.push_back(entry.path() / packages / "tessera/bin/tessera-worker");
      }
    }
  }
}

}  // namespace

std::string find_worker_program() {
  if (const char* named = std::getenv("TESSERA_WORKER"); named != nullptr && *named != '\0') {
    return access(named, X_OK) == 0 ? named : "";
  }
  std::error_code ignored;
  std::vector<fs::path> folders = {fs::read_symlink("/proc/self/exe", ignored).parent_path()};
  // The name the launcher was called by may be a link into another folder.
  if (const auto* called = reinterpret_cast<const char*>(getauxval(AT_EXECFN))) {
    folders.push_back(fs::absolute(called, ignored).parent_path());
  }
  for (const fs::path& folder : folders) {
    std::vector<fs::path> places = {folder / "tessera-worker",
                                    folder / "../libexec/tessera/tessera-worker",
                                    folder / "../lib/tessera/tessera-worker"};
    add_places_in_python_packages(folder.parent_path(), places);
    for (const fs::path& place : places) {
      if (access(place.c_str(), X_OK) == 0 && fs::is_regular_file(place, ignored)) {
        return place.lexically_normal().string();
      }
    }
  }
  return "";
}

StoreHost::StoreHost(EventLoop& loop, Guard& guard, FileDescriptor listening, Start start,
                     Events events)
    : loop_(loop),
      guard_(guard),
      listening_(std::move(listening)),
      start_(std::move(start)),
      events_(std::move(events)),
      is_for_job_(!events_.is_of_job) {
  await_callers();
}

StoreHost::~StoreHost() {
  loop_.cancel(pause_);
  if (listening_.is_open()) loop_.unwatch(listening_.get());
  if (helper_ < 0) return;
  kill(-helper_, SIGKILL);
  while (waitpid(helper_, nullptr, 0) < 0 && errno == EINTR) {
  }
  guard_.remove(helper_);
}

void StoreHost::await_callers() {
  loop_.watch(listening_.get(), POLLIN, [this](short) { on_callers(); });
}

// Who waits stays in line, so the loop would be told of them again and again.
void StoreHost::pause(std::chrono::nanoseconds delay) {
  loop_.unwatch(listening_.get());
  loop_.cancel(pause_);
  pause_ = loop_.after(delay, [this] { await_callers(); });
}

void StoreHost::on_callers() {
  if (!events_.on_stranger) return start_helper();
  const Clock::time_point begin = loop_.now();
  const std::optional<CallerQueue> queue = callers_at(listening_.get());
  // Where the kernel does not tell who they are, a store for anybody is better than none at all.
  if (!queue) return start_helper();
  if (is_asked_by_job(*queue)) return start_helper();
  for (const Caller& caller : queue->callers) events_.on_stranger(caller);
  turn_away(listening_.get(), std::clamp<size_t>(queue->length, 1, kMostTurnedAway));
  // A long table takes long to read, and a flood makes one.
  pause(std::max<std::chrono::nanoseconds>(core::kPauseOfAccepting, 10 * (loop_.now() - begin)));
}

bool StoreHost::is_asked_by_job(const CallerQueue& queue) {
  bool is_asked = false;
  std::set<std::string> judged;  // a flood is of few
  for (const Caller& caller : queue.callers) {
    if (!judged.insert(caller.text()).second || !events_.is_of_job(caller)) continue;
    is_asked = true;
    is_for_job_ = is_for_job_ || caller.user;
  }
  return is_asked;
}

void StoreHost::start_helper() {
  try {
    Pipe life_line = make_pipe();
    helper_ = start_(listening_.get(), life_line.read_end.get());
    life_line_ = std::move(life_line.write_end);
  } catch (const LaunchError& error) {
    return on_no_store(error);
  } catch (const std::system_error& error) {
    return on_no_store({kExitRendezvous, kNoStore, error.what(),
                        "what the system lacks; `ulimit -a` shows its limits"});
  }
  was_used_ = true;
  // The helper takes who comes; the launcher keeps the socket in case that it cannot.
  loop_.unwatch(listening_.get());
}

void StoreHost::on_no_store(const LaunchError& error) {
  if (!is_for_job_) {
    if (const auto queue = callers_at(listening_.get())) is_asked_by_job(*queue);
  }
  if (is_for_job_) {
    stop_listening();
    return events_.fail(error);
  }
  if (!has_warned_) {
    events_.warn(std::string(error.what()) + " (" + error.why() +
                 "); it is not known who asks, so the job goes on");
  }
  has_warned_ = true;
  pause(kPauseOfStarting);
}

// A listening socket that nobody accepts from would make the ranks wait instead of failing.
void StoreHost::stop_listening() {
  loop_.unwatch(listening_.get());
  listening_.reset();
}

StoreHost::Start job_store(const core::Secret& secret, Guard& guard) {
  return [secret, &guard](int listening, int life_line) {
    const pid_t launcher = getpid();
    const pid_t pid = fork();
    if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (pid > 0) {
      setpgid(pid, pid);  // also done by the child; whoever comes first
      return pid;
    }
    setpgid(0, 0);
    guard.add(getpid());
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(128 + SIGKILL);
    prctl(PR_SET_NAME, "tessera-store");
    // Nothing of the launcher's stays open: not the guard's pipe, nor what the ranks write into.
    const int null_file = open("/dev/null", O_RDWR);
    const int listener_copy = fcntl(listening, F_DUPFD, 10);
    const int life_line_copy = fcntl(life_line, F_DUPFD, 10);
    for (int fd = 0; fd < 3; ++fd) dup2(null_file, fd);
    dup2(listener_copy, 3);
    dup2(life_line_copy, 4);
    close_range(5, ~0U, 0);
    comm::store::Server(3, secret).run(4);
    _exit(0);
  };
}

StoreHost::Start torch_store(const std::string& host, const SignalState& signals, Guard& guard,
                             std::function<void(const std::string&)> warn) {
  return [host, &signals, &guard, warn = std::move(warn), has_warned = false](
             int listening, int life_line) mutable -> pid_t {
    const std::string program = find_worker_program();
    if (program.empty()) {
      throw LaunchError(kExitConfiguration, "run: a rank asks for torch's store, and there is none",
                        "there is no tessera-worker program beside tessera",
                        "set TESSERA_WORKER to its path, or `import tessera` before "
                        "init_process_group");
    }
    ProcessSpec spec;
    spec.path = program;
    spec.arguments = {program, "store", "--fd", std::to_string(listening), "--host", host};
    for (char** entry = environ; *entry != nullptr; ++entry) spec.environment.emplace_back(*entry);
    spec.stdin_fd = life_line;
    spec.inherited_fd = listening;
    const pid_t pid = spawn(spec, signals, guard);
    if (!std::exchange(has_warned, true)) {
      warn(
          "a program uses torch's own store at MASTER_PORT, which asks for no secret: whoever "
          "reaches the port can change it; `import tessera` before init_process_group avoids it "
          "(docs/security.md)");
    }
    return pid;
  };
}

bool StoreHost::on_child_exit(pid_t pid, int status) {
  if (pid != helper_) return false;
  guard_.remove(helper_);
  helper_ = -1;
  const std::string how = WIFSIGNALED(status) ? signal_name(WTERMSIG(status))
                                              : "exit code " + std::to_string(WEXITSTATUS(status));
  // It serves until it is killed: whatever else ends it has kept it from starting. What it lacked
  // while it met its callers, strangers may have taken.
  if (WIFSIGNALED(status) || WEXITSTATUS(status) == kExitRendezvous) {
    stop_listening();
    events_.warn("the store ended by " + how + "; the ranks go on, but new groups cannot be made");
  } else {
    on_no_store({kExitRendezvous, kNoStore, "tessera-worker ended with " + how,
                 "`tessera doctor`; what the program said is above"});
  }
  return true;
}

}  // namespace tessera::launch
