#include "live_ranks.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>

#include "core/live_record.h"
#include "file_descriptor.h"

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;
constexpr std::chrono::milliseconds kStackLimit{1000};
constexpr std::chrono::milliseconds kLook{5};
constexpr double kSecond = 1e-9;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The words of /proc/PID/stat from the state on; none if there is no such process.
std::vector<std::string> facts_of(int64_t pid) {
  const std::string text = text_of("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  return {std::istream_iterator<std::string>(rest), {}};
}

// A word of `facts`, numbered as proc(5) does.
int64_t fact(const std::vector<std::string>& facts, size_t number) {
  const size_t place = number - 3;
  return place < facts.size() ? std::strtoll(facts[place].c_str(), nullptr, 10) : 0;
}

// The value of a line of /proc/PID/status, such as "VmRSS"; empty if there is none.
std::string status_of(const std::string& status, const std::string& name) {
  const size_t begin = ("\n" + status).find("\n" + name + ":");
  if (begin == std::string::npos) return "";
  const size_t value = begin + name.size() + 1;
  const size_t first = status.find_first_not_of(" \t", value);
  return first == std::string::npos ? "" : status.substr(first, status.find('\n', first) - first);
}

int64_t bytes_in(const std::string& kilobytes) {
  return std::strtoll(kilobytes.c_str(), nullptr, 10) * 1024;
}

void look_at_process(LiveRank& rank) {
  const std::vector<std::string> facts = facts_of(rank.pid);
  if (facts.empty()) return;
  rank.state = facts[0].empty() ? '\0' : facts[0][0];
  rank.is_there = rank.state != 'Z' && rank.state != 'X';
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  rank.cpu_seconds = static_cast<double>(fact(facts, 14) + fact(facts, 15)) / ticks;
  rank.num_threads = static_cast<int>(fact(facts, 20));
  const std::string status = text_of("/proc/" + std::to_string(rank.pid) + "/status");
  rank.memory_bytes = bytes_in(status_of(status, "VmRSS"));
  rank.shared_bytes = bytes_in(status_of(status, "RssShmem"));
  rank.peak_bytes = bytes_in(status_of(status, "VmHWM"));
}

struct Unmap {
  void operator()(const core::LiveRecord* record) const {
    munmap(const_cast<core::LiveRecord*>(record), sizeof(core::LiveRecord));
  }
};
using Mapped = std::unique_ptr<const core::LiveRecord, Unmap>;

// Null if there is none, or it is of another version or not whole.
Mapped open_record(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat facts{};
  if (!file.is_open() || fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode) ||
      facts.st_size != sizeof(core::LiveRecord)) {
    return nullptr;
  }
  void* memory = mmap(nullptr, sizeof(core::LiveRecord), PROT_READ, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return nullptr;
  Mapped record(static_cast<const core::LiveRecord*>(memory));
  if (record->magic.load(std::memory_order_acquire) != core::LiveRecord::kMagic) return nullptr;
  return record;
}

template <size_t kSize>
std::string text_in(const core::SharedText<kSize>& shared) {
  char bytes[kSize];
  shared.copy_to(bytes);
  return bytes;
}

// None if no operation was ever begun.
std::optional<RankOperation> look_at_lane(const core::LiveLane& lane) {
  RankOperation found;
  int64_t begin_ns = 0;
  // What changes while it is read is read again; in a loop of quick operations the last try counts.
  for (int i = 0; i < 20; ++i) {
    begin_ns = lane.begin_ns.load(std::memory_order_acquire);
    found.operation = text_in(lane.operation);
    found.sequence = lane.sequence.load(std::memory_order_relaxed);
    found.num_waiting_for = begin_ns != 0 ? lane.num_missing.load(std::memory_order_acquire) : 0;
    found.waiting_for.clear();
    for (int j = 0; j < std::min(found.num_waiting_for, 8); ++j) {
      found.waiting_for.push_back(lane.missing[j].load(std::memory_order_relaxed));
    }
    found.details = found.num_waiting_for > 0 ? text_in(lane.details) : "";
    if (lane.begin_ns.load(std::memory_order_acquire) == begin_ns) break;
  }
  const int64_t since = begin_ns != 0 ? begin_ns : lane.end_ns.load(std::memory_order_relaxed);
  if (since == 0 || found.operation.empty()) return std::nullopt;
  found.is_under_way = begin_ns != 0;
  found.seconds = std::max(0.0, static_cast<double>(core::live_clock_ns() - since) * kSecond);
  return found;
}

void look_at_record(LiveRank& rank, const core::LiveRecord& record) {
  const std::vector<std::string> facts = facts_of(record.pid);
  // Of a process that is gone: what was started for the rank may be in its next program.
  if (static_cast<uint64_t>(fact(facts, 22)) != record.start_time) return;
  rank.pid = record.pid;
  rank.has_record = true;
  rank.step = record.step.load(std::memory_order_relaxed);
  const int64_t step_ns = record.step_ns.load(std::memory_order_relaxed);
  if (rank.step >= 0) {
    rank.step_seconds =
        std::max(0.0, static_cast<double>(core::live_clock_ns() - step_ns) * kSecond);
  }
  for (const core::LiveSlot& slot : record.slots) {
    if (slot.is_taken.load(std::memory_order_acquire) == 0) continue;
    for (const core::LiveLane* lane : {&slot.collectives, &slot.messages}) {
      if (auto found = look_at_lane(*lane)) {
        found->group = text_in(slot.group);
        rank.operations.push_back(std::move(*found));
      }
    }
  }
  std::stable_sort(rank.operations.begin(), rank.operations.end(),
                   [](const RankOperation& a, const RankOperation& b) {
                     if (a.is_under_way != b.is_under_way) return a.is_under_way;
                     // What has waited longest, else what was done last.
                     return a.is_under_way ? a.seconds > b.seconds : a.seconds < b.seconds;
                   });
}

std::string record_path(const LiveJob& job, int rank) {
  return job.live_folder + "/" + std::to_string(rank);
}

bool catches(int64_t pid, int number) {
  const std::string status = text_of("/proc/" + std::to_string(pid) + "/status");
  const uint64_t caught = std::strtoull(status_of(status, "SigCgt").c_str(), nullptr, 16);
  return (caught >> (number - 1) & 1) != 0;
}

// "./program(_ZN7tessera4mainEv+0x12) [0x55...]", with the name as people write it.
std::string readable(const std::string& frame) {
  const size_t begin = frame.find('(') + 1;
  const size_t end = frame.find('+', begin);
  if (begin == 0 || end == std::string::npos || end == begin) return frame;
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(frame.substr(begin, end - begin).c_str(), nullptr, nullptr, &failed),
      &std::free);
  if (failed != 0) return frame;
  return frame.substr(0, begin) + name.get() + frame.substr(end);
}

std::string readable_frames(const std::string& text) {
  // The handler itself, and the kernel's return from it.
  constexpr int kNumOwn = 2;
  std::istringstream lines(text);
  std::string frames;
  int number = 0;
  for (std::string line; std::getline(lines, line); ++number) {
    if (number >= kNumOwn && line + "\n" != core::kStackEnd) frames += readable(line) + "\n";
  }
  return frames;
}

void ask_threads(LiveRank& rank, const std::string& prefix) {
  using Clock = std::chrono::steady_clock;
  std::error_code ignored;
  const std::string tasks = "/proc/" + std::to_string(rank.pid) + "/task";
  for (const auto& entry : fs::directory_iterator(tasks, ignored)) {
    ThreadStack stack;
    stack.thread = std::strtoll(entry.path().filename().c_str(), nullptr, 10);
    stack.name = text_of(entry.path() / "comm");
    while (!stack.name.empty() && stack.name.back() == '\n') stack.name.pop_back();
    fs::remove(prefix + std::to_string(stack.thread), ignored);
    syscall(SYS_tgkill, static_cast<pid_t>(rank.pid), static_cast<pid_t>(stack.thread),
            core::stack_signal());
    rank.stacks.push_back(std::move(stack));
  }
  std::sort(rank.stacks.begin(), rank.stacks.end(),
            [](const ThreadStack& a, const ThreadStack& b) { return a.thread < b.thread; });
  const Clock::time_point limit = Clock::now() + kStackLimit;
  for (ThreadStack& stack : rank.stacks) {
    const std::string path = prefix + std::to_string(stack.thread);
    for (;;) {
      const std::string text = text_of(path);
      if (text.ends_with(core::kStackEnd)) {
        stack.frames = readable_frames(text);
        break;
      }
      if (Clock::now() >= limit) break;
      std::this_thread::sleep_for(kLook);
    }
    fs::remove(path, ignored);
  }
}

// Python's own tool writes all its threads one after the other and says nothing at the end.
void ask_python(LiveRank& rank, const std::string& path) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kQuiet{50};
  const size_t before = text_of(path).size();
  if (kill(static_cast<pid_t>(rank.pid), core::python_stack_signal()) != 0) return;
  const Clock::time_point limit = Clock::now() + kStackLimit;
  size_t size = before;
  Clock::time_point changed = Clock::now();
  while (Clock::now() < limit && (size == before || Clock::now() - changed < kQuiet)) {
    std::this_thread::sleep_for(kLook);
    rank.python_stacks = text_of(path).substr(before);
    if (before + rank.python_stacks.size() != size) changed = Clock::now();
    size = before + rank.python_stacks.size();
  }
}

}  // namespace

std::vector<LiveRank> look_at_ranks(const LiveJob& job) {
  std::vector<LiveRank> ranks;
  for (int local_rank = 0; local_rank < job.num_local_ranks; ++local_rank) {
    LiveRank rank;
    rank.rank = job.node_rank * job.num_local_ranks + local_rank;
    const auto place = static_cast<size_t>(local_rank);
    rank.pid = place < job.pids.size() ? job.pids[place] : 0;
    if (const Mapped record = open_record(record_path(job, rank.rank))) {
      look_at_record(rank, *record);
    }
    look_at_process(rank);
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

void ask_for_stacks(const LiveJob& job, LiveRank& rank) {
  if (!rank.has_record || !rank.is_there) return;
  const std::string path = record_path(job, rank.rank);
  const std::string python = path + core::kPythonStackSuffix;
  if (fs::exists(python) && catches(rank.pid, core::python_stack_signal())) {
    ask_python(rank, python);
  }
  if (catches(rank.pid, core::stack_signal())) ask_threads(rank, path + core::kStackSuffix);
}

}  // namespace tessera::launch
