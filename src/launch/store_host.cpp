#include "store_host.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "comm/store/server.h"
#include "tessera/launch/exit_code.h"

extern char** environ;

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

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
                     std::function<void(const std::string&)> warn,
                     std::function<void(const LaunchError&)> fail)
    : loop_(loop),
      guard_(guard),
      listening_(std::move(listening)),
      start_(std::move(start)),
      warn_(std::move(warn)),
      fail_(std::move(fail)) {
  loop_.watch(listening_.get(), POLLIN, [this](short) { start_helper(); });
}

StoreHost::~StoreHost() {
  if (listening_.is_open()) loop_.unwatch(listening_.get());
  if (helper_ < 0) return;
  kill(-helper_, SIGKILL);
  while (waitpid(helper_, nullptr, 0) < 0 && errno == EINTR) {
  }
  guard_.remove(helper_);
}

void StoreHost::start_helper() {
  was_used_ = true;
  loop_.unwatch(listening_.get());
  // Whatever happens below, the launcher's own copy is closed at the end: a listening socket that
  // nobody accepts from would make the ranks wait instead of failing at once.
  const FileDescriptor listening = std::move(listening_);
  try {
    Pipe life_line = make_pipe();
    helper_ = start_(listening.get(), life_line.read_end.get());
    life_line_ = std::move(life_line.write_end);
  } catch (const LaunchError& error) {
    fail_(error);
  } catch (const std::system_error& error) {
    fail_({kExitRendezvous, "run: the store of the job cannot be started", error.what(),
           "what the system lacks; `ulimit -a` shows its limits"});
  }
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
  return [host, &signals, &guard, warn = std::move(warn)](int listening, int life_line) -> pid_t {
    const std::string program = find_worker_program();
    if (program.empty()) {
      throw LaunchError(kExitConfiguration, "run: a rank asks for torch's store, and there is none",
                        "there is no tessera-worker program beside tessera",
                        "set TESSERA_WORKER to its path, or `import tessera` before "
                        "init_process_group");
    }
    warn(
        "a program uses torch's own store at MASTER_PORT, which asks for no secret: whoever "
        "reaches "
        "the port can change it; `import tessera` before init_process_group avoids it "
        "(docs/security.md)");
    ProcessSpec spec;
    spec.path = program;
    spec.arguments = {program, "store", "--fd", std::to_string(listening), "--host", host};
    for (char** entry = environ; *entry != nullptr; ++entry) spec.environment.emplace_back(*entry);
    spec.stdin_fd = life_line;
    spec.inherited_fd = listening;
    return spawn(spec, signals, guard);
  };
}

bool StoreHost::on_child_exit(pid_t pid, int status) {
  if (pid != helper_) return false;
  guard_.remove(helper_);
  helper_ = -1;
  if (WIFSIGNALED(status)) {
    warn_("the store ended by " + signal_name(WTERMSIG(status)) +
          "; the ranks go on, but new groups cannot be made");
  } else {
    // It serves until it is killed: whatever else ends it has kept it from starting.
    fail_({kExitRendezvous, "run: the store of the job cannot be started",
           "tessera-worker ended with exit code " + std::to_string(WEXITSTATUS(status)),
           "`tessera doctor`; what the program said is above"});
  }
  return true;
}

}  // namespace tessera::launch
