#include "doctor/self_test.h"

#include <chrono>
#include <filesystem>
#include <vector>

#include "launch/store_host.h"
#include "programs/captured_program.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr std::chrono::seconds kLimit{20};

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
        "make room in memory, or name a folder for shared memory: TESSERA_SHM_DIR=/path";
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
  const Outcome outcome = run_program(words, kLimit);
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
