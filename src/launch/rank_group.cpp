#include "rank_group.h"

#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <system_error>

#include "core/host_name.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {
namespace {

constexpr int kStdoutBit = 1;
constexpr int kStderrBit = 2;
// How long processes that a finished rank has left behind may take to end.
constexpr std::chrono::milliseconds kLeftBehindLimit{1000};
// A process that survives SIGKILL this long hangs in the kernel; nobody can end it.
constexpr std::chrono::milliseconds kGiveUpLimit{5000};

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of(" \t\r\n");
  if (end == std::string::npos) return "";
  const size_t before = text.find_last_of('\n', end);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return text.substr(begin, end + 1 - begin);
}

std::string line_prefix(int rank, bool use_color) {
  const std::string label = "[rank " + std::to_string(rank) + "]";
  if (!use_color) return label + " ";
  constexpr int kColors[] = {36, 33, 32, 35, 34, 31};
  return "\x1b[" + std::to_string(kColors[rank % 6]) + "m" + label + "\x1b[0m ";
}

[[noreturn]] void throw_spawn_error(const std::system_error& error, const Program& program) {
  const int number = error.code().value();
  const std::string why = std::strerror(number);
  if (number == ENOEXEC) {
    throw LaunchError(kExitNotExecutable, "run: '" + program.path + "' cannot be executed",
                      "it is neither a binary of this machine nor a script with a #! line",
                      "put the interpreter in front of it");
  }
  if (number == ENOENT) {
    throw LaunchError(kExitNotFound, "run: '" + program.path + "' cannot be executed",
                      "its interpreter (the #! line) does not exist", "correct its first line");
  }
  if (number == EACCES) {
    throw LaunchError(kExitNotExecutable, "run: '" + program.path + "' cannot be executed", why,
                      "check its permissions and those of its interpreter");
  }
  throw LaunchError(kExitInternal, "run: a rank cannot be started: " + std::string(error.what()),
                    why, "check the limits of this user (ulimit -a) and the free memory");
}

[[noreturn]] void throw_log_error(const std::string& path, int error) {
  throw LaunchError(kExitConfiguration, "run: cannot write to " + path, std::strerror(error),
                    "choose another --log-dir");
}

}  // namespace

RankGroup::RankGroup(EventLoop& loop, Guard& guard, const SignalState& signals,
                     const RunOptions& options, Console& out, Console& err, Events events)
    : loop_(loop),
      guard_(guard),
      signals_(signals),
      options_(options),
      out_(out),
      err_(err),
      events_(std::move(events)) {}

RankGroup::~RankGroup() {
  // Only reached with live ranks when starting failed half-way.
  for (Rank& rank : ranks_) {
    if (rank.group_is_empty) continue;
    kill(-rank.pid, SIGKILL);
    if (!rank.has_ended) waitpid(rank.pid, nullptr, 0);
    guard_.remove(rank.pid);
  }
  for (const EventLoop::TimerId timer : {grace_timer_, kill_timer_, give_up_timer_}) {
    loop_.cancel(timer);
  }
}

void RankGroup::start(const Program& program, const Attempt& attempt, const std::string& folder,
                      bool keep_files) {
  keep_files_ = keep_files;
  for (int local_rank = 0; local_rank < options_.num_local_ranks; ++local_rank) {
    Rank rank;
    rank.local_rank = local_rank;
    try {
      start_rank(rank, program, attempt, folder);
    } catch (const std::system_error& error) {
      throw_spawn_error(error, program);
    }
    ranks_.push_back(std::move(rank));  // only now: kill() must never see a process that is not
  }
}

std::vector<pid_t> RankGroup::pids() const {
  std::vector<pid_t> pids;
  for (const Rank& rank : ranks_) pids.push_back(rank.pid);
  return pids;
}

std::unique_ptr<RankStream> RankGroup::open_stream(int local_rank, int bit, Console& console,
                                                   const std::string& folder,
                                                   FileDescriptor& write_end) {
  const bool is_redirected = (options_.redirects.of(local_rank) & bit) != 0;
  const bool is_teed = (options_.tee.of(local_rank) & bit) != 0;
  const bool takes_all = options_.redirects.is_empty() && options_.tee.is_empty();
  const std::vector<int>& shown = options_.shown_local_ranks;
  const bool is_shown = !is_redirected && (shown.empty() || std::find(shown.begin(), shown.end(),
                                                                      local_rank) != shown.end());
  const int world = options_.num_nodes * options_.num_local_ranks;
  const bool is_logged = !options_.log_dir.empty() && (is_redirected || is_teed || takes_all);
  // Alone on the terminal: the rank gets the launcher's own file, and no byte is copied.
  if (is_shown && !is_logged && world == 1) return nullptr;

  FileDescriptor log;
  if (is_logged) {
    const std::string path = folder + (bit == kStdoutBit ? "/stdout.log" : "/stderr.log");
    log = FileDescriptor(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!log.is_open()) throw_log_error(path, errno);
  }
  std::string prefix;
  if (options_.prefix_lines && world > 1) {
    prefix = line_prefix(options_.node_rank * options_.num_local_ranks + local_rank,
                         console.use_color());
  }
  Pipe pipe = make_pipe();
  write_end = std::move(pipe.write_end);
  return std::make_unique<RankStream>(loop_, std::move(pipe.read_end),
                                      is_shown ? &console : nullptr, std::move(log), prefix);
}

void RankGroup::start_rank(Rank& rank, const Program& program, const Attempt& attempt,
                           const std::string& folder) {
  const int number = options_.node_rank * options_.num_local_ranks + rank.local_rank;
  const std::string own_folder = folder + "/" + std::to_string(number);
  std::error_code failed;
  std::filesystem::create_directories(own_folder, failed);
  if (failed) throw_log_error(own_folder, failed.value());
  std::error_code ignored;
  std::filesystem::permissions(own_folder, std::filesystem::perms::owner_all, ignored);
  rank.error_file = own_folder + "/error.json";
  std::filesystem::remove(rank.error_file, ignored);
  FileDescriptor out_end;
  FileDescriptor err_end;
  rank.out = open_stream(rank.local_rank, kStdoutBit, out_, own_folder, out_end);
  rank.err = open_stream(rank.local_rank, kStderrBit, err_, own_folder, err_end);

  ProcessSpec spec;
  spec.path = program.path;
  spec.arguments = program.arguments;
  spec.environment = rank_environment(options_, attempt, rank.local_rank, rank.error_file);
  spec.stdout_fd = out_end.get();
  spec.stderr_fd = err_end.get();
  // A terminal would stop a rank that reads from it in the background, so only a file or pipe is
  // passed on, and only if one rank takes it.
  const bool takes_stdin = options_.num_nodes * options_.num_local_ranks == 1 ||
                           (options_.passes_stdin && rank.local_rank == 0);
  if (takes_stdin && isatty(STDIN_FILENO) == 0 && fcntl(STDIN_FILENO, F_GETFD) >= 0) {
    spec.stdin_fd = STDIN_FILENO;
  }
  rank.pid = spawn(spec, signals_, guard_);
}

void RankGroup::on_child_exit(pid_t pid, int status, const std::set<pid_t>& helpers) {
  helpers_ = helpers;
  for (Rank& rank : ranks_) {
    if (rank.pid != pid || rank.has_ended) continue;
    rank.has_ended = true;
    rank.status = status;
    rank.ended_ns = wall_clock_ns();
    rank.order = num_ended_++;
    if (rank.out) rank.out->drain();
    if (rank.err) rank.err->drain();
    // What it started has not been told yet: the signal went to the rank alone, so that a program
    // with helper processes can end them in its own order.
    if (is_stopping_) kill(-pid, is_killing_ ? SIGKILL : SIGTERM);
    if (status != 0 && !is_stopping_ && !has_failed_) {
      has_failed_ = true;
      events_.on_failure();
    }
    break;
  }
  if (!is_gone_) check_gone();
}

void RankGroup::forget_empty_groups() {
  // Early, not at the end of the job: in a long one the kernel may give the number away again.
  for (Rank& rank : ranks_) {
    if (!rank.has_ended || rank.group_is_empty || group_exists(rank.pid)) continue;
    rank.group_is_empty = true;
    guard_.remove(rank.pid);
  }
}

void RankGroup::check_gone() {
  forget_empty_groups();
  if (num_ended_ < static_cast<int>(ranks_.size())) return;
  bool is_left = false;
  for (const Rank& rank : ranks_) is_left = is_left || !rank.group_is_empty;
  for (const pid_t child : child_processes()) is_left = is_left || helpers_.count(child) == 0;
  if (is_left) {
    terminate_left_behind();
    if (kill_timer_ == 0 && !is_killing_) arm_kill(kLeftBehindLimit);
    return;
  }
  finish();
}

void RankGroup::finish() {
  is_gone_ = true;
  for (EventLoop::TimerId* timer : {&grace_timer_, &kill_timer_, &give_up_timer_}) {
    loop_.cancel(*timer);
    *timer = 0;
  }
  for (Rank& rank : ranks_) {
    if (rank.out) rank.out->finish();
    if (rank.err) rank.err->finish();
  }
  events_.on_gone();
}

void RankGroup::terminate_left_behind() {
  const int number = is_killing_ ? SIGKILL : SIGTERM;
  for (const Rank& rank : ranks_) {
    if (rank.group_is_empty) continue;
    if (is_killing_ || told_to_end_.insert(-rank.pid).second) kill(-rank.pid, number);
  }
  for (const pid_t child : child_processes()) {
    if (helpers_.count(child) != 0) continue;
    if (is_killing_ || told_to_end_.insert(child).second) kill(child, number);
  }
}

void RankGroup::stop(std::chrono::milliseconds grace) {
  if (is_gone_ || is_stopping_ || grace_timer_ != 0) return;
  grace_timer_ = loop_.after(grace, [this] { forward(SIGTERM); });
}

void RankGroup::forward(int signal_number) {
  if (is_gone_) return;
  loop_.cancel(grace_timer_);
  is_stopping_ = true;
  for (Rank& rank : ranks_) {
    if (rank.has_ended) continue;
    rank.was_stopped = true;
    kill(rank.pid, signal_number);
    kill(rank.pid, SIGCONT);  // a stopped process would not notice
  }
  arm_kill(options_.shutdown_timeout);
}

void RankGroup::arm_kill(std::chrono::milliseconds delay) {
  loop_.cancel(kill_timer_);
  kill_timer_ = loop_.after(delay, [this] {
    for (const Rank& rank : ranks_) {
      if (!rank.has_ended) {
        killed_ranks_.push_back(options_.node_rank * options_.num_local_ranks + rank.local_rank);
      }
    }
    kill_all();
  });
}

void RankGroup::kill_all() {
  if (is_gone_) return;
  is_stopping_ = true;
  is_killing_ = true;
  loop_.cancel(grace_timer_);
  loop_.cancel(kill_timer_);
  for (Rank& rank : ranks_) {
    if (!rank.has_ended) rank.was_stopped = true;
    if (!rank.group_is_empty) kill(-rank.pid, SIGKILL);
  }
  if (give_up_timer_ == 0) {
    give_up_timer_ = loop_.after(kGiveUpLimit, [this] {
      err_.print(
          "tessera: warning: a process does not end although it was killed; it hangs in the "
          "kernel and is left behind\n");
      for (Rank& rank : ranks_) {
        if (!rank.has_ended) rank.status = SIGKILL;
        rank.has_ended = true;
        rank.group_is_empty = true;
      }
      finish();
    });
  }
  check_gone();
}

RankFailure RankGroup::describe(const Rank& rank) const {
  RankFailure failure;
  failure.rank = options_.node_rank * options_.num_local_ranks + rank.local_rank;
  failure.node = options_.node_rank;
  failure.host = core::host_name();
  failure.pid = rank.pid;
  failure.signal_number = WIFSIGNALED(rank.status) ? WTERMSIG(rank.status) : 0;
  failure.exit_code = WIFEXITED(rank.status) ? WEXITSTATUS(rank.status) : 0;
  failure.ended_ns = rank.ended_ns;
  failure.order = rank.order;
  failure.was_stopped = rank.was_stopped;
  const bool was_killed = failure.signal_number == SIGKILL;
  // One that was told to stop but left with a code of its own has something to say.
  const bool only_obeyed = rank.was_stopped && failure.exit_code == 0;
  if (!read_error_file(rank.error_file, failure) && rank.err && !was_killed && !only_obeyed) {
    failure.message = last_line(rank.err->tail());
  }
  if (!keep_files_) failure.error_file.clear();
  if (rank.err && !rank.err->was_shown() && !rank.was_stopped) failure.tail = rank.err->tail();
  return failure;
}

std::vector<RankFailure> RankGroup::failures() const {
  std::vector<RankFailure> result;
  for (const Rank& rank : ranks_) {
    if (rank.status != 0) result.push_back(describe(rank));
  }
  return result;
}

}  // namespace tessera::launch
