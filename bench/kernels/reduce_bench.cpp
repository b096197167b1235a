// Times the reduction and copy kernels of every instruction set beside the memory's own speed.
//
//   reduce_bench [--seconds S]
//
// One thread, 25 MB per array: more than the cache of a core, so that memory is the floor. The
// floor is the bytes that are read and written at the speed of a streaming copy in the same run.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "doctor/memory_speed.h"
#include "kernels/reduce.h"
#include "support/row.h"

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::Element;
using kernels::Store;

constexpr std::size_t kBytes = 25'000'000;
constexpr int kWarmUps = 3;
constexpr int kMinRepetitions = 10;

std::vector<double> repeat(const std::function<void()>& call, double seconds) {
  for (int i = 0; i < kWarmUps; ++i) call();
  std::vector<double> times;
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(seconds));
  while (times.size() < kMinRepetitions || Clock::now() < end) {
    const Clock::time_point begin = Clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  return times;
}

std::vector<char> sample(int seed) {
  std::vector<char> bytes(kBytes);
  auto* values = reinterpret_cast<float*>(bytes.data());
  for (std::size_t i = 0; i < kBytes / 4; ++i) {
    values[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(seed)) % 61);
  }
  return bytes;
}

struct Shape {
  const char* name;
  Element element;
  std::size_t element_bytes;
};
constexpr Shape kShapes[] = {{"float32", Element::kFloat32, 4},
                             {"float64", Element::kFloat64, 8},
                             {"bfloat16", Element::kBFloat16, 2},
                             {"float16", Element::kFloat16, 2}};

int run(double seconds) {
  const std::vector<char> first = sample(0);
  const std::vector<char> second = sample(3);
  std::vector<char> target(kBytes);
  std::vector<char> expected(kBytes);
  const void* const sources[] = {first.data(), second.data()};
  void* const targets[] = {target.data()};
  void* const judges[] = {expected.data()};
  const cli::MemorySpeed memory = cli::measure_memory(1, std::size_t{64} << 20, 7);
  RowLabel label;
  label.bytes = kBytes;
  label.copy_gbps = memory.copy / 1e9;
  for (const kernels::Isa isa : kernels::supported_isas()) {
    const kernels::ReduceKernels& table = *kernels::reduce_kernels(isa);
    label.isa = kernels::name_of(isa);
    for (const Shape& shape : kShapes) {
      const auto count = static_cast<std::int64_t>(kBytes / shape.element_bytes);
      kernels::reduce_reference().reduce(shape.element, kernels::Reduction::kSum, sources, 2,
                                         judges, 1, count, Store::kCached);
      for (const Store store : {Store::kCached, Store::kStreaming}) {
        const auto call = [&] {
          table.reduce(shape.element, kernels::Reduction::kSum, sources, 2, targets, 1, count,
                       store);
        };
        call();
        if (std::memcmp(target.data(), expected.data(), count * shape.element_bytes) != 0) {
          std::fprintf(stderr, "reduce_bench: %s %s gives wrong values\n", label.isa.c_str(),
                       shape.name);
          return 1;
        }
        label.name = std::string("kernels/reduce_") + shape.name + "/" + label.isa +
                     (store == Store::kCached ? "" : "_streaming") + "/n" + std::to_string(kBytes) +
                     "_s2";
        label.floor_us = 3.0 * kBytes / label.copy_gbps / 1e3;
        print_row(label, repeat(call, seconds));
      }
    }
    label.name = "kernels/copy/" + label.isa + "_streaming/n" + std::to_string(kBytes);
    label.floor_us = 2.0 * kBytes / label.copy_gbps / 1e3;
    print_row(label,
              repeat([&] { table.copy(target.data(), first.data(), kBytes, Store::kStreaming); },
                     seconds));
  }
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  double seconds = 0.2;
  if (argc == 3 && std::string(argv[1]) == "--seconds") seconds = std::atof(argv[2]);
  return tessera::bench::run(seconds);
}
