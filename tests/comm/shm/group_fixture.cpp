#include "group_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace tessera::comm::shm::testing {

namespace fs = std::filesystem;

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (fs::temp_directory_path() / "tessera_test_XXXXXX").string();
  path_ = mkdtemp(pattern.data());
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryDirectory::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path_)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

std::string FileBootstrap::path_of(const std::string& key) const {
  std::string name = key;
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  return directory_ + "/" + name;
}

void FileBootstrap::set(const std::string& key, const std::string& value) {
  const std::string path = path_of(key);
  // Several ranks, processes or threads, may write one key at once.
  const std::string draft = path + ".draft" + std::to_string(::gettid());
  std::ofstream(draft) << value;
  fs::rename(draft, path);
}

std::string FileBootstrap::get(const std::string& key, Clock::time_point deadline) {
  while (true) {
    if (std::ifstream file(path_of(key)); file) {
      return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    }
    if (Clock::now() >= deadline) {
      throw Failure(FailureKind::kTimeout, {}, "comm.bootstrap: no key '" + key + "' in time.");
    }
    usleep(200);
  }
}

bool TestMonitor::has_ended(int rank) const {
  if (static_cast<std::size_t>(rank) >= pids_.size()) return false;
  // A child that was not waited for yet still answers to kill; its state tells that it ended.
  std::ifstream file("/proc/" + std::to_string(pids_[rank]) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::size_t end = text.rfind(')');
  return end == std::string::npos || text[end + 2] == 'Z' || text[end + 2] == 'X';
}

void TestMonitor::check_creation(std::span<const int> missing) {
  for (const int rank : missing) {
    if (!has_ended(rank)) continue;
    throw Failure(FailureKind::kPeerLost, {rank},
                  "comm.init: rank " + std::to_string(rank) + " ended.");
  }
}

void TestMonitor::check(const Call& call, std::span<const int> missing, Clock::duration waited) {
  for (const int rank : missing) {
    if (!has_ended(rank)) continue;
    throw Failure(FailureKind::kPeerLost, {rank},
                  "comm." + std::string(name_of(call.op)) + " #" + std::to_string(call.sequence) +
                      ": rank " + std::to_string(rank) + " ended.");
  }
  if (waited >= limit_) {
    std::ostringstream text;
    text << "comm." << name_of(call.op) << " #" << call.sequence << ": no answer from";
    for (const int rank : missing) text << ' ' << rank;
    throw Failure(FailureKind::kTimeout, {missing.begin(), missing.end()}, text.str());
  }
}

namespace {

std::vector<std::exception_ptr> errors_of_threads(int size, const ShmOptions& options,
                                                  const RankBody& body) {
  const TemporaryDirectory keys;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        FileBootstrap bootstrap(keys.path());
        TestMonitor monitor;
        const auto transport = ShmTransport::create(rank, size, bootstrap, monitor, options);
        try {
          body(*transport);
        } catch (const std::exception& error) {
          // A rank that fails alone must not leave the others waiting.
          transport->abort(FailureKind::kPeerFailed, {rank}, error.what());
          throw;
        }
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

struct Report {
  char text[FailureRecord::kMaxText + 1];
  double seconds;
};

/// In the child: runs the body and leaves its report. Never returns.
[[noreturn]] void run_child(int rank, int size, const std::string& keys, const ShmOptions& options,
                            const RankBody& body,
                            const std::function<void(int, Bootstrap&)>& prepare, Report& report) {
  const auto begin = Clock::now();
  try {
    FileBootstrap bootstrap(keys);
    TestMonitor monitor;
    bootstrap.set("pid/" + std::to_string(rank), std::to_string(getpid()));
    std::vector<pid_t> pids;
    for (int peer = 0; peer < size; ++peer) {
      pids.push_back(std::stoi(
          bootstrap.get("pid/" + std::to_string(peer), begin + std::chrono::seconds(10))));
    }
    monitor.watch(pids);
    if (prepare) prepare(rank, bootstrap);
    const auto transport = ShmTransport::create(rank, size, bootstrap, monitor, options);
    body(*transport);
  } catch (const std::exception& error) {
    std::strncpy(report.text, error.what(), sizeof(report.text) - 1);
  }
  report.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  _exit(0);
}

}  // namespace

void run_threads(int size, const ShmOptions& options, const RankBody& body) {
  for (const auto& error : errors_of_threads(size, options, body)) {
    if (error) std::rethrow_exception(error);
  }
}

std::vector<std::string> texts_of_threads(int size, const ShmOptions& options,
                                          const RankBody& body) {
  std::vector<std::string> texts;
  for (const auto& error : errors_of_threads(size, options, body)) {
    texts.emplace_back();
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      texts.back() = caught.what();
    }
  }
  return texts;
}

std::vector<Outcome> run_processes(int size, const ShmOptions& options, const RankBody& body,
                                   const std::function<void(int, Bootstrap&)>& prepare) {
  const TemporaryDirectory keys;
  const std::size_t bytes = sizeof(Report) * static_cast<std::size_t>(size);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* reports = static_cast<Report*>(memory);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) run_child(rank, size, keys.path(), options, body, prepare, reports[rank]);
    pids.push_back(pid);
  }
  std::vector<Outcome> outcomes;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    waitpid(pids[static_cast<std::size_t>(rank)], &status, 0);
    outcomes.push_back({WIFSIGNALED(status), reports[rank].text, reports[rank].seconds});
  }
  munmap(memory, bytes);
  return outcomes;
}

Call call_of(Operator op, DataType dtype, std::optional<ReduceOp> reduce, int root,
             std::uint64_t sequence) {
  Call call;
  call.op = op;
  call.dtype = dtype;
  call.reduce = reduce;
  call.root = root;
  call.sequence = sequence;
  call.deadline = Clock::now() + std::chrono::seconds(10);
  return call;
}

ShmOptions small_options() {
  ShmOptions options;
  options.slot_bytes = 1024;
  options.ring_bytes = 32 * 1024;
  options.mailbox_bytes = 1024;
  options.heap_bytes = std::size_t{16} << 20;
  return options;
}

}  // namespace tessera::comm::shm::testing
