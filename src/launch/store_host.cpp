#include "store_host.h"

#include <poll.h>
#include <sys/auxv.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

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

StoreHost::StoreHost(EventLoop& loop, Guard& guard, const SignalState& signals,
                     const SocketAddress& address, std::function<void(const std::string&)> warn)
    : loop_(loop),
      guard_(guard),
      signals_(signals),
      warn_(std::move(warn)),
      listener_(listen_on(address)) {
  loop_.watch(listener_.fd.get(), POLLIN, [this](short) { start_helper(); });
}

StoreHost::~StoreHost() {
  if (listener_.fd.is_open()) loop_.unwatch(listener_.fd.get());
  if (helper_ < 0) return;
  kill(-helper_, SIGKILL);
  while (waitpid(helper_, nullptr, 0) < 0 && errno == EINTR) {
  }
  guard_.remove(helper_);
}

void StoreHost::start_helper() {
  was_used_ = true;
  loop_.unwatch(listener_.fd.get());
  const std::string program = find_worker_program();
  // Whatever happens below, the launcher's own copy is closed at the end: a listening socket that
  // nobody accepts from would make the ranks wait instead of failing at once.
  const FileDescriptor listening = std::move(listener_.fd);
  if (program.empty()) {
    warn_(
        "a rank asks for the store, but there is no tessera-worker program beside tessera; "
        "set TESSERA_WORKER to its path");
    return;
  }
  Pipe life_line = make_pipe();
  ProcessSpec spec;
  spec.path = program;
  spec.arguments = {program,  "store",
                    "--fd",   std::to_string(listening.get()),
                    "--host", listener_.address.host()};
  for (char** entry = environ; *entry != nullptr; ++entry) spec.environment.emplace_back(*entry);
  spec.stdin_fd = life_line.read_end.get();
  spec.inherited_fd = listening.get();
  try {
    helper_ = spawn(spec, signals_, guard_);
  } catch (const std::system_error& error) {
    warn_("the store cannot be started: " + std::string(error.what()));
    return;
  }
  life_line_ = std::move(life_line.write_end);
}

bool StoreHost::on_child_exit(pid_t pid, int status) {
  if (pid != helper_) return false;
  guard_.remove(helper_);
  helper_ = -1;
  const std::string how = WIFSIGNALED(status)
                              ? "by " + signal_name(WTERMSIG(status))
                              : "with exit code " + std::to_string(WEXITSTATUS(status));
  warn_("the store ended " + how + "; the ranks go on, but new groups cannot be made");
  return true;
}

}  // namespace tessera::launch
