#include "tessera/comm/failure.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "comm/backend.h"
#include "comm/monitor.h"
#include "comm/own_process.h"
#include "core/live_record.h"
#include "tessera/comm/error.h"
#include "tessera/core/error_file.h"

namespace tessera::comm {
namespace {

// The exit code of a process that ends uncaught with an Error: the caller's mistake is told apart
// from the world's. A launcher passes them on.
int exit_code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kRendezvous:
      return 69;
    case ErrorKind::kUnavailable:
      return 78;
    default:
      return 75;
  }
}

std::atomic<std::int64_t> step_of_process{-1};
std::atomic<pid_t> rank_process{0};  // whose last words count
std::terminate_handler previous_handler = nullptr;

struct Described {
  std::string type;
  std::string text;
  bool is_comm_error = false;
  ErrorKind kind = ErrorKind::kAborted;
};

Described describe(const std::exception_ptr& exception) {
  if (!exception) return {"Terminated", "std::terminate was called without an exception"};
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return {"CommError", error.what(), true, error.kind()};
  } catch (const c10::Error& error) {
    return {"Error", error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {"Exception", error.what()};
  } catch (...) {
    return {"Exception", "an exception that is not a std::exception"};
  }
}

// Whether the error only tells of a peer, and the root cause lies elsewhere.
bool is_secondary(const Described& error) {
  return error.is_comm_error &&
         (error.kind == ErrorKind::kPeerLost || error.kind == ErrorKind::kPeerFailed ||
          error.kind == ErrorKind::kAborted);
}

[[noreturn]] void terminate_with_report() {
  const auto exception = std::current_exception();
  const Described error = describe(exception);
  // A forked child is no rank: what ends it is between it and its parent.
  const bool is_rank = rank_process == own_pid();
  if (is_rank) {
    write_error_file(exception);
    report_failure(exception);
  }
  std::fprintf(stderr, "[tessera] uncaught %s: %s\n", error.type.c_str(), error.text.c_str());
  std::fflush(nullptr);
  // A core dump of a process that merely lost its peer helps nobody.
  if (is_rank && error.is_comm_error) ::_exit(exit_code_of(error.kind));
  if (previous_handler != nullptr) previous_handler();
  std::abort();
}

}  // namespace

std::int64_t current_step() noexcept { return step_of_process.load(std::memory_order_relaxed); }

void set_step(std::int64_t step) noexcept {
  step_of_process.store(step, std::memory_order_relaxed);
  core::note_live_step(step);
}

void report_failure(const std::string& reason) noexcept {
  for_each_backend([&](EngineBackend& backend) {
    const GroupMonitor& monitor = backend.monitor();
    std::string text = "comm: " + monitor.members()[monitor.rank()].describe() + " failed";
    if (current_step() >= 0) text += " in step " + std::to_string(current_step());
    backend.fail(FailureKind::kPeerFailed, {monitor.rank()}, text + ": " + reason);
  });
}

void report_failure(std::exception_ptr exception) noexcept {
  const Described error = describe(exception);
  if (!error.is_comm_error) {
    report_failure(error.text);
    return;
  }
  // Passed on as it came, so that the last rank of the chain still reads the root cause.
  for_each_backend(
      [&](EngineBackend& backend) { backend.fail(failure_kind(error.kind), {}, error.text); });
}

void write_error_file(std::exception_ptr exception) noexcept {
  const Described error = describe(exception);
  const std::string message = error.type + ": " + error.text;
  core::ErrorReport report;
  report.message = message;
  report.is_secondary = is_secondary(error);
  core::write_error_file(report);
}

void install_failure_handler() {
  rank_process = own_pid();
  static std::once_flag once;
  std::call_once(once, [] { previous_handler = std::set_terminate(terminate_with_report); });
}

}  // namespace tessera::comm
