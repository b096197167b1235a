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
#include <set>
#include <system_error>

#include "callers.h"
#include "course.h"
#include "environment.h"
#include "event_loop.h"
#include "guard.h"
#include "live_jobs.h"
#include "memory_kill.h"
#include "output.h"
#include "process.h"
#include "program.h"
#include "rank_group.h"
#include "scratch.h"
#include "secret.h"
#include "store_host.h"
#include "stranger_log.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/failure.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {
namespace {

constexpr std::chrono::seconds kFarewellLimit{2};

std::string name_from_time() {
  const time_t now = time(nullptr);
  tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", &parts);
  return std::string(text) + "-" + random_hex(3);
}

// Carries out what the course of the job demands: processes, files, signals and output of this
// host.
class Job final : public CourseHost {
 public:
  Job(const RunOptions& options, Program program);
  ~Job() override;
  int run();

 private:
  void open_stores(Attempt& attempt, const SocketAddress* meeting) override;
  std::unique_ptr<Ranks> start_ranks(Attempt& attempt, Ranks::Events events) override;
  bool may_report() const override;
  void note(const std::string& line) override { err_.print("tessera: " + line + "\n"); }
  void report(const std::vector<RankFailure>& failures, const Attempt& attempt) override;

  void on_signals();
  void on_children();
  Attempt first_attempt() const;
  bool has_member(const Caller& caller) const;
  core::Secret rank_secret(const Attempt& attempt) const;
  std::string folder_of(const Attempt& attempt) const;

  const RunOptions& options_;
  const Program program_;
  const core::Secret secret_;
  const SignalState signals_ = SignalState::take_over();
  EventLoop loop_;
  Wire wire_;
  Scratch scratch_;
  Guard guard_{scratch_.path()};
  std::shared_ptr<Console::OpenLine> out_line_ = std::make_shared<Console::OpenLine>();
  Console out_{loop_, STDOUT_FILENO, out_line_};
  Console err_{loop_, STDERR_FILENO,
               Console::line_shared_by(STDOUT_FILENO, STDERR_FILENO, out_line_)};
  FileDescriptor signal_file_;
  const int64_t begin_ns_ = wall_clock_ns();
  const int64_t memory_kills_before_ = num_memory_kills();

  StrangerLog strangers_{loop_, [this](const std::string& line) { note(line); },
                         "to MASTER_PORT came from no user or host of this job"};
  std::unique_ptr<StoreHost> store_;        // node 0's: of ranks with our runtime
  std::unique_ptr<StoreHost> torch_store_;  // and of programs that know LibTorch's only
  std::unique_ptr<Course> course_;
  RankGroup* ranks_ = nullptr;  // the course's
  bool hurries_ = false;        // a signal came after the end: do not wait for slow readers
};

Job::Job(const RunOptions& options, Program program)
    : options_(options), program_(std::move(program)), secret_(launcher_secret(options)) {
  scratch_.make();
  // Processes that outlive the rank that started them become children of the launcher.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const sigset_t handled = handled_signals();
  signal_file_ = FileDescriptor(signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  loop_.watch(signal_file_.get(), POLLIN, [this](short) { on_signals(); });
  course_ = std::make_unique<Course>(*this, loop_, wire_, options_, secret_, first_attempt());
}

Job::~Job() {
  course_.reset();
  store_.reset();
  torch_store_.reset();
}

Attempt Job::first_attempt() const {
  Attempt attempt;
  attempt.run_id = random_hex(16);
  attempt.folder = name_from_time();
  if (!options_.rendezvous_id.empty()) {
    attempt.folder = options_.rendezvous_id + "-" + attempt.folder;
  }
  attempt.job_name = options_.rendezvous_id.empty() ? attempt.folder : options_.rendezvous_id;
  return attempt;
}

int Job::run() {
  course_->begin();
  while (!course_->is_over()) loop_.run_once();
  // What is left to say must be read by someone: a signal ends the wait for a slow reader.
  const Clock::time_point farewell = loop_.now() + kFarewellLimit;
  const auto has_mail = [&] { return loop_.now() < farewell && course_->has_unsent(); };
  while ((!out_.is_empty() || !err_.is_empty() || has_mail()) && !hurries_) {
    loop_.run_once(std::chrono::milliseconds(100));
  }
  if (course_->error()) throw LaunchError(*course_->error());
  return *course_->exit_code();
}

void Job::on_signals() {
  signalfd_siginfo info{};
  bool child_changed = false;
  while (read(signal_file_.get(), &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo == SIGCHLD) {
      child_changed = true;
    } else if (course_->is_over()) {
      hurries_ = true;
    } else {
      course_->on_signal(static_cast<int>(info.ssi_signo));
    }
  }
  if (child_changed) on_children();
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
    if (ranks_ != nullptr) ranks_->on_child_exit(pid, status, helpers);
  }
}

void Job::open_stores(Attempt& attempt, const SocketAddress* meeting) {
  SocketAddress address = meeting != nullptr  ? *meeting
                          : options_.endpoint ? resolve(*options_.endpoint)
                                              : resolve({"127.0.0.1", 0});
  if (meeting != nullptr) address.set_port(0);
  const auto warn = [this](const std::string& line) { note("warning: " + line); };
  const auto fail = [this](const LaunchError& error) { course_->fail(error); };
  const auto is_of_job = [this](const Caller& caller) { return has_member(caller); };
  const auto on_stranger = [this](const Caller& caller) { strangers_.add(caller.text()); };
  torch_store_.reset();  // an attempt before this one may still have the port
  store_.reset();
  Listener torch_listener = listen_on(address);
  attempt.master_address = torch_listener.address.host();
  attempt.master_port = torch_listener.address.port();
  torch_store_ =
      std::make_unique<StoreHost>(loop_, guard_, std::move(torch_listener.fd),
                                  torch_store(attempt.master_address, signals_, guard_, warn),
                                  StoreHost::Events{warn, fail, is_of_job, on_stranger});
  // On one host a socket that other users cannot even see, as far as its path is short enough.
  const std::string path = scratch_.path() + "/store." + std::to_string(attempt.number);
  FileDescriptor listening;
  StoreHost::Events events{warn, fail, nullptr, nullptr};
  if (options_.num_nodes == 1 && fits_socket(path)) {
    listening = listen_on_path(path);
    attempt.store = "unix:" + path;
  } else {
    SocketAddress own = address;
    own.set_port(0);
    Listener listener = listen_on(own);
    attempt.store =
        "tcp:" + listener.address.host() + ":" + std::to_string(listener.address.port());
    listening = std::move(listener.fd);
    events.is_of_job = is_of_job;
  }
  store_ = std::make_unique<StoreHost>(loop_, guard_, std::move(listening),
                                       job_store(rank_secret(attempt), guard_), std::move(events));
}

// Users of this host by who they are, other hosts by where their launchers are: a rank there cannot
// be told from a neighbour.
bool Job::has_member(const Caller& caller) const {
  if (!caller.user) return options_.goes_without_secret || course_->has_host(caller.host);
  // Root may do everything anyway, and is what a rank is that becomes somebody else by itself.
  if (*caller.user == geteuid() || *caller.user == 0) return true;
  return users_of_descendants().contains(*caller.user);
}

core::Secret Job::rank_secret(const Attempt& attempt) const {
  return secret_.derive("run " + attempt.run_id);
}

std::string Job::folder_of(const Attempt& attempt) const {
  const std::string name = "/attempt_" + std::to_string(attempt.number);
  if (options_.log_dir.empty()) return scratch_.path() + name;
  return options_.log_dir + "/" + attempt.folder + name;
}

std::unique_ptr<Ranks> Job::start_ranks(Attempt& attempt, Ranks::Events events) {
  // The ranks of this run share a key from which that of the launchers cannot be found.
  if (attempt.secret_file.empty()) {
    attempt.secret_file = write_rank_secret(scratch_.path(), rank_secret(attempt));
  }
  LiveJob record{.name = attempt.job_name,
                 .pid = getpid(),
                 .begin_ns = begin_ns_,
                 .num_local_ranks = options_.num_local_ranks,
                 .num_nodes = options_.num_nodes,
                 .node_rank = options_.node_rank,
                 .attempt = attempt.number,
                 .command = options_.command};
  record_job(scratch_.path(), record);
  // Without the folder nobody can look; the ranks run all the same.
  record.live_folder = scratch_.path() + "/live_" + std::to_string(attempt.number);
  if (mkdir(record.live_folder.c_str(), 0700) != 0) record.live_folder.clear();
  attempt.live_folder = record.live_folder;
  auto group =
      std::make_unique<RankGroup>(loop_, guard_, signals_, options_, out_, err_, std::move(events));
  group->start(program_, attempt, folder_of(attempt), !options_.log_dir.empty());
  for (const pid_t pid : group->pids()) record.pids.push_back(pid);
  record_job(scratch_.path(), record);
  ranks_ = group.get();
  return group;
}

bool Job::may_report() const {
  return (store_ && store_->was_used()) || (torch_store_ && torch_store_->was_used());
}

void Job::report(const std::vector<RankFailure>& failures, const Attempt& attempt) {
  ReportContext context;
  context.world_size = options_.num_nodes * options_.num_local_ranks;
  context.attempt = attempt.number;
  context.max_restarts = options_.max_restarts;
  context.num_nodes = options_.num_nodes;
  context.memory_kill_seen = num_memory_kills() > memory_kills_before_;
  context.can_keep_output = options_.can_keep_output;
  context.use_color = err_.use_color();
  context.width = err_.width();
  err_.print(options_.json_report ? format_report_json(failures, context)
                                  : format_report(failures, context));
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
