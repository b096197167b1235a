// tessera-worker doctor-rank — one of the two ranks of the self-test of `tessera doctor`.
//
// Checks the values of the collectives on every engine of this build, measures a small and a large
// all-reduce, and lets rank 0 print one line of JSON.

#include <dlfcn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "doctor_devices.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/group.h"
#include "tessera/core/version.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLimit{10};

// One element, one that fits into a slot, one that needs the rings.
constexpr std::int64_t kSizes[] = {2, 1000, 300'000};

// Small integers, so that sums are exact.
at::Tensor sample(std::int64_t count, int rank) {
  return at::arange(count, at::kFloat).remainder(97) + static_cast<float>(rank * 100);
}

at::Tensor expected_sum(std::int64_t count, int size) {
  at::Tensor sum = sample(count, 0);
  for (int rank = 1; rank < size; ++rank) sum += sample(count, rank);
  return sum;
}

bool check_all_reduce(std::int64_t count, const comm::Group& group) {
  return at::equal(comm::all_reduce(sample(count, group.rank()), group),
                   expected_sum(count, group.size()));
}

bool check_all_gather(std::int64_t count, const comm::Group& group) {
  const at::Tensor all = comm::all_gather(sample(count, group.rank()), group);
  for (int rank = 0; rank < group.size(); ++rank) {
    if (!at::equal(all.narrow(0, rank * count, count), sample(count, rank))) return false;
  }
  return true;
}

bool check_reduce_scatter(std::int64_t count, const comm::Group& group) {
  const std::int64_t share = count / group.size();
  const at::Tensor sum = expected_sum(count, group.size());
  return at::equal(comm::reduce_scatter(sample(count, group.rank()), group),
                   sum.narrow(0, group.rank() * share, share));
}

bool check_all_to_all(std::int64_t count, const comm::Group& group) {
  const std::int64_t share = count / group.size();
  const at::Tensor arrived = comm::all_to_all(sample(count, group.rank()), group);
  for (int rank = 0; rank < group.size(); ++rank) {
    const at::Tensor sent = sample(count, rank).narrow(0, group.rank() * share, share);
    if (!at::equal(arrived.narrow(0, rank * share, share), sent)) return false;
  }
  return true;
}

bool check_broadcast(std::int64_t count, const comm::Group& group) {
  const int root = group.size() - 1;
  at::Tensor tensor = sample(count, group.rank());
  comm::broadcast_(tensor, root, group);
  return at::equal(tensor, sample(count, root));
}

bool check_send(std::int64_t count, const comm::Group& group) {
  if (group.rank() == 0) {
    comm::send(sample(count, 0), 1, group);
    return true;
  }
  at::Tensor tensor = at::zeros({count});
  if (group.rank() == 1) comm::recv_(tensor, 0, group);
  return group.rank() != 1 || at::equal(tensor, sample(count, 0));
}

struct Check {
  const char* name;
  bool (*run)(std::int64_t count, const comm::Group& group);
};
constexpr Check kChecks[] = {
    {"all_reduce", check_all_reduce},         {"all_gather", check_all_gather},
    {"reduce_scatter", check_reduce_scatter}, {"all_to_all", check_all_to_all},
    {"broadcast", check_broadcast},           {"send_recv", check_send},
};

// Whether every rank agrees, told over an engine that may be another than the one under test.
bool everywhere(bool mine, const comm::Group& group) {
  at::Tensor verdict = at::full({1}, mine ? 1 : 0, at::kInt);
  comm::all_reduce_(verdict, group, comm::Reduction::kMin);
  return verdict.item<int>() == 1;
}

Json check_engine(const std::string& name, const comm::Group& group, const comm::Group& judge) {
  Json checks = Json::array();
  for (const Check& check : kChecks) {
    bool passed = true;
    for (const std::int64_t count : kSizes) passed = check.run(count, group) && passed;
    checks.push_back({{"engine", name},
                      {"operator", check.name},
                      {"passed", everywhere(passed, judge)},
                      {"error", nullptr}});
  }
  return checks;
}

// Median time of one call in microseconds, the slower rank's; `batch` calls between two readings.
double measure_all_reduce(std::int64_t count, int repetitions, int batch,
                          const comm::Group& group) {
  at::Tensor tensor = at::zeros({count});
  for (int i = 0; i < 3; ++i) comm::all_reduce_(tensor, group);
  at::Tensor times = at::empty({repetitions}, at::kDouble);
  for (int i = 0; i < repetitions; ++i) {
    comm::barrier(group);
    const auto begin = Clock::now();
    for (int call = 0; call < batch; ++call) comm::all_reduce_(tensor, group);
    times[i] = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / batch;
  }
  comm::all_reduce_(times, group, comm::Reduction::kMax);
  return times.median().item<double>();
}

Json measure_engine(const comm::Group& group, bool is_quick) {
  const bool is_shm = group.engine() == "shm";
  const int small = is_shm ? 50 : (is_quick ? 10 : 30);
  return {{"4KB", measure_all_reduce(1'000, small, is_shm ? 20 : 1, group)},
          {"25MB", measure_all_reduce(6'250'000, is_quick ? 3 : 11, 1, group)}};
}

// NCCL is in the process if LibTorch was built with it.
Json nccl_version() {
  using GetVersion = int (*)(int*);
  auto* get_version = reinterpret_cast<GetVersion>(dlsym(RTLD_DEFAULT, "ncclGetVersion"));
  int version = 0;
  if (get_version == nullptr || get_version(&version) != 0) return nullptr;
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void add_engine(const std::string& name, const comm::Group& group, const comm::Group& judge,
                bool is_quick, Json& answer) {
  for (Json& check : check_engine(name, group, judge)) answer["checks"].push_back(std::move(check));
  answer["all_reduce_us"][name] = measure_engine(group, is_quick);
}

int doctor_rank(const std::vector<std::string>& words) {
  const bool is_quick = !words.empty() && words[0] == "--quick";
  if (comm::read_environment().world_size != 2) {
    std::fputs("error: doctor-rank: needs two ranks; it is started by tessera doctor\n", stderr);
    return 2;
  }
  Json answer{{"tessera", version()},
              {"libtorch", TORCH_VERSION},
              {"has_cuda", at::Context::hasCUDART() || at::hasCUDA()},
              {"nccl", nccl_version()},
              {"checks", Json::array()},
              {"all_reduce_us", Json::object()}};
  comm::GroupOptions options = comm::default_group_options();
  options.timeout = kLimit;
  options.engine = comm::Engine::kGloo;
  options.name = "doctor gloo";
  const comm::Group gloo = comm::init(options);
  add_engine("gloo", gloo, gloo, is_quick, answer);
  try {
    options.engine = comm::Engine::kShm;
    options.name = "doctor shm";
    const comm::Group shm =
        comm::make_group(c10::make_intrusive<c10d::PrefixStore>("doctor/shm", gloo.store()),
                         gloo.rank(), gloo.size(), options);
    add_engine("shm", shm, gloo, is_quick, answer);
  } catch (const std::exception& error) {
    // All ranks get the same failure, so all come here.
    answer["checks"].push_back(
        {{"engine", "shm"}, {"operator", "any"}, {"passed", false}, {"error", error.what()}});
  }
  if (gloo.rank() == 0) {
    answer["cuda"] = examine_devices();
    std::printf("%s\n", answer.dump().c_str());
  }
  std::fflush(stdout);
  comm::barrier(gloo);
  return 0;
}

}  // namespace

const WorkerVerb kDoctorRankVerb{"doctor-rank", doctor_rank};

}  // namespace tessera::cli
