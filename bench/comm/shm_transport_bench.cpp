// Measures the shared-memory transport alone: forked ranks, no LibTorch, one line of JSON per row.
//
//   shm_transport_bench [--ranks N] [--op NAME] [--bytes N] [--heap] [--staging measured|cached|
//                       streaming] [--ring BYTES] [--seconds S]
//
// Without --op and --bytes it runs every operator at 4 B, 4 KB, 64 KB, 1 MB, 25 MB and 100 MB.
// Bytes are those of one rank's input. The times are rank 0's, call after call; rows are split by
// what the transport knew about the cores at that time (near: they share a cache; far: they do
// not).

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "comm/shm/shm_transport.h"
#include "kernels/dispatch.h"

namespace {

using namespace tessera::comm;
using tessera::comm::shm::ShmOptions;
using tessera::comm::shm::ShmTransport;
using tessera::comm::shm::Staging;

/// A few keys in memory that the forked ranks share.
class SharedBootstrap : public Bootstrap {
 public:
  SharedBootstrap()
      : entries_(static_cast<Entry*>(mmap(nullptr, kEntries * sizeof(Entry), PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedBootstrap() override { munmap(entries_, kEntries * sizeof(Entry)); }
  SharedBootstrap(const SharedBootstrap&) = delete;
  SharedBootstrap& operator=(const SharedBootstrap&) = delete;

  void set(const std::string& key, const std::string& value) override {
    for (std::size_t i = 0; i < kEntries; ++i) {
      int free = 0;
      if (!entries_[i].state.compare_exchange_strong(free, 1)) continue;
      std::snprintf(entries_[i].key, sizeof(Entry::key), "%s", key.c_str());
      std::snprintf(entries_[i].value, sizeof(Entry::value), "%s", value.c_str());
      entries_[i].state.store(2);
      return;
    }
  }
  std::string get(const std::string& key, Clock::time_point deadline) override {
    while (Clock::now() < deadline) {
      for (std::size_t i = 0; i < kEntries; ++i) {
        if (entries_[i].state.load() == 2 && key == entries_[i].key) return entries_[i].value;
      }
      usleep(100);
    }
    throw Failure(FailureKind::kTimeout, {}, "bench: no key '" + key + "' in time.");
  }

 private:
  struct Entry {
    std::atomic<int> state;
    char key[64];
    char value[1024];
  };
  static constexpr std::size_t kEntries = 256;
  Entry* entries_;
};

class NoMonitor : public WaitMonitor {
  void check(const Call&, std::span<const int>, Clock::duration) override {}
  void check_creation(std::span<const int>) override {}
};

struct Settings {
  int ranks = 2;
  std::string op;
  std::size_t bytes = 0;
  bool heap = false;
  Staging staging = Staging::kMeasured;
  std::size_t ring_bytes = 0;
  double seconds = 0.5;
};

/// One rank's buffers for one row, and the call itself.
class Row {
 public:
  Row(ShmTransport& transport, std::string op, std::size_t bytes, bool heap)
      : transport_(transport), op_(std::move(op)), count_(static_cast<std::int64_t>(bytes / 4)) {
    const std::size_t size = static_cast<std::size_t>(transport.size());
    const bool gathers = op_ == "all_gather";
    input_ = memory(bytes, heap);
    output_ = memory(gathers ? bytes * size : bytes, false);
    for (std::size_t peer = 0; peer < size; ++peer) {
      const std::int64_t ranks = transport.size();
      const auto rank = static_cast<std::int64_t>(peer);
      const std::int64_t first = count_ * rank / ranks;
      const std::int64_t last = count_ * (rank + 1) / ranks;
      inputs_.push_back({input_ + first, last - first});
      if (gathers) {
        outputs_.push_back({output_ + count_ * rank, count_});
      } else {
        // What comes from each peer is as long as this rank's own share.
        const std::int64_t mine =
            count_ * (transport.rank() + 1) / ranks - count_ * transport.rank() / ranks;
        outputs_.push_back({output_ + mine * rank, mine});
      }
    }
  }

  void run() {
    Call call;
    call.dtype = DataType::kFloat32;
    call.sequence = ++sequence_;
    call.deadline = Clock::now() + std::chrono::seconds(30);
    const Piece whole{input_, count_};
    if (op_ == "all_reduce") {
      call.op = Operator::kAllReduce;
      call.reduce = ReduceOp::kSum;  // of zeros, so that the values stay what they are
      transport_.all_reduce(call, whole);
    } else if (op_ == "all_gather") {
      call.op = Operator::kAllGather;
      transport_.all_gather(call, whole, outputs_);
    } else if (op_ == "reduce_scatter") {
      call.op = Operator::kReduceScatter;
      call.reduce = ReduceOp::kSum;
      transport_.reduce_scatter(call, inputs_, outputs_[0]);
    } else if (op_ == "all_to_all") {
      call.op = Operator::kAllToAll;
      transport_.all_to_all(call, inputs_, outputs_);
    } else if (op_ == "broadcast") {
      call.op = Operator::kBroadcast;
      call.root = 0;
      transport_.broadcast(call, whole);
    } else if (op_ == "send_recv") {
      call.op = transport_.rank() == 0 ? Operator::kSend : Operator::kRecv;
      if (transport_.rank() == 0) transport_.send(call, whole, 1, 0);
      if (transport_.rank() == 1) transport_.recv(call, whole, 0, 0);
    }
  }

 private:
  float* memory(std::size_t bytes, bool heap) {
    if (heap) {
      owned_.push_back(transport_.allocate(bytes));
    } else {
      owned_.emplace_back(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096), std::free);
    }
    if (owned_.back() == nullptr) {
      std::fprintf(stderr, "bench: no room for %zu bytes in the heap\n", bytes);
      std::exit(1);
    }
    std::memset(owned_.back().get(), 0, std::max<std::size_t>(bytes, 4));
    return static_cast<float*>(owned_.back().get());
  }

  ShmTransport& transport_;
  std::string op_;
  std::int64_t count_;
  std::uint64_t sequence_ = 0;
  std::vector<std::shared_ptr<void>> owned_;
  float* input_ = nullptr;
  float* output_ = nullptr;
  std::vector<Piece> inputs_;
  std::vector<Piece> outputs_;
};

double at(const std::vector<double>& sorted, double quantile) {
  return sorted[static_cast<std::size_t>(quantile * static_cast<double>(sorted.size() - 1))];
}

void print_row(const Settings& settings, const std::string& op, std::size_t bytes,
               const char* state, std::vector<double> times) {
  if (times.empty()) return;
  std::sort(times.begin(), times.end());
  static const char* const stagings[] = {"measured", "cached", "streaming"};
  std::printf(
      "{\"name\": \"comm/shm/%s/%s/n%zu_p%d\", \"ranks\": %d, \"threads\": 1, \"isa\": \"%s\", "
      "\"device\": \"cpu\", \"cores\": \"%s\", \"bytes\": %zu, \"samples\": %zu, "
      "\"median_us\": %.3f, \"p10_us\": %.3f, \"p90_us\": %.3f}\n",
      op.c_str(), settings.heap ? "heap" : stagings[static_cast<int>(settings.staging)], bytes,
      settings.ranks, settings.ranks, std::string(name_of(tessera::kernels::active_isa())).c_str(),
      state, bytes, times.size(), at(times, 0.5) * 1e6, at(times, 0.1) * 1e6, at(times, 0.9) * 1e6);
  std::fflush(stdout);
}

/// How often to repeat is rank 0's decision; it tells the others.
int agree_on(ShmTransport& transport, int repeats) {
  Call call;
  call.op = Operator::kBroadcast;
  call.dtype = DataType::kInt32;
  call.root = 0;
  call.deadline = Clock::now() + std::chrono::seconds(30);
  std::int32_t value = repeats;
  transport.broadcast(call, {&value, 1});
  return value;
}

void measure(ShmTransport& transport, const Settings& settings, const std::string& op,
             std::size_t bytes) {
  Row row(transport, op, bytes, settings.heap);
  const auto timed = [&] {
    const auto begin = Clock::now();
    row.run();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  double shortest = 1.0;
  for (int i = 0; i < 5; ++i) shortest = std::min(shortest, timed());
  const double wanted = settings.seconds / std::max(shortest, 1e-7);
  const int repeats =
      agree_on(transport, static_cast<int>(std::min(std::max(wanted, 10.0), 200000.0)));
  std::vector<double> near;
  std::vector<double> far;
  for (int i = 0; i < repeats; ++i) {
    const double time = timed();
    (transport.cores_are_far() ? far : near).push_back(time);
  }
  if (transport.rank() != 0) return;
  print_row(settings, op, bytes, "near", near);
  print_row(settings, op, bytes, "far", far);
}

int run_rank(int rank, const Settings& settings, Bootstrap& bootstrap) {
  NoMonitor monitor;
  ShmOptions options;
  options.staging = settings.staging;
  options.ring_bytes = settings.ring_bytes;
  try {
    const auto transport = ShmTransport::create(rank, settings.ranks, bootstrap, monitor, options);
    std::vector<std::string> ops = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                    "broadcast"};
    std::vector<std::size_t> sizes = {4, 4000, 64000, 1000000, 25000000, 100000000};
    if (!settings.op.empty()) ops = {settings.op};
    if (settings.bytes != 0) sizes = {settings.bytes};
    for (const std::string& op : ops) {
      for (const std::size_t bytes : sizes) measure(*transport, settings, op, bytes);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
  return 0;
}

bool parse(int argc, char** argv, Settings& settings) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--heap") {
      settings.heap = true;
      continue;
    }
    if (i + 1 >= argc) return false;
    const std::string value = argv[++i];
    if (flag == "--ranks") {
      settings.ranks = std::atoi(value.c_str());
    } else if (flag == "--op") {
      settings.op = value;
    } else if (flag == "--bytes") {
      settings.bytes = std::strtoull(value.c_str(), nullptr, 10);
    } else if (flag == "--ring") {
      settings.ring_bytes = std::strtoull(value.c_str(), nullptr, 10);
    } else if (flag == "--seconds") {
      settings.seconds = std::atof(value.c_str());
    } else if (flag == "--staging") {
      settings.staging = value == "cached"      ? Staging::kCached
                         : value == "streaming" ? Staging::kStreaming
                                                : Staging::kMeasured;
    } else {
      return false;
    }
  }
  return settings.ranks >= 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (!parse(argc, argv, settings)) {
    std::fprintf(stderr,
                 "usage: shm_transport_bench [--ranks N] [--op NAME] [--bytes N] [--heap]\n"
                 "                           [--staging measured|cached|streaming] [--ring BYTES]\n"
                 "                           [--seconds S]\n");
    return 2;
  }
  SharedBootstrap bootstrap;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    if (fork() == 0) _exit(run_rank(rank, settings, bootstrap));
  }
  int code = 0;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    int status = 0;
    wait(&status);
    if (status != 0) code = 1;
  }
  return code;
}
