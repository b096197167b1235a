#include "tessera/launch/job.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <ctime>
#include <memory>
#include <optional>
#include <set>
#include <system_error>

#include "environment.h"
#include "event_loop.h"
#include "guard.h"
#include "live_jobs.h"
#include "memory_kill.h"
#include "output.h"
#include "process.h"
#include "program.h"
#include "rank_group.h"
#include "rendezvous.h"
#include "scratch.h"
#include "secret.h"
#include "store_host.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/failure.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {
namespace {

// Time for ranks that use the store to notice a dead peer and to report what they were doing.
constexpr std::chrono::milliseconds kReportGrace{30};
constexpr std::chrono::seconds kFarewellLimit{2};

std::string name_from_time() {
  const time_t now = time(nullptr);
  tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", &parts);
  return std::string(text) + "-" + random_hex(3);
}

// One host's part of the job. Node 0 decides (starts, restarts, ends); the others follow.
class Job {
 public:
  Job(const RunOptions& options, Program program);
  ~Job();
  int run();

 private:
  bool leads() const { return options_.node_rank == 0; }
  void note(const std::string& line) { err_.print("tessera: " + line + "\n"); }
  void on_signals();
  void on_signal(int number);
  void on_children();

  void join_other_nodes();
  void on_member_message(int node, const Message& message);
  void on_member_lost(int node, const std::string& why);
  void on_leader_message(const Message& message);
  void obey(const Message& message);
  void on_leader_lost(const std::string& why);

  void start_attempt(int number);
  void listen_for_stores(const SocketAddress& address);
  core::Secret rank_secret() const;
  void start_ranks();
  void on_local_failure();
  void on_local_gone();
  void stop_everywhere();
  void on_node_gone(int node, std::vector<RankFailure> failures);
  void decide();
  void finish(int code);
  void report();
  int code_after_signal() const;
  std::chrono::milliseconds grace() const;
  std::string attempt_folder() const;

  const RunOptions& options_;
  const Program program_;
  const core::Secret secret_;
  const SignalState signals_ = SignalState::take_over();
  EventLoop loop_;
  Scratch scratch_;
  Guard guard_{scratch_.path()};
  std::shared_ptr<Console::OpenLine> out_line_ = std::make_shared<Console::OpenLine>();
  Console out_{loop_, STDOUT_FILENO, out_line_};
  Console err_{loop_, STDERR_FILENO,
               Console::line_shared_by(STDOUT_FILENO, STDERR_FILENO, out_line_)};
  FileDescriptor signal_file_;
  const int64_t begin_ns_ = wall_clock_ns();
  const int64_t memory_kills_before_ = num_memory_kills();

  Attempt attempt_;
  std::unique_ptr<StoreHost> store_;        // node 0's: of ranks with our runtime
  std::unique_ptr<StoreHost> torch_store_;  // and of programs that know LibTorch's only
  std::unique_ptr<RankGroup> ranks_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Member> member_;

  std::set<int> gone_nodes_;
  std::set<int> lost_nodes_;
  std::vector<RankFailure> failures_;
  bool is_stopping_ = false;
  int stop_signal_ = 0;   // the first signal the job was told to end by
  bool hurries_ = false;  // a signal came after the end: do not wait for slow readers
  std::optional<int> exit_code_;
  std::optional<LaunchError> error_;
};

Job::Job(const RunOptions& options, Program program)
    : options_(options), program_(std::move(program)), secret_(launcher_secret(options)) {
  scratch_.make();
  // Processes that outlive the rank that started them become children of the launcher.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const sigset_t handled = handled_signals();
  signal_file_ = FileDescriptor(signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  loop_.watch(signal_file_.get(), POLLIN, [this](short) { on_signals(); });
  attempt_.run_id = random_hex(16);
  attempt_.folder = name_from_time();
  if (!options.rendezvous_id.empty()) {
    attempt_.folder = options.rendezvous_id + "-" + attempt_.folder;
  }
  attempt_.job_name = options.rendezvous_id.empty() ? attempt_.folder : options.rendezvous_id;
}

Job::~Job() {
  ranks_.reset();
  store_.reset();
  torch_store_.reset();
}

int Job::run() {
  if (options_.num_nodes > 1) {
    join_other_nodes();
  } else {
    start_attempt(0);
  }
  while (!exit_code_ && !error_) loop_.run_once();
  // What is left to say must be read by someone: a signal ends the wait for a slow reader.
  const Clock::time_point farewell = Clock::now() + kFarewellLimit;
  const auto has_mail = [&] {
    return Clock::now() < farewell &&
           ((coordinator_ && coordinator_->has_unsent()) || (member_ && member_->has_unsent()));
  };
  while ((!out_.is_empty() || !err_.is_empty() || has_mail()) && !hurries_) {
    loop_.run_once(std::chrono::milliseconds(100));
  }
  if (error_) throw LaunchError(*error_);
  return *exit_code_;
}

void Job::on_signals() {
  signalfd_siginfo info{};
  bool child_changed = false;
  while (read(signal_file_.get(), &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo == SIGCHLD) {
      child_changed = true;
    } else {
      on_signal(static_cast<int>(info.ssi_signo));
    }
  }
  if (child_changed) on_children();
}

void Job::on_signal(int number) {
  if (exit_code_ || error_) {
    hurries_ = true;
    return;
  }
  const bool is_second = stop_signal_ != 0;
  if (!is_second) stop_signal_ = number;
  const bool kills = is_second && number == SIGINT;
  if (!is_second || kills) {
    const Message message{kills ? "kill" : "signal", {{"number", std::to_string(number)}}};
    if (coordinator_) coordinator_->broadcast(message);
    if (member_) member_->send(message);
  }
  if (!ranks_ || ranks_->is_gone()) {
    // Nothing runs here. Other hosts that still work have been told, and their end is awaited once.
    const bool awaits_others = options_.num_nodes > 1 && ranks_ && !is_second;
    if (!awaits_others) finish(exit_code_of_signal(stop_signal_));
  } else if (kills) {
    note("second SIGINT: killing the ranks");
    ranks_->kill_all();
  } else if (!is_second) {
    note(signal_name(number) + " received; the ranks have " +
         std::to_string(options_.shutdown_timeout.count() / 1000) + " s to end" +
         (number == SIGINT ? " (Ctrl-C again kills them)" : ""));
    ranks_->forward(number == SIGINT ? SIGINT : SIGTERM);
  }
}

void Job::on_children() {
  int status = 0;
  for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    std::set<pid_t> helpers = {guard_.pid()};
    bool was_store = false;
    for (const auto& store : {store_.get(), torch_store_.get()}) {
      if (store == nullptr) continue;
      was_store = was_store || store->on_child_exit(pid, status);
      if (store->helper() > 0) helpers.insert(store->helper());
    }
    if (was_store) continue;
    if (ranks_) ranks_->on_child_exit(pid, status, helpers);
  }
}

void Job::join_other_nodes() {
  if (leads()) {
    const Message identity{"welcome",
                           {{"run_id", attempt_.run_id},
                            {"job_name", attempt_.job_name},
                            {"folder", attempt_.folder}}};
    Coordinator::Events events;
    events.on_complete = [this] { start_attempt(0); };
    events.on_message = [this](int node, const Message& message) {
      on_member_message(node, message);
    };
    events.on_lost = [this](int node, const std::string& why) { on_member_lost(node, why); };
    events.on_timeout = [this](const LaunchError& error) { error_ = error; };
    events.note = [this](const std::string& line) { note(line); };
    coordinator_ =
        std::make_unique<Coordinator>(loop_, options_, secret_, identity, std::move(events));
    return;
  }
  Member::Events events;
  events.on_welcome = [this](const Message& message) {
    attempt_.run_id = message.text("run_id");
    attempt_.job_name = message.text("job_name");
    attempt_.folder = message.text("folder");
  };
  events.on_message = [this](const Message& message) { on_leader_message(message); };
  events.on_lost = [this](const std::string& why) { on_leader_lost(why); };
  events.on_refused = [this](const LaunchError& error) { error_ = error; };
  events.note = [this](const std::string& line) { note(line); };
  member_ = std::make_unique<Member>(loop_, options_, secret_, std::move(events));
}

void Job::on_member_message(int node, const Message& message) {
  if (message.kind == "failed") {
    stop_everywhere();
  } else if (message.kind == "gone") {
    std::vector<RankFailure> failures;
    try {
      failures = failures_from_json(message.text("failures"));
    } catch (const std::exception&) {
      on_member_lost(node, "it sent a report that cannot be read");
      return;
    }
    on_node_gone(node, std::move(failures));
  } else if (message.kind == "signal" || message.kind == "kill") {
    coordinator_->broadcast(message, node);
    obey(message);
  }
}

void Job::obey(const Message& message) {
  const int number = message.number("number");
  if (stop_signal_ == 0) stop_signal_ = number;
  if (!ranks_) return;
  if (message.kind == "kill") {
    ranks_->kill_all();
  } else {
    ranks_->forward(number == SIGINT ? SIGINT : SIGTERM);
  }
}

void Job::on_member_lost(int node, const std::string& why) {
  if (exit_code_ || error_ || !ranks_) return;
  note("node " + std::to_string(node) + " is lost: " + why);
  lost_nodes_.insert(node);
  RankFailure failure;
  failure.node = node;
  failure.exit_code = kExitLostPeer;
  failure.ended_ns = wall_clock_ns();
  failure.message = "its launcher is lost: " + why;
  if (gone_nodes_.count(node) == 0) {
    stop_everywhere();
    on_node_gone(node, {failure});
  } else {
    failures_.push_back(failure);
    stop_everywhere();
  }
}

void Job::on_leader_message(const Message& message) {
  if (message.kind == "start") {
    attempt_.number = message.number("attempt");
    attempt_.master_address = message.text("address");
    attempt_.master_port = static_cast<uint16_t>(message.number("port"));
    attempt_.store = message.text("store");
    start_ranks();
  } else if (message.kind == "stop") {
    if (ranks_) ranks_->stop(grace());
  } else if (message.kind == "signal" || message.kind == "kill") {
    obey(message);
  } else if (message.kind == "restart") {
    note(message.text("line"));
  } else if (message.kind == "end") {
    try {
      failures_ = failures_from_json(message.text("failures"));
    } catch (const std::exception&) {
      failures_.clear();
    }
    finish(message.number("code"));
  }
}

void Job::on_leader_lost(const std::string& why) {
  if (exit_code_ || error_) return;
  error_.emplace(kExitLostPeer, "run: node 0 is lost", why,
                 "look at the output of tessera run on node 0");
  // Without node 0 nobody waits for an orderly end; the ranks are ended with the launcher.
  if (ranks_) ranks_->kill_all();
}

void Job::start_attempt(int number) {
  attempt_.number = number;
  SocketAddress address = options_.num_nodes > 1 ? coordinator_->address()
                          : options_.endpoint    ? resolve(*options_.endpoint)
                                                 : resolve({"127.0.0.1", 0});
  if (options_.num_nodes > 1) address.set_port(0);
  listen_for_stores(address);
  is_stopping_ = false;
  gone_nodes_.clear();
  failures_.clear();
  if (coordinator_) {
    coordinator_->broadcast({"start",
                             {{"attempt", std::to_string(number)},
                              {"address", attempt_.master_address},
                              {"port", std::to_string(attempt_.master_port)},
                              {"store", attempt_.store}}});
  }
  start_ranks();
}

void Job::listen_for_stores(const SocketAddress& address) {
  const auto warn = [this](const std::string& line) { note("warning: " + line); };
  torch_store_.reset();  // an attempt before this one may still have the port
  store_.reset();
  Listener torch_listener = listen_on(address);
  attempt_.master_address = torch_listener.address.host();
  attempt_.master_port = torch_listener.address.port();
  torch_store_ = std::make_unique<StoreHost>(
      loop_, guard_, std::move(torch_listener.fd),
      torch_store(attempt_.master_address, signals_, guard_, warn), warn);
  // On one host a socket that other users cannot even see, as far as its path is short enough.
  const std::string path = scratch_.path() + "/store." + std::to_string(attempt_.number);
  FileDescriptor listening;
  if (options_.num_nodes == 1 && fits_socket(path)) {
    listening = listen_on_path(path);
    attempt_.store = "unix:" + path;
  } else {
    SocketAddress own = address;
    own.set_port(0);
    Listener listener = listen_on(own);
    attempt_.store =
        "tcp:" + listener.address.host() + ":" + std::to_string(listener.address.port());
    listening = std::move(listener.fd);
  }
  store_ = std::make_unique<StoreHost>(loop_, guard_, std::move(listening),
                                       job_store(rank_secret(), guard_), warn);
}

core::Secret Job::rank_secret() const { return secret_.derive("run " + attempt_.run_id); }

std::string Job::attempt_folder() const {
  const std::string attempt = "/attempt_" + std::to_string(attempt_.number);
  if (options_.log_dir.empty()) return scratch_.path() + attempt;
  return options_.log_dir + "/" + attempt_.folder + attempt;
}

void Job::start_ranks() {
  // The ranks of this run share a key from which that of the launchers cannot be found.
  if (attempt_.secret_file.empty()) {
    attempt_.secret_file = write_rank_secret(scratch_.path(), rank_secret());
  }
  LiveJob record{.name = attempt_.job_name,
                 .pid = getpid(),
                 .begin_ns = begin_ns_,
                 .num_local_ranks = options_.num_local_ranks,
                 .num_nodes = options_.num_nodes,
                 .node_rank = options_.node_rank,
                 .attempt = attempt_.number,
                 .command = options_.command};
  record_job(scratch_.path(), record);
  // Without the folder nobody can look; the ranks run all the same.
  record.live_folder = scratch_.path() + "/live_" + std::to_string(attempt_.number);
  if (mkdir(record.live_folder.c_str(), 0700) != 0) record.live_folder.clear();
  attempt_.live_folder = record.live_folder;
  ranks_ = std::make_unique<RankGroup>(
      loop_, guard_, signals_, options_, out_, err_,
      RankGroup::Events{[this] { on_local_failure(); }, [this] { on_local_gone(); }});
  try {
    ranks_->start(program_, attempt_, attempt_folder(), !options_.log_dir.empty());
    for (const pid_t pid : ranks_->pids()) record.pids.push_back(pid);
    record_job(scratch_.path(), record);
  } catch (const LaunchError& error) {
    if (coordinator_) {
      coordinator_->broadcast(
          {"end", {{"code", std::to_string(error.exit_code())}, {"failures", "[]"}}});
    }
    error_ = error;
  }
}

std::chrono::milliseconds Job::grace() const {
  if (options_.failure_grace) return *options_.failure_grace;
  const bool may_report = options_.num_nodes > 1 || (store_ && store_->was_used()) ||
                          (torch_store_ && torch_store_->was_used());
  return may_report ? kReportGrace : std::chrono::milliseconds(0);
}

void Job::on_local_failure() {
  if (leads()) {
    stop_everywhere();
  } else {
    member_->send({"failed", {}});
    ranks_->stop(grace());
  }
}

void Job::stop_everywhere() {
  if (is_stopping_) return;
  is_stopping_ = true;
  if (coordinator_) coordinator_->broadcast({"stop", {}});
  ranks_->stop(grace());
}

void Job::on_local_gone() {
  if (!ranks_->killed_ranks().empty()) {
    note(std::to_string(ranks_->killed_ranks().size()) +
         " rank(s) did not end in time and were killed, first rank " +
         std::to_string(ranks_->killed_ranks().front()));
  }
  std::vector<RankFailure> failures = ranks_->failures();
  if (leads()) {
    on_node_gone(0, std::move(failures));
  } else if (!error_) {
    member_->send({"gone", {{"failures", failures_to_json(failures)}}});
  }
}

void Job::on_node_gone(int node, std::vector<RankFailure> failures) {
  gone_nodes_.insert(node);
  failures_.insert(failures_.end(), failures.begin(), failures.end());
  if (!failures.empty()) stop_everywhere();
  if (static_cast<int>(gone_nodes_.size()) == options_.num_nodes) decide();
}

int Job::code_after_signal() const {
  if (failures_.empty()) return kExitOk;
  const RankFailure& root = failures_[root_cause(failures_)];
  if (root.was_stopped && root.signal_number != 0) return exit_code_of_signal(stop_signal_);
  return exit_code_of(root);
}

void Job::decide() {
  const bool may_restart = !failures_.empty() && stop_signal_ == 0 && lost_nodes_.empty() &&
                           attempt_.number < options_.max_restarts;
  if (may_restart) {
    const RankFailure& root = failures_[root_cause(failures_)];
    const std::string message = root.message.substr(0, root.message.find('\n')).substr(0, 200);
    const std::string line = "rank " + std::to_string(root.rank) + " failed (" + how_ended(root) +
                             ")" + (message.empty() ? "" : ": " + message) + "; restart " +
                             std::to_string(attempt_.number + 1) + " of " +
                             std::to_string(options_.max_restarts);
    note(line);
    if (coordinator_) coordinator_->broadcast({"restart", {{"line", line}}});
    // Not from inside the group's own callback, which would destroy it.
    loop_.after(std::chrono::nanoseconds(0), [this] {
      // A signal, or the loss of a node, may have come in between.
      if (stop_signal_ != 0 || !lost_nodes_.empty()) return decide();
      try {
        start_attempt(attempt_.number + 1);
      } catch (const LaunchError& error) {
        error_ = error;
      }
    });
    return;
  }
  int code = kExitOk;
  if (stop_signal_ != 0) {
    code = code_after_signal();
  } else if (!failures_.empty()) {
    code = exit_code_of(failures_[root_cause(failures_)]);
  }
  if (coordinator_) {
    coordinator_->broadcast(
        {"end", {{"code", std::to_string(code)}, {"failures", failures_to_json(failures_)}}});
  }
  finish(code);
}

void Job::finish(int code) {
  if (ranks_ && !ranks_->is_gone()) {
    // The end came from node 0 while ranks still run here, or from a signal: no more waiting.
    error_.emplace(code, "run: node 0 ended the job", "it could not start its ranks",
                   "look at the output of tessera run on node 0");
    ranks_->kill_all();
    return;
  }
  report();
  exit_code_ = code;
}

void Job::report() {
  if (failures_.empty()) return;
  const RankFailure& root = failures_[root_cause(failures_)];
  // Ranks that ended because somebody pressed Ctrl-C have not failed.
  if (stop_signal_ != 0 && root.was_stopped && !root.has_error_file) return;
  ReportContext context;
  context.world_size = options_.num_nodes * options_.num_local_ranks;
  context.attempt = attempt_.number;
  context.max_restarts = options_.max_restarts;
  context.num_nodes = options_.num_nodes;
  context.memory_kill_seen = num_memory_kills() > memory_kills_before_;
  context.use_color = err_.use_color();
  context.width = err_.width();
  err_.print(options_.json_report ? format_report_json(failures_, context)
                                  : format_report(failures_, context));
}

// What the system refuses to a launcher is its limits, not a defect.
[[noreturn]] void throw_scarcity(const std::system_error& error) {
  const int number = error.code().value();
  const bool is_files = number == EMFILE || number == ENFILE;
  throw LaunchError(kExitInternal,
                    std::string("run: the system refuses what a launcher needs: ") + error.what(),
                    std::generic_category().message(number),
                    is_files ? "raise the limit of open files (ulimit -n)"
                             : "check the limits of this user (ulimit -a) and the free memory");
}

}  // namespace

int run_job(const RunOptions& options) {
  // Each rank costs the launcher a few files, and each rank a few for every other: many ranks need
  // more than the usual soft limit, which protects programs that use select().
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  // A closed standard file would give its number to a pipe.
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
  try {
    Job job(options, resolve_program(options));
    return job.run();
  } catch (const std::system_error& error) {
    throw_scarcity(error);
  }
}

}  // namespace tessera::launch
