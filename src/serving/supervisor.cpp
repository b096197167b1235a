// One process that watches over those that answer. It computes nothing and has no threads, so that
// it may fork at any time; tables and versions lie in memory that all of them share.

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "serving/model_info.h"
#include "serving/server_process.h"
#include "serving/updater.h"

namespace tessera::serving {
namespace {

using Clock = std::chrono::steady_clock;
using Log = std::function<void(const std::string&)>;

constexpr int kLate = 75;
constexpr int kBroken = 70;
// So many deaths in so much time: starting again does not help.
constexpr int kMostDeaths = 10;
constexpr std::chrono::seconds kDeathTime{10};

class Supervisor {
 public:
  Supervisor(Model& model, const ServerOptions& options, const Listener& data,
             const Listener* admin, Metrics& metrics, const Log& log)
      : model_(&model),
        options_(options),
        data_(data),
        admin_(admin),
        metrics_(metrics),
        log_(log) {
    ::sigemptyset(&signals_);
    for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) ::sigaddset(&signals_, number);
    ::sigprocmask(SIG_BLOCK, &signals_, &before_);
    signal_fd_ = ::signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signal_fd_ < 0) {
      throw std::system_error(errno, std::generic_category(), "serve: signals");
    }
  }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  ~Supervisor() {
    for (const Child& child : children_) ::kill(child.process, SIGKILL);
    for (const Child& child : children_) ::waitpid(child.process, nullptr, 0);
    ::close(signal_fd_);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
  }

  int run(const std::function<void()>& on_ready) {
    start_all();
    wait_until_ready();
    on_ready();
    while (!children_.empty()) {
      wait(is_draining_ ? 50 : 1000);
      if (is_draining_ && Clock::now() > until_) {
        log_("not drained in time");
        code_ = kLate;
        for (const Child& child : children_) ::kill(child.process, SIGKILL);
        until_ = Clock::time_point::max();
      }
    }
    return code_;
  }

 private:
  struct Child {
    pid_t process = 0;
    int number = -1;  // -1: the writer
    int ready = -1;   // the end of a pipe on which it says that it answers
    bool is_old = false;
    bool is_writer() const { return number < 0; }
  };

  void start_all() {
    ++package_;
    verifier_ = free_number();
    for (int i = 0; i < options_.processes; ++i) start(free_number());
    if (!options_.watched.empty()) start(-1);
  }

  int free_number() const {
    for (int number = 0;; ++number) {
      if (std::none_of(children_.begin(), children_.end(),
                       [=](const Child& child) { return child.number == number; })) {
        return number;
      }
    }
  }

  void start(int number) {
    int pipe_ends[2] = {-1, -1};
    if (::pipe2(pipe_ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      throw std::system_error(errno, std::generic_category(), "serve: a pipe");
    }
    std::fflush(nullptr);
    const pid_t parent = ::getpid();
    const pid_t process = ::fork();
    if (process < 0) throw std::system_error(errno, std::generic_category(), "serve: a process");
    if (process == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      ::sigprocmask(SIG_SETMASK, &before_, nullptr);
      ::close(signal_fd_);
      ::_exit(::getppid() == parent ? be(number, parent, pipe_ends[1]) : 0);
    }
    ::close(pipe_ends[1]);
    children_.push_back({process, number, pipe_ends[0], false});
  }

  // The life of a child.
  int be(int number, pid_t parent, int ready) const {
    const auto say_ready = [&] {
      const char yes = 'y';
      (void)!::write(ready, &yes, 1);
    };
    try {
      if (number < 0) return write_versions(say_ready);
      model_->give_up_writing();
      const ServerProcess process{data_,
                                  admin_,
                                  metrics_,
                                  number,
                                  package_,
                                  number == verifier_,
                                  [parent] { ::kill(parent, SIGHUP); },
                                  [parent] { ::kill(parent, SIGTERM); }};
      return run_server_process(*model_, options_, process, say_ready, log_);
    } catch (const std::exception& error) {
      log_(std::string("a process ends: ") + error.what());
      return kBroken;
    }
  }

  int write_versions(const std::function<void()>& say_ready) const {
    Model::Canary canary;
    if (!options_.canary.empty()) {
      auto now = model_->lease();
      canary = canary_of(options_.canary, options_.canary_bound, now.model());
    }
    model_->take_over_writing();
    sigset_t ends;
    ::sigemptyset(&ends);
    for (const int number : {SIGTERM, SIGINT}) ::sigaddset(&ends, number);
    ::sigprocmask(SIG_BLOCK, &ends, nullptr);
    ::signal(SIGHUP, SIG_IGN);
    Updater updater(*model_, metrics_.updates, options_.watched, canary, log_);
    updater.start();
    say_ready();
    int number = 0;
    ::sigwait(&ends, &number);
    return 0;
  }

  void wait_until_ready() {
    while (!is_draining_ && std::any_of(children_.begin(), children_.end(),
                                        [](const Child& child) { return child.ready >= 0; })) {
      wait(1000);
    }
  }

  // Sleeps until something happens, and does what there is to do.
  void wait(int milliseconds) {
    std::vector<pollfd> waits{{signal_fd_, POLLIN, 0}};
    for (const Child& child : children_) {
      if (child.ready >= 0) waits.push_back({child.ready, POLLIN, 0});
    }
    ::poll(waits.data(), waits.size(), milliseconds);
    signalfd_siginfo signal{};
    while (::read(signal_fd_, &signal, sizeof(signal)) == sizeof(signal)) {
      const auto number = static_cast<int>(signal.ssi_signo);
      if (number == SIGTERM || number == SIGINT) drain();
      if (number == SIGHUP) replace();
    }
    for (Child& child : children_) {
      char byte = 0;
      if (child.ready < 0 || ::read(child.ready, &byte, 1) < 0) continue;
      ::close(child.ready);  // ready, or dead
      child.ready = -1;
    }
    const bool is_waiting = std::any_of(children_.begin(), children_.end(), [](const Child& child) {
      return !child.is_old && child.ready >= 0;
    });
    if (is_replacing_ && !is_waiting) finish_replacing();
    bury();
  }

  void bury() {
    int status = 0;
    for (pid_t process = 0; (process = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto found = std::find_if(children_.begin(), children_.end(),
                                      [=](const Child& child) { return child.process == process; });
      if (found == children_.end()) continue;
      const Child child = *found;
      if (child.ready >= 0) ::close(child.ready);
      children_.erase(found);
      model_->release_process(process);
      forget_models();
      if (!child.is_writer()) {
        ProcessGauges& gauges = metrics_.processes[static_cast<std::size_t>(child.number)];
        gauges.connections = 0;
        gauges.queued_samples = 0;
      }
      const bool is_fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
      if (is_draining_ || child.is_old) {
        if (!is_fine && WIFEXITED(status)) code_ = std::max(code_, WEXITSTATUS(status));
        if (!is_fine && WIFSIGNALED(status)) code_ = std::max(code_, kLate);
        continue;
      }
      log_((child.is_writer() ? "the process that takes updates, " : "process ") +
           std::to_string(process) + (child.is_writer() ? "," : "") +
           (WIFSIGNALED(status) ? " died by signal " + std::to_string(WTERMSIG(status))
                                : " ended with " + std::to_string(WEXITSTATUS(status))) +
           "; another takes its place");
      ++metrics_.restarts;
      const auto now = Clock::now();
      std::erase_if(deaths_, [&](const auto& when) { return now - when > kDeathTime; });
      deaths_.push_back(now);
      if (deaths_.size() > kMostDeaths) {
        log_("processes die as soon as they are started");
        code_ = kBroken;
        drain();
      } else {
        start(child.number);
      }
    }
  }

  // Of earlier packages, when nobody answers with them any more.
  void forget_models() {
    const bool has_old = std::any_of(children_.begin(), children_.end(),
                                     [](const Child& child) { return child.is_old; });
    if (!has_old && models_.size() > 1) models_.erase(models_.begin(), models_.end() - 1);
  }

  void drain() {
    if (is_draining_) return;
    is_draining_ = true;
    until_ = Clock::now() + options_.drain_time + std::chrono::seconds(1);
    for (const Child& child : children_) ::kill(child.process, SIGTERM);
  }

  // Opens the package beside the old one, starts processes that answer with it, and lets the old
  // ones finish what they have.
  void replace() {
    if (is_draining_ || is_replacing_) return;
    std::unique_ptr<Model> next;
    try {
      if (options_.processes + 1 + static_cast<int>(children_.size()) > kMaxProcesses) {
        throw std::runtime_error("earlier processes have not ended yet");
      }
      next = std::make_unique<Model>(options_.package, options_.model);
      if (!has_same_inputs(next->lease().model(), model_->lease().model())) {
        throw std::runtime_error(
            options_.package +
            ": its inputs and outputs are not those of the model that is served");
      }
    } catch (const std::exception& error) {
      ++metrics_.reloads_refused;
      log_(std::string("the package was not opened again, the old one goes on: ") + error.what());
      return;
    }
    for (Child& child : children_) child.is_old = true;
    model_ = next.get();
    models_.push_back(std::move(next));
    start_all();
    is_replacing_ = true;
  }

  void finish_replacing() {
    is_replacing_ = false;
    ++metrics_.reloads;
    log_("serving step " + std::to_string(model_->current().step) + " of " + options_.package);
    for (const Child& child : children_) {
      if (child.is_old) ::kill(child.process, SIGTERM);
    }
  }

  Model* model_;  // of the children that are started from now on
  std::vector<std::unique_ptr<Model>> models_;
  bool is_replacing_ = false;
  std::int64_t package_ = 0;  // how often one was opened
  int verifier_ = 0;          // the process that compares its sums
  const ServerOptions& options_;
  const Listener& data_;
  const Listener* admin_;
  Metrics& metrics_;
  const Log& log_;
  sigset_t signals_{};
  sigset_t before_{};
  int signal_fd_ = -1;
  std::vector<Child> children_;
  std::vector<Clock::time_point> deaths_;
  bool is_draining_ = false;
  Clock::time_point until_ = Clock::time_point::max();
  int code_ = 0;
};

}  // namespace

int supervise(Model& model, const ServerOptions& options, const Listener& data,
              const Listener* admin, Metrics& metrics, const std::function<void()>& on_ready,
              const std::function<void(const std::string&)>& log) {
  Supervisor supervisor(model, options, data, admin, metrics, log);
  return supervisor.run(on_ready);
}

}  // namespace tessera::serving
