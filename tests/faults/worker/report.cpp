#include "report.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <thread>

#include "tessera/comm/error.h"

namespace tessera::faults {
namespace {

std::string folder() {
  const char* path = std::getenv("FAULT_REPORT");
  return path == nullptr ? "/tmp" : path;
}

std::int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

}  // namespace

void report(const std::string& event, Json fields) {
  fields["ns"] = monotonic_ns();
  fields["event"] = event;
  fields["pid"] = ::getpid();
  const char* rank = std::getenv("RANK");
  if (!fields.contains("rank")) fields["rank"] = rank == nullptr ? -1 : std::atoi(rank);
  // One write per line: a rank may be killed at any moment, and half a line would confuse the
  // driver.
  const std::string line = fields.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  const std::string path = folder() + "/" + std::to_string(::getpid()) + ".jsonl";
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  static_cast<void>(!::write(file, line.data(), line.size()));
  ::close(file);
}

void report_ready(const comm::Group& group) {
  const char* port = std::getenv("MASTER_PORT");
  report("ready", {{"engine", group.engine()},
                   {"rank", group.rank()},
                   {"size", group.size()},
                   {"port", port == nullptr ? 0 : std::atoi(port)}});
}

void report_error(const std::string& event, std::exception_ptr error, Json fields) {
  try {
    std::rethrow_exception(error);
  } catch (const comm::Error& caught) {
    fields["kind"] = comm::name_of(caught.kind());
    fields["ranks"] = caught.ranks();
    fields["text"] = caught.what();
  } catch (const c10::Error& caught) {
    fields["kind"] = "exception";
    fields["text"] = caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    fields["kind"] = "exception";
    fields["text"] = caught.what();
  }
  report(event, std::move(fields));
}

bool wait_for_driver(const std::string& name, double seconds) {
  const std::string path = folder() + "/" + name;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (::access(path.c_str(), F_OK) != 0) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace tessera::faults
