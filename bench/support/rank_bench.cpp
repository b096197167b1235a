#include "support/rank_bench.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "kernels/reduce.h"

extern char** environ;

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxRanks = 16;
constexpr int kMaxRepetitions = 2000;
constexpr int kMinRepetitions = 10;
constexpr int kWarmUps = 3;
constexpr std::size_t kCopyBytes = std::size_t{48} << 20;  // larger than a share of the cache
constexpr int kCopies = 3;
constexpr std::uint32_t kPings = 64;
constexpr int kPingLooks = 20'000;
constexpr double kFarNanoseconds = 130.0;
constexpr double kQuiet = 0.05;  // a clock tick or two on one core
constexpr int kAttempts = 4;
constexpr double kQuickSeconds = 0.5;

double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

int num_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Seconds that all cores together have spent on programs since the machine was started.
double busy_seconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  double user = 0;
  double nice = 0;
  double system = 0;
  file >> word >> user >> nice >> system;
  return (user + nice + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double own_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct alignas(128) PaddedWord {
  std::atomic<std::uint32_t> value;
};

bool see(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  for (int i = 0; i < kPingLooks; ++i) {
    if (word.load(std::memory_order_acquire) == value) return true;
  }
  return false;
}

}  // namespace

struct Control {
  PaddedWord arrived;
  PaddedWord generation;
  PaddedWord pings[2];
  PaddedWord verdict;
  double word;  // rank 0's
  double own_seconds[kMaxRanks];
  double times[kMaxRanks][kMaxRepetitions];
  bool is_far[kMaxRepetitions];
};

RankBench::RankBench(int rank, int size, int listener, int port, Control* control)
    : rank_(rank), size_(size), listener_(listener), port_(port), control_(control) {}

void RankBench::meet() {
  const auto next = static_cast<std::uint32_t>(++generation_);
  if (control_->arrived.value.fetch_add(1) + 1 == static_cast<std::uint32_t>(size_)) {
    control_->arrived.value.store(0);
    control_->generation.value.store(next, std::memory_order_release);
    return;
  }
  // With more ranks than cores somebody else needs this one to come here at all.
  for (int looks = 0; control_->generation.value.load(std::memory_order_acquire) != next; ++looks) {
    if (looks > 200) sched_yield();
  }
}

double RankBench::measure_copy() {
  const int num_copying = std::min(size_, num_cores());
  const bool is_copying = rank_ < num_copying;
  char* memory = nullptr;
  if (is_copying) {
    memory = static_cast<char*>(mmap(nullptr, 2 * kCopyBytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    if (memory == MAP_FAILED) throw std::runtime_error("bench: no memory for the copy");
    std::memset(memory, 1, 2 * kCopyBytes);
  }
  double best = 0.0;
  for (int i = 0; i < kCopies; ++i) {
    meet();
    if (is_copying) {
      const Clock::time_point begin = Clock::now();
      kernels::copy(memory, memory + kCopyBytes, kCopyBytes, kernels::Store::kStreaming);
      control_->times[rank_][i] = microseconds_since(begin);
    } else {
      // Leaves the cores to those who copy.
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    meet();
    double slowest = 0.0;
    for (int rank = 0; rank < num_copying; ++rank) {
      slowest = std::max(slowest, control_->times[rank][i]);
    }
    best = std::max(best, 2.0 * kCopyBytes * num_copying / slowest / 1e3);
  }
  if (is_copying) munmap(memory, 2 * kCopyBytes);
  return best;
}

bool RankBench::cores_are_far() {
  if (size_ == 1) return false;
  const std::uint32_t base = control_->verdict.value.load() & ~1u;  // grows with every probe
  meet();
  if (rank_ == 0) {
    double best = -1.0;
    std::uint32_t ping = base;
    bool is_answered = true;
    for (int batch = 0; batch < 4 && is_answered; ++batch) {
      const Clock::time_point begin = Clock::now();
      for (std::uint32_t i = 0; i < kPings / 4 && is_answered; ++i) {
        control_->pings[0].value.store(++ping, std::memory_order_release);
        is_answered = see(control_->pings[1].value, ping);
      }
      const double one_way = microseconds_since(begin) * 1e3 / (2.0 * (kPings / 4.0));
      // The first batch may contain the wait for the other rank.
      if (is_answered && batch > 0) best = best < 0 ? one_way : std::min(best, one_way);
    }
    if (best >= 0) was_far_ = best >= kFarNanoseconds;
    control_->verdict.value.store((base + 2 * kPings) | (was_far_ ? 1u : 0u));
  } else if (rank_ == 1) {
    for (std::uint32_t i = 1; i <= kPings; ++i) {
      if (!see(control_->pings[0].value, base + i)) break;
      control_->pings[1].value.store(base + i, std::memory_order_release);
    }
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
  meet();
  return (control_->verdict.value.load() & 1u) != 0;
}

double RankBench::agree_on(double value) {
  if (rank_ == 0) control_->word = value;
  meet();
  const double agreed = control_->word;
  meet();
  return agreed;
}

Samples RankBench::measure(const std::function<void()>& call, int batch, double seconds) {
  Samples best = measure_once(call, batch, seconds);
  const int attempts = seconds < kQuickSeconds ? 1 : kAttempts;
  for (int i = 1; i < attempts && agree_on(best.others) > kQuiet; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    Samples again = measure_once(call, batch, seconds);
    if (again.others < best.others) best = std::move(again);
  }
  return best;
}

Samples RankBench::measure_once(const std::function<void()>& call, int batch, double seconds) {
  Samples samples;
  meet();
  const double own_before = own_seconds();
  const double busy_before = busy_seconds();
  const Clock::time_point start = Clock::now();
  samples.copy_gbps = measure_copy();
  double shortest = 1e12;
  for (int i = 0; i < kWarmUps; ++i) {
    meet();
    const Clock::time_point begin = Clock::now();
    for (int j = 0; j < batch; ++j) call();
    shortest = std::min(shortest, microseconds_since(begin));
  }
  const int repetitions = static_cast<int>(agree_on(
      std::clamp(seconds * 1e6 / shortest, double{kMinRepetitions}, double{kMaxRepetitions})));
  for (int i = 0; i < repetitions; ++i) {
    const bool is_far = cores_are_far();
    if (rank_ == 0) control_->is_far[i] = is_far;
    meet();
    const Clock::time_point begin = Clock::now();
    for (int j = 0; j < batch; ++j) call();
    control_->times[rank_][i] = microseconds_since(begin) / batch;
  }
  control_->own_seconds[rank_] = own_seconds() - own_before;
  meet();
  if (rank_ == 0) {
    double others = busy_seconds() - busy_before;
    for (int rank = 0; rank < size_; ++rank) others -= control_->own_seconds[rank];
    samples.others = std::max(0.0, others / (1e-6 * microseconds_since(start) * num_cores()));
    for (int i = 0; i < repetitions; ++i) {
      double slowest = 0.0;
      for (int rank = 0; rank < size_; ++rank) {
        slowest = std::max(slowest, control_->times[rank][i]);
      }
      (control_->is_far[i] ? samples.far : samples.near).push_back(slowest);
    }
  }
  meet();
  return samples;
}

namespace {

// Returns a listening socket on a free port of loopback, without close-on-exec.
int listen_on_loopback(int& port) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 64) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("bench: no socket on loopback");
  }
  port = ntohs(address.sin_port);
  return listener;
}

Control* map_control(int file) {
  void* page = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) throw std::runtime_error("bench: the shared page cannot be mapped");
  return static_cast<Control*>(page);
}

// Starts this program once per rank, with its own words and the rank's behind them.
int start_and_wait(int argc, char** argv, int size) {
  int port = 0;
  const int listener = listen_on_loopback(port);
  const int file = memfd_create("tessera-bench", 0);
  if (file < 0 || ftruncate(file, sizeof(Control)) != 0) {
    throw std::runtime_error("bench: no shared page");
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> words(argv, argv + argc);
    words.insert(words.end(),
                 {"--as-rank", std::to_string(rank), std::to_string(size), std::to_string(listener),
                  std::to_string(port), std::to_string(file)});
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t child = -1;
    if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ) == 0) {
      children.push_back(child);
    }
  }
  close(listener);
  close(file);
  int code = children.size() == static_cast<std::size_t>(size) ? 0 : 1;
  for (std::size_t i = 0; i < children.size(); ++i) {
    int status = 0;
    if (waitpid(-1, &status, 0) < 0) break;
    if (status == 0) continue;
    code = 1;
    // The others would wait for ever.
    for (const pid_t child : children) kill(child, SIGKILL);
  }
  return code;
}

}  // namespace

int run_ranks(int argc, char** argv, const std::vector<int>& sizes,
              const std::function<void(RankBench&)>& body) {
  std::vector<int> wanted = sizes;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--ranks" && i + 1 < argc) wanted = {std::atoi(argv[i + 1])};
    if (word != "--as-rank" || i + 5 >= argc) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int rank = std::atoi(argv[i + 1]);
    const int listener = std::atoi(argv[i + 3]);
    RankBench bench(rank, std::atoi(argv[i + 2]), rank == 0 ? listener : -1, std::atoi(argv[i + 4]),
                    map_control(std::atoi(argv[i + 5])));
    if (rank != 0) close(listener);
    try {
      body(bench);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      std::fflush(stdout);
      _exit(1);
    }
    return 0;
  }
  for (const int size : wanted) {
    if (size < 1 || size > kMaxRanks) {
      std::fprintf(stderr, "bench: --ranks takes 1 to %d\n", kMaxRanks);
      return 2;
    }
    if (const int code = start_and_wait(argc, argv, size); code != 0) return code;
  }
  return 0;
}

}  // namespace tessera::bench
