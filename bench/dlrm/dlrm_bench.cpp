// Times what surrounds the tables of a DLRM, on two ranks at once as in training, one thread each:
// the dense layers, reading a batch; and turning Criteo's text into the binary format, on all
// cores.
//
//   dlrm/interaction_forward, dlrm/interaction_backward    the peer is torch's own operators; the
//                    floor is inputs, output and their gradients, read or written once
//   dlrm/dense       forward, backward and SGD step of all dense layers, rows given
//   dlrm/read        a batch of the binary format; the floor is its bytes, read and written once;
//                    cold: of a file on disk that is not in memory, one batch per 40 ms, as the
//                    step waits for its reader
//   dlrm/convert     n bytes of text to a file in memory
//
//   dlrm_bench [--seconds S]

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include "dlrm/batch.h"
#include "dlrm/click_file.h"
#include "dlrm/criteo.h"
#include "dlrm/model.h"
#include "kernels/dispatch.h"
#include "support/rank_bench.h"
#include "support/row.h"
#include "tessera/pipeline/read_ahead.h"

namespace tessera::bench {
namespace {

using namespace workloads::dlrm;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kBatch = 2048;
constexpr std::int64_t kFeatures = 26;
constexpr std::int64_t kDim = 32;
constexpr std::int64_t kSamples = 131072;
constexpr const char* kShape = "b2048_n26_d32";

/// Measures rows on all ranks at the same time, or on one of them.
class Rows {
 public:
  Rows(RankBench& bench, double seconds) : bench_(bench), seconds_(seconds) {}

  /// `moved`: bytes that are read or written at least, for the floor.
  void measure(const std::string& name, const std::function<void()>& call, std::size_t bytes = 0,
               double moved = 0) {
    const Samples samples = bench_.measure(call, 1, seconds_);
    if (bench_.rank() != 0) return;
    RowLabel label = label_of(name, bytes);
    label.ranks = bench_.size();
    label.others = samples.others;
    label.copy_gbps = samples.copy_gbps;
    label.floor_us = bench_.size() * moved / (samples.copy_gbps * 1e3);
    for (const bool is_far : {false, true}) {
      label.state = is_far ? "far" : "near";
      print_row(label, is_far ? samples.far : samples.near);
    }
  }

  void measure_alone(const std::string& name, const std::function<void()>& call,
                     std::size_t bytes) {
    std::vector<double> times;
    call();
    const auto begin = Clock::now();
    while (times.size() < 5 || Clock::now() - begin < std::chrono::duration<double>(seconds_)) {
      const auto start = Clock::now();
      call();
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    }
    RowLabel label = label_of(name, bytes);
    label.threads = static_cast<int>(std::thread::hardware_concurrency());
    print_row(label, times);
  }

 private:
  static RowLabel label_of(const std::string& name, std::size_t bytes) {
    RowLabel label;
    label.name = "dlrm/" + name;
    label.isa = std::string(kernels::name_of(kernels::active_isa()));
    label.bytes = bytes;
    return label;
  }

  RankBench& bench_;
  double seconds_;
};

using Operator = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;

void measure_interaction(Rows& rows) {
  const at::Tensor dense = at::randn({kBatch, kDim}).requires_grad_(true);
  const at::Tensor embeddings = at::randn({kBatch, kFeatures * kDim}).requires_grad_(true);
  const Operator ours = [](const auto& a, const auto& b) { return dot_interaction(a, b); };
  const Operator theirs = dot_interaction_reference;
  if (!at::allclose(ours(dense, embeddings), theirs(dense, embeddings), 1e-4, 1e-4)) {
    throw std::runtime_error("the interactions differ");
  }
  const auto both = [&](const std::string& variant, const Operator& interaction) {
    const std::string end = "/" + variant + "/" + kShape;
    const at::Tensor out = interaction(dense, embeddings);
    const auto read = static_cast<double>(dense.nbytes() + embeddings.nbytes());
    const auto made = static_cast<double>(out.nbytes());
    rows.measure(
        "interaction_forward" + end, [&] { (void)interaction(dense, embeddings); },
        dense.nbytes() + embeddings.nbytes(), read + made);
    const at::Tensor gradient = at::ones_like(out);
    rows.measure(
        "interaction_backward" + end,
        [&] {
          (void)torch::autograd::grad({out}, {dense, embeddings}, {gradient},
                                      /*retain_graph=*/true);
        },
        out.nbytes(), 2 * read + made);
  };
  both("tessera", ours);
  both("torch", theirs);
}

void measure_dense(Rows& rows) {
  DlrmOptions options;
  std::vector<std::int64_t> widths;
  for (std::int64_t f = 0; f < kFeatures; ++f) {
    options.features.push_back("cat_" + std::to_string(f));
    widths.push_back(kDim);
  }
  Dlrm model(options);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01));
  const at::Tensor dense = at::randn({kBatch, options.num_dense});
  const at::Tensor embeddings = at::randn({kBatch, kFeatures * kDim}).requires_grad_(true);
  const at::Tensor labels = at::randint(0, 2, {kBatch}, at::kFloat);
  rows.measure(std::string("dense/tessera/") + kShape, [&] {
    optimizer.zero_grad(/*set_to_none=*/false);
    const at::Tensor logits =
        model.forward(dense, jagged::KeyedTensor(options.features, widths, embeddings));
    at::binary_cross_entropy_with_logits(logits, labels).backward();
    optimizer.step();
  });
}

void write_log(const std::string& path, std::int64_t bag) {
  SyntheticOptions options;
  options.schema.features = equal_features(kFeatures, 100000, bag);
  options.num_samples = kSamples;
  const SyntheticLog log(options);
  ClickFileWriter writer(path, log.schema());
  SampleBlock samples;
  for (std::int64_t first = 0; first < kSamples; first += 8192) {
    log.read(first, 8192, samples);
    writer.append(samples);
  }
  writer.finish();
}

void measure_read(Rows& rows, const std::string& folder, std::int64_t bag) {
  const std::string path = folder + "/clicks.click";
  write_log(path, bag);
  BatchSource source(std::make_shared<const ClickFile>(path), {.batch_size = kBatch});
  // Ids are 4 bytes in the file and 8 in the batch, lengths are made.
  const auto per_sample = static_cast<double>(kFeatures * (bag * 12 + 4) + 13 * 8 + 5);
  const auto bytes = static_cast<std::size_t>(kBatch * (kFeatures * bag * 4 + 13 * 4 + 1));
  rows.measure(
      "read/binary/b2048_l" + std::to_string(bag),
      [&] {
        if (!source.next()) {
          source.seek(0);
          (void)source.next();
        }
      },
      bytes, per_sample * static_cast<double>(kBatch));
}

// Makes the system forget what it holds of a file.
void forget(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::fsync(fd);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  const std::size_t bytes = std::filesystem::file_size(path);
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  if (data == MAP_FAILED) throw std::runtime_error("the log cannot be mapped");
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes + page - 1) / page, 1);
  ::mincore(data, bytes, pages.data());
  ::munmap(data, bytes);
  if (std::any_of(pages.begin(), pages.end(), [](unsigned char one) { return (one & 1U) != 0; })) {
    throw std::runtime_error("the log is still in memory");
  }
}

// A file that the system has forgotten, read as training reads it: a batch, then a step.
void measure_cold_read(std::int64_t bag) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() /
                                       ("dlrm_bench-" + std::to_string(::getpid()) + "-cold");
  std::filesystem::create_directory(folder);
  const std::string path = folder / "clicks.click";
  write_log(path, bag);
  std::vector<double> times;
  {
    forget(path);
    BatchSource source(std::make_shared<const ClickFile>(path), {.batch_size = kBatch});
    pipeline::ReadAhead<ClickBatch> ahead([&] { return source.next(); });
    (void)ahead.next();  // nobody could read it before
    for (std::int64_t step = 1; step < source.num_steps(); ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
      const auto start = Clock::now();
      (void)ahead.next();
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    }
  }
  std::filesystem::remove_all(folder);
  RowLabel label;
  label.name = "dlrm/read/binary_cold/b2048_l" + std::to_string(bag);
  label.isa = std::string(kernels::name_of(kernels::active_isa()));
  label.bytes = static_cast<std::size_t>(kBatch * (kFeatures * bag * 4 + 13 * 4 + 1));
  print_row(label, times);
}

void measure_convert(Rows& rows, const std::string& folder) {
  const SyntheticLog log(SyntheticOptions{});
  std::string text;
  while (text.size() < 50'000'000) {
    append_criteo_lines(log, static_cast<std::int64_t>(text.size()), 8192, text);
  }
  std::ofstream(folder + "/clicks.tsv", std::ios::binary) << text;
  const CriteoOptions options;
  rows.measure_alone(
      "convert/criteo/n" + std::to_string(text.size()),
      [&] {
        ClickFileWriter writer(folder + "/converted.click", {kCriteoDense, options.features});
        const CriteoReport report =
            read_criteo(folder + "/clicks.tsv", options,
                        [&](const SampleBlock& samples) { writer.append(samples); });
        writer.finish();
        if (report.num_bad > 0) throw std::runtime_error("a line was not understood");
      },
      text.size());
}

void run(RankBench& bench, double seconds) {
  at::set_num_threads(1);
  Rows rows(bench, seconds);
  const std::string folder = "/dev/shm/dlrm_bench-" + std::to_string(::getpid());
  std::filesystem::create_directory(folder);
  measure_interaction(rows);
  measure_dense(rows);
  measure_read(rows, folder, 1);
  measure_read(rows, folder, 10);
  bench.meet();
  if (bench.rank() == 0) measure_cold_read(10);
  if (bench.rank() == 0) measure_convert(rows, folder);  // the other core is its second thread's
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  double seconds = 2.0;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
  }
  return tessera::bench::run_ranks(argc, argv, {2}, [&](tessera::bench::RankBench& bench) {
    tessera::bench::run(bench, seconds);
  });
}
