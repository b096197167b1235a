// Times the collectives of tessera::comm over shared memory beside LibTorch's Gloo, in one run.
//
//   collectives_bench [--ranks N] [--op NAME] [--bytes N] [--engine NAME] [--seconds S]
//
// Variants: shm; shm_heap, on tensors from allocateTensor; shm_fresh, where the call allocates its
// result; gloo, LibTorch's ProcessGroupGloo itself, called through the same functions; and
// gloo_checked, Tessera's Gloo engine, which first compares what the ranks are about to do. Bytes
// are those of one rank's input. Outputs are allocated before, except in shm_fresh.

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "kernels/dispatch.h"
#include "support/rank_bench.h"
#include "support/rank_groups.h"
#include "support/row.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"

namespace tessera::bench {
namespace {

struct Settings {
  std::string op;
  std::string engine;
  std::int64_t bytes = 0;
  double seconds = 0.4;
};

/// One call with its tensors: what to time, what must come out, and what must move at least.
struct Case {
  std::function<void()> call;
  std::function<bool()> is_right;  // after one call
  std::function<void()> settle;    // makes the values such that repeated calls keep them
  double floor_bytes = 0;          // of all ranks together, read or written
};

/// Where the tensors of a case come from.
using Allocate = std::function<at::Tensor(std::int64_t count)>;

at::Tensor pattern(std::int64_t count, int rank) {
  return at::arange(count, at::kFloat).remainder(61) + static_cast<float>(rank);
}

at::Tensor pattern_sum(std::int64_t count, int size) {
  return at::arange(count, at::kFloat).remainder(61) * size +
         static_cast<float>(size * (size - 1) / 2);
}

c10::intrusive_ptr<c10d::Backend> engine_of(const comm::Group& group) {
  return group.process_group()->getBackend(c10::DeviceType::CPU);
}

void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

Case all_reduce_case(const comm::Group& group, std::int64_t count, const Allocate& allocate) {
  at::Tensor tensor = allocate(count);
  tensor.copy_(pattern(count, group.rank()));
  return {[=]() mutable { comm::all_reduce_(tensor, group); },
          [=] { return at::equal(tensor, pattern_sum(count, group.size())); },
          [=]() mutable { tensor.zero_(); }, 2.0 * 4.0 * static_cast<double>(count) * group.size()};
}

Case broadcast_case(const comm::Group& group, std::int64_t count, const Allocate& allocate) {
  at::Tensor tensor = allocate(count);
  tensor.copy_(pattern(count, group.rank()));
  return {[=]() mutable { comm::broadcast_(tensor, 0, group); },
          [=] { return at::equal(tensor, pattern(count, 0)); }, [] {},
          4.0 * static_cast<double>(count) * group.size()};
}

Case all_gather_case(const comm::Group& group, std::int64_t count, const Allocate& allocate) {
  at::Tensor input = allocate(count);
  input.copy_(pattern(count, group.rank()));
  at::Tensor output = at::zeros({count * group.size()});
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  const double size = group.size();
  return {[=, engine = engine_of(group)]() mutable {
            wait_for(engine->_allgather_base(output, input, options));
          },
          [=] {
            for (int rank = 0; rank < group.size(); ++rank) {
              if (!at::equal(output.narrow(0, rank * count, count), pattern(count, rank))) {
                return false;
              }
            }
            return true;
          },
          [] {}, 4.0 * static_cast<double>(count) * (size + size * size)};
}

Case reduce_scatter_case(const comm::Group& group, std::int64_t count, const Allocate& allocate) {
  at::Tensor input = allocate(count);
  input.copy_(pattern(count, group.rank()));
  const std::int64_t share = count / group.size();
  at::Tensor output = at::zeros({share});
  c10d::ReduceScatterOptions options;
  options.asyncOp = false;
  return {[=, engine = engine_of(group)]() mutable {
            wait_for(engine->_reduce_scatter_base(output, input, options));
          },
          [=] {
            return at::equal(
                output, pattern_sum(count, group.size()).narrow(0, group.rank() * share, share));
          },
          [] {}, 4.0 * static_cast<double>(count) * (group.size() + 1.0)};
}

Case all_to_all_case(const comm::Group& group, std::int64_t count, const Allocate& allocate) {
  at::Tensor input = allocate(count);
  input.copy_(pattern(count, group.rank()));
  const std::int64_t share = count / group.size();
  at::Tensor output = at::zeros({count});
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  return {[=, engine = engine_of(group), rows = std::vector<std::int64_t>()]() mutable {
            wait_for(engine->alltoall_base(output, input, rows, rows, options));
          },
          [=] {
            for (int rank = 0; rank < group.size(); ++rank) {
              if (!at::equal(output.narrow(0, rank * share, share),
                             pattern(count, rank).narrow(0, group.rank() * share, share))) {
                return false;
              }
            }
            return true;
          },
          [] {}, 2.0 * 4.0 * static_cast<double>(count) * group.size()};
}

// The same through the functions that return a new tensor.
Case fresh_all_gather_case(const comm::Group& group, std::int64_t count, const Allocate& allocate) {
  at::Tensor input = allocate(count);
  input.copy_(pattern(count, group.rank()));
  auto output = std::make_shared<at::Tensor>();
  const double size = group.size();
  return {[=] {
            output->reset();
            *output = comm::all_gather(input, group);
          },
          [=] {
            return at::equal(output->narrow(0, 0, count), pattern(count, 0)) &&
                   at::equal(output->narrow(0, count, count), pattern(count, 1));
          },
          [] {}, 4.0 * static_cast<double>(count) * (size + size * size)};
}

Case fresh_all_reduce_case(const comm::Group& group, std::int64_t count, const Allocate& allocate) {
  at::Tensor input = allocate(count);
  input.copy_(pattern(count, group.rank()));
  auto output = std::make_shared<at::Tensor>();
  return {[=] {
            output->reset();
            *output = comm::all_reduce(input, group);
          },
          [=] { return at::equal(*output, pattern_sum(count, group.size())); }, [] {},
          2.0 * 4.0 * static_cast<double>(count) * group.size()};
}

struct Operator {
  const char* name;
  Case (*make)(const comm::Group& group, std::int64_t count, const Allocate& allocate);
  Case (*make_fresh)(const comm::Group& group, std::int64_t count, const Allocate& allocate);
};
constexpr Operator kOperators[] = {
    {"all_reduce", all_reduce_case, fresh_all_reduce_case},
    {"all_gather", all_gather_case, fresh_all_gather_case},
    {"reduce_scatter", reduce_scatter_case, nullptr},
    {"all_to_all", all_to_all_case, nullptr},
    {"broadcast", broadcast_case, nullptr},
};

constexpr std::int64_t kSizes[] = {4, 4'000, 64'000, 1'000'000, 25'000'000, 100'000'000};

// Calls between two readings of the clock: small ones are as short as the clock itself.
int batch_for(std::int64_t bytes) { return bytes <= 64'000 ? 20 : bytes <= 1'000'000 ? 4 : 1; }

/// The groups that every operator is timed on.
struct Groups {
  explicit Groups(const RankGroups& ranks)
      : shm(ranks.of(comm::Engine::kShm, "shm")),
        gloo(ranks.plain_gloo("gloo")),
        gloo_checked(ranks.of(comm::Engine::kGloo, "gloo_checked")) {}

  comm::Group shm;
  comm::Group gloo;
  comm::Group gloo_checked;
};

class CollectivesBench {
 public:
  CollectivesBench(RankBench& bench, const Settings& settings)
      : bench_(bench), settings_(settings), groups_(RankGroups(bench)) {}

  void run() {
    for (const Operator& op : kOperators) {
      if (!settings_.op.empty() && settings_.op != op.name) continue;
      for (const std::int64_t bytes : kSizes) {
        if (settings_.bytes == 0 || settings_.bytes == bytes) run_size(op, bytes);
      }
    }
    bench_.meet();
  }

 private:
  void run_size(const Operator& op, std::int64_t bytes) {
    const Allocate ordinary = [](std::int64_t count) { return at::zeros({count}); };
    const Allocate heap = [this](std::int64_t count) {
      at::Tensor tensor = engine_of(groups_.shm)->allocateTensor(count, at::kFloat);
      return tensor.zero_();
    };
    const bool is_all_reduce = std::strcmp(op.name, "all_reduce") == 0;
    time(op, op.make, "shm", groups_.shm, bytes, ordinary);
    if (is_all_reduce) time(op, op.make, "shm_heap", groups_.shm, bytes, heap);
    if (op.make_fresh != nullptr && bytes >= 25'000'000) {
      time(op, op.make_fresh, "shm_fresh", groups_.shm, bytes, ordinary);
    }
    time(op, op.make, "gloo", groups_.gloo, bytes, ordinary);
    if (is_all_reduce) time(op, op.make, "gloo_checked", groups_.gloo_checked, bytes, ordinary);
  }

  void time(const Operator& op, decltype(Operator::make) make, const std::string& variant,
            const comm::Group& group, std::int64_t bytes, const Allocate& allocate) {
    if (!settings_.engine.empty() && settings_.engine != variant) return;
    const std::int64_t size = bench_.size();
    // Operators that cut need a whole number of elements for every rank.
    const std::int64_t count = (bytes / 4 + size - 1) / size * size;
    const std::int64_t exact = op.name == std::string("all_gather") ? bytes / 4 : count;
    Case one = make(group, exact, allocate);
    one.call();
    if (!one.is_right()) {
      throw std::runtime_error(std::string(op.name) + " on " + variant + ": wrong values");
    }
    one.settle();
    const Samples samples = bench_.measure(one.call, batch_for(bytes), settings_.seconds);
    if (bench_.rank() != 0) return;
    RowLabel label;
    label.name = std::string("comm/") + op.name + "/" + variant + "/n" + std::to_string(bytes) +
                 "_p" + std::to_string(bench_.size());
    label.ranks = bench_.size();
    label.isa = kernels::name_of(kernels::active_isa());
    label.bytes = static_cast<std::size_t>(bytes);
    label.others = samples.others;
    if (bytes >= 1'000'000) {
      label.floor_us = one.floor_bytes / samples.copy_gbps / 1e3;
      label.copy_gbps = samples.copy_gbps;
    }
    // A handful of repetitions at the edge of a change of state says nothing.
    constexpr std::size_t kFew = 5;
    const bool is_mostly_near = samples.near.size() >= samples.far.size();
    label.state = "near";
    if (is_mostly_near || samples.near.size() >= kFew) print_row(label, samples.near);
    label.state = "far";
    if (!is_mostly_near || samples.far.size() >= kFew) print_row(label, samples.far);
  }

  RankBench& bench_;
  const Settings& settings_;
  Groups groups_;
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = argv[i + 1];
    if (flag == "--op") settings.op = value;
    if (flag == "--engine") settings.engine = value;
    if (flag == "--bytes") settings.bytes = std::atoll(value);
    if (flag == "--seconds") settings.seconds = std::atof(value);
  }
  return settings;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  const Settings settings = read_settings(argc, argv);
  return run_ranks(argc, argv, {2, 4}, [&](RankBench& bench) {
    at::set_num_threads(1);
    CollectivesBench(bench, settings).run();
  });
}
