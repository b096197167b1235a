#include "doctor/self_test.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <vector>

#include "launch/store_host.h"

extern char** environ;

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr std::chrono::seconds kLimit{20};

struct Outcome {
  int status = 0;
  bool was_started = false;
  bool timed_out = false;
  std::string out;
  std::string err;
};

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

Outcome run_program(const std::string& path, const std::vector<std::string>& words) {
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
      posix_spawn(&child, path.c_str(), &actions, nullptr, arguments.data(), environ) == 0;
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  close(err[1]);
  if (outcome.was_started) {
    outcome.timed_out = !read_all(out[0], err[0], Clock::now() + kLimit, outcome);
    // The launcher takes its ranks with it, however it ends.
    if (outcome.timed_out) kill(child, SIGKILL);
    while (waitpid(child, &outcome.status, 0) < 0 && errno == EINTR) {
    }
  }
  close(out[0]);
  close(err[0]);
  return outcome;
}

Json last_answer(const std::string& text) {
  Json answer;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    if (text[begin] == '{') {
      Json line = Json::parse(text.substr(begin, end - begin), nullptr, false);
      if (line.is_object() && line.contains("checks")) answer = std::move(line);
    }
    begin = end + 1;
  }
  return answer;
}

std::string first_words(const std::string& text) {
  constexpr std::string_view kMark = "error: ";
  const std::size_t mark = text.find(kMark);
  const std::size_t begin = mark == std::string::npos ? 0 : mark + kMark.size();
  return text.substr(begin, std::min(text.find('\n', begin), text.size()) - begin);
}

// Why there is no answer at all.
void explain_silence(const Outcome& outcome, SelfTest& test) {
  if (!outcome.was_started) {
    test.error = "the ranks cannot be started";
    test.try_next = "check the limit on processes: ulimit -u";
  } else if (outcome.timed_out) {
    test.error = "the two ranks did not end within 20 s";
    test.try_next = "look for a full or stopped machine, then: TESSERA_ENGINE=gloo tessera doctor";
  } else {
    const std::string words = first_words(outcome.err);
    test.error = words.empty() ? "the two ranks ended without an answer" : words;
    test.try_next = "run it by itself: tessera run -n 2 -- tessera-worker doctor-rank";
  }
}

void judge_checks(SelfTest& test) {
  std::string failed;
  std::string reason;
  for (const Json& check : test.answer["checks"]) {
    if (check["passed"] == true) continue;
    failed += (failed.empty() ? "" : ", ") + check["engine"].get<std::string>() + " " +
              check["operator"].get<std::string>();
    if (reason.empty() && check["error"].is_string()) reason = check["error"].get<std::string>();
  }
  test.passed = failed.empty() && !test.answer["checks"].empty();
  if (test.passed) return;
  if (!reason.empty()) {
    test.error = reason;
    test.try_next =
        "make room in the folder of shared memory, or name another: TESSERA_SHM_DIR=/path";
  } else {
    test.error = "wrong values: " + failed;
    test.try_next = "repeat with TESSERA_ISA=default; if that passes, report the processor model";
  }
}

}  // namespace

SelfTest run_self_test(bool is_quick) {
  SelfTest test;
  const std::string worker = launch::find_worker_program();
  if (worker.empty()) {
    test.error = "there is no tessera-worker program beside tessera";
    test.try_next = "install both, or set TESSERA_WORKER to its path";
    return test;
  }
  std::error_code failure;
  const std::string launcher = std::filesystem::read_symlink("/proc/self/exe", failure).string();
  std::vector<std::string> words = {launcher,      "run", "-n",   "2",
                                    "--no-prefix", "--",  worker, "doctor-rank"};
  if (is_quick) words.emplace_back("--quick");
  const Clock::time_point begin = Clock::now();
  const Outcome outcome = run_program(launcher, words);
  test.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  test.answer = last_answer(outcome.out);
  if (test.answer.is_null() || outcome.status != 0) {
    explain_silence(outcome, test);
  } else {
    judge_checks(test);
  }
  return test;
}

}  // namespace tessera::cli
