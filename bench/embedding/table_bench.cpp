// Times a batch of tables beside the memory's own speed, in one run.
//
//   table_bench [--seconds S] [--threads N] [--quick]
//
// 8 tables of 200,000 rows of 64 float32, 2048 samples, 20 ids a sample; 8 batches of ids take
// turns, because the rows of one would partly stay in the cache. The floor of a row is what its
// lines of memory cost, visited in the order of the ids with nothing computed: read for the forward
// pass, read and written for a step, with the lines of the optimizer's state.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "kernels/dispatch.h"
#include "support/row.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::bench {
namespace {

using namespace embedding;
using Clock = std::chrono::steady_clock;

struct Shape {
  std::int64_t num_tables = 8;
  std::int64_t num_rows = 200'000;
  std::int64_t num_columns = 64;  // the floor knows
  std::int64_t batch = 2048;
  std::int64_t bag = 20;
  int rotation = 8;
  std::int64_t num_ids() const { return num_tables * batch * bag; }
};

enum class Ids { kUniform, kZipf };

/// A draw of Zipf's law with exponent 1.05 by rejection (Devroye), modulo the rows.
std::int64_t zipf(std::mt19937_64& random, std::int64_t num_rows) {
  constexpr double kExponent = 1.05;
  const double b = std::pow(2.0, kExponent - 1.0);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  while (true) {
    const double x = std::floor(std::pow(1.0 - uniform(random), -1.0 / (kExponent - 1.0)));
    if (!(x < 9e18)) continue;
    const double t = std::pow(1.0 + 1.0 / x, kExponent - 1.0);
    if (uniform(random) * x * (t - 1.0) / (b - 1.0) <= t / b) {
      return static_cast<std::int64_t>(x) % num_rows;
    }
  }
}

std::vector<LookupInput> inputs_of(const Shape& shape, Ids kind) {
  std::mt19937_64 random(kind == Ids::kZipf ? 2 : 1);
  std::vector<LookupInput> inputs;
  for (int i = 0; i < shape.rotation; ++i) {
    LookupInput input;
    input.ids = at::empty({shape.num_ids()}, at::kLong);
    auto* ids = input.ids.data_ptr<std::int64_t>();
    for (std::int64_t k = 0; k < shape.num_ids(); ++k) {
      ids[k] =
          kind == Ids::kZipf
              ? zipf(random, shape.num_rows)
              : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape.num_rows));
    }
    input.offsets = at::arange(0, shape.num_ids() + 1, shape.bag, at::kLong);
    inputs.push_back(input);
  }
  return inputs;
}

TableBatch batch_of(const Shape& shape, const OptimizerOptions& options,
                    at::ScalarType type = at::kFloat) {
  std::vector<Table> tables;
  std::vector<Feature> features;
  for (std::int64_t i = 0; i < shape.num_tables; ++i) {
    const std::string name = std::string("t").append(std::to_string(i));
    at::Tensor weight = empty_rows(shape.num_rows, shape.num_columns, type);
    weight.uniform_(-0.01, 0.01);
    tables.push_back({name, weight});
    features.push_back({name, i});
  }
  return {tables, features, {.gradients = GradientForm::kFused, .optimizer = options}};
}

/// Visits every line of the rows of all ids, fetching some rows ahead; the tables are shared out to
/// the threads. `arrays` per table: the rows, then the state; a width of 4 is one number per row,
/// others are rows of 64 float32.
struct Visit {
  std::vector<std::vector<char*>> arrays;
  std::vector<std::int64_t> widths;
  bool writes = false;

  void operator()(const Shape& shape, const LookupInput& input) const {
    writes ? run<true>(shape, input) : run<false>(shape, input);
  }

 private:
  static constexpr std::int64_t kRowBytes = 256;

  template <bool kWrites>
  void run(const Shape& shape, const LookupInput& input) const {
    const auto* ids = input.ids.const_data_ptr<std::int64_t>();
    const std::int64_t count = shape.batch * shape.bag;
    std::int64_t lines = 0;
    for (const std::int64_t width : widths) lines += (width + 63) / 64;
    const std::int64_t ahead = std::clamp<std::int64_t>(128 / lines, 3, 32);
    at::parallel_for(0, shape.num_tables, 1, [&](std::int64_t begin, std::int64_t end) {
      int sum = 0;
      for (std::int64_t table = begin; table < end; ++table) {
        const std::int64_t* own = ids + table * count;
        for (std::int64_t k = 0; k < count; ++k) {
          const std::int64_t next = own[std::min(k + ahead, count - 1)];
          for (std::size_t a = 0; a < widths.size(); ++a) {
            char* data = arrays[static_cast<std::size_t>(table)][a];
            if (widths[a] == kRowBytes) {
              fetch<kRowBytes>(data + next * kRowBytes);
              sum += touch<kWrites, kRowBytes>(data + own[k] * kRowBytes);
            } else {
              fetch<4>(data + next * 4);
              sum += touch<kWrites, 4>(data + own[k] * 4);
            }
          }
        }
      }
      if (sum == 0x12345678) std::fprintf(stderr, " ");
    });
  }

  // Inlined by force: GCC takes a function that only prefetches for one that does nothing.
  template <std::int64_t kBytes>
  __attribute__((always_inline)) static inline void fetch(const char* row) {
    for (std::int64_t at = 0; at < kBytes; at += 64) {
      __builtin_prefetch(row + at, /*rw=*/0, /*locality=*/2);
    }
  }

  template <bool kWrites, std::int64_t kBytes>
  static int touch(char* row) {
    auto* words = reinterpret_cast<int*>(row);
    int sum = 0;
    if constexpr (kWrites) {
      for (std::int64_t i = 0; i < kBytes / 4; ++i) words[i] ^= 1;
    } else {
      for (std::int64_t i = 0; i < kBytes / 4; i += 16) {
        sum += static_cast<volatile int*>(words)[i];
      }
    }
    return sum;
  }
};

Visit visit_of(const TableBatch& batch, bool writes, bool with_state) {
  Visit visit;
  visit.writes = writes;
  const auto& tables = batch.tables();
  const auto state = batch.optimizer()->state_dict();
  for (const Table& table : tables) {
    auto& arrays = visit.arrays.emplace_back();
    arrays.push_back(static_cast<char*>(table.weight.data_ptr()));
    visit.widths = {table.weight.size(1) * table.weight.element_size()};
    for (const char* name : {".momentum1", ".momentum2"}) {
      const auto found = state.find(table.name + name);
      if (!with_state || found == state.end()) continue;
      arrays.push_back(static_cast<char*>(found->second.data_ptr()));
      visit.widths.push_back(found->second.dim() == 2 ? found->second.size(1) * 4 : 4);
    }
  }
  return visit;
}

double microseconds(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return quantile_of(times, 0.5);
}

struct Times {
  std::vector<double> forward_floor;
  std::vector<double> forward;
  std::vector<double> step_floor;
  std::vector<double> step;
  std::vector<double> both;
};

/// The passes take turns, so that a change of the machine's mood meets them all.
Times measure(const Shape& shape, const TableBatch& batch, const std::vector<LookupInput>& inputs,
              double seconds) {
  const Visit read = visit_of(batch, false, false);
  const Visit write = visit_of(batch, true, true);
  const at::Tensor grad = at::rand({shape.batch, batch.num_columns()}).sub_(0.5).mul_(1e-3);
  Times times;
  const Clock::time_point start = Clock::now();
  for (std::size_t i = 0; i < 16 || microseconds(start) < seconds * 1e6; ++i) {
    const auto next = [&](std::size_t shift) -> const LookupInput& {
      return inputs[(i + shift) % inputs.size()];
    };
    Clock::time_point begin = Clock::now();
    read(shape, next(0));
    const double reading = microseconds(begin);
    begin = Clock::now();
    const at::Tensor output = batch.pooled(next(2));
    const double forward = microseconds(begin);
    begin = Clock::now();
    output.backward(grad);
    const double step = microseconds(begin);
    begin = Clock::now();
    write(shape, next(4));
    const double writing = microseconds(begin);
    if (i < 4) continue;
    times.forward_floor.push_back(reading);
    times.forward.push_back(forward);
    times.step.push_back(step);
    times.both.push_back(forward + step);
    times.step_floor.push_back(writing);
  }
  return times;
}

struct Rule {
  const char* name;
  OptimizerKind kind;
};
constexpr Rule kRules[] = {{"sgd", OptimizerKind::kSgd},
                           {"rowwise_adagrad", OptimizerKind::kRowWiseAdagrad},
                           {"adam", OptimizerKind::kAdam}};

void run_shape(const Shape& shape, int threads, double seconds, bool is_small) {
  at::set_num_threads(threads);
  for (const Rule& rule : kRules) {
    const TableBatch batch = batch_of(shape, {.kind = rule.kind, .learning_rate = 0.01});
    for (const Ids kind : {Ids::kUniform, Ids::kZipf}) {
      const auto inputs = inputs_of(shape, kind);
      const Times times = measure(shape, batch, inputs, seconds);
      RowLabel label;
      label.threads = threads;
      label.isa = kernels::name_of(kernels::active_isa());
      label.bytes = static_cast<std::size_t>(shape.num_ids() * shape.num_columns * 4);
      const std::string end = std::string("/")
                                  .append(kind == Ids::kZipf ? "zipf" : "uniform")
                                  .append("_b")
                                  .append(std::to_string(shape.batch))
                                  .append("_t")
                                  .append(std::to_string(threads));
      const auto print = [&](const char* what, const char* variant, double floor,
                             const std::vector<double>& found) {
        label.name = std::string("embedding/")
                         .append(rule.name)
                         .append(what)
                         .append("/")
                         .append(variant)
                         .append(end);
        label.floor_us = is_small ? 0.0 : floor;
        print_row(label, found);
      };
      const double read = median(times.forward_floor);
      const double write = median(times.step_floor);
      print("_forward", "tessera", read, times.forward);
      print("_backward", "tessera", write, times.step);
      print("_both", "tessera", read + write, times.both);
    }
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  double seconds = 1.0;
  int threads = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--quick") seconds = 0.2;
    if (word == "--seconds" && i + 1 < argc) seconds = std::atof(argv[++i]);
    if (word == "--threads" && i + 1 < argc) threads = std::atoi(argv[++i]);
  }
  using tessera::bench::run_shape;
  using tessera::bench::Shape;
  for (const int count : threads > 0 ? std::vector<int>{threads} : std::vector<int>{1, 2}) {
    run_shape(Shape{}, count, seconds, false);
    Shape small;
    small.batch = 64;
    run_shape(small, count, seconds / 4, true);
  }
  return 0;
}
