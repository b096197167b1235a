#include "programs/captured_program.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

extern char** environ;

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Takes what the two pipes hold until both are closed or the time is over.
bool read_all(int out, int err, Clock::time_point deadline, Outcome& outcome) {
  pollfd files[2] = {{out, POLLIN, 0}, {err, POLLIN, 0}};
  std::string* const texts[2] = {&outcome.out, &outcome.err};
  int num_open = 2;
  while (num_open > 0) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    if (poll(files, 2, static_cast<int>(left.count())) < 0 && errno != EINTR) return false;
    for (int i = 0; i < 2; ++i) {
      if (files[i].fd < 0 || files[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t size = read(files[i].fd, buffer, sizeof(buffer));
      if (size > 0) {
        texts[i]->append(buffer, static_cast<std::size_t>(size));
      } else if (size == 0 || errno != EINTR) {
        files[i].fd = -1;
        --num_open;
      }
    }
  }
  return true;
}

}  // namespace

Outcome run_program(const std::vector<std::string>& words, std::chrono::seconds limit) {
  Outcome outcome;
  int out[2];
  int err[2];
  if (pipe2(out, O_CLOEXEC) != 0) return outcome;
  if (pipe2(err, O_CLOEXEC) != 0) {
    close(out[0]);
    close(out[1]);
    return outcome;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t child = -1;
  outcome.was_started =
      posix_spawn(&child, words[0].c_str(), &actions, nullptr, arguments.data(), environ) == 0;
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  close(err[1]);
  if (outcome.was_started) {
    outcome.timed_out = !read_all(out[0], err[0], Clock::now() + limit, outcome);
    // Launchers and benchmarks take their ranks with them, however they end.
    if (outcome.timed_out) kill(child, SIGKILL);
    while (waitpid(child, &outcome.status, 0) < 0 && errno == EINTR) {
    }
  }
  close(out[0]);
  close(err[0]);
  return outcome;
}

}  // namespace tessera::cli
