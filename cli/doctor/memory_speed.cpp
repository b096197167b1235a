#include "doctor/memory_speed.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "kernels/reduce.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Memory that is present and in large pages where the system has them.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, bytes, MADV_HUGEPAGE);
    std::memset(data_, 1, bytes);
  }
  ~Buffer() { munmap(data_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const noexcept { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

// Eight sums, so that the loads do not wait for the additions.
std::uint64_t sum_of(const void* data, std::size_t bytes) {
  const auto* words = static_cast<const std::uint64_t*>(data);
  constexpr std::size_t kLanes = 8;
  std::uint64_t sums[kLanes] = {};
  const std::size_t count = bytes / sizeof(std::uint64_t) / kLanes * kLanes;
  for (std::size_t i = 0; i < count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += words[i + lane];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

std::vector<int> usable_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

struct alignas(128) Flag {
  std::atomic<std::uint32_t> value{0};
};

}  // namespace

MemorySpeed measure_memory(int num_threads, std::size_t bytes, int repetitions) {
  MemorySpeed best;
  std::atomic<std::uint64_t> sink{0};
  std::barrier meeting(num_threads);
  const auto work = [&](int thread) {
    const Buffer source(bytes);
    const Buffer target(bytes);
    for (int i = 0; i < repetitions; ++i) {
      meeting.arrive_and_wait();
      Clock::time_point begin = Clock::now();
      sink += sum_of(source.data(), bytes);
      meeting.arrive_and_wait();
      const double read_seconds = seconds_since(begin);
      begin = Clock::now();
      kernels::copy(target.data(), source.data(), bytes, kernels::Store::kStreaming);
      meeting.arrive_and_wait();
      const double copy_seconds = seconds_since(begin);
      if (thread != 0) continue;
      const double total = static_cast<double>(bytes) * num_threads;
      best.read = std::max(best.read, total / read_seconds);
      best.copy = std::max(best.copy, 2 * total / copy_seconds);
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int thread = 1; thread < num_threads; ++thread) threads.emplace_back(work, thread);
    work(0);
  }
  return best;
}

double measure_ping() {
  const std::vector<int> cores = usable_cores();
  if (cores.size() < 2) return 0.0;
  constexpr std::uint32_t kBatch = 200;
  constexpr std::uint32_t kBatches = 50;
  Flag ours;
  Flag theirs;
  double best = 0.0;
  std::jthread answering([&] {
    pin_to(cores[1]);
    for (std::uint32_t i = 1; i <= kBatch * kBatches; ++i) {
      while (ours.value.load(std::memory_order_acquire) != i) {
      }
      theirs.value.store(i, std::memory_order_release);
    }
  });
  std::jthread asking([&] {
    pin_to(cores[0]);
    std::uint32_t i = 0;
    for (std::uint32_t batch = 0; batch < kBatches; ++batch) {
      const Clock::time_point begin = Clock::now();
      for (std::uint32_t step = 0; step < kBatch; ++step) {
        ours.value.store(++i, std::memory_order_release);
        while (theirs.value.load(std::memory_order_acquire) != i) {
        }
      }
      const double one_way = seconds_since(begin) * 1e9 / (2.0 * kBatch);
      best = batch == 0 ? one_way : std::min(best, one_way);
    }
  });
  asking.join();
  return best;
}

}  // namespace tessera::cli
