// A rank that is refused one thread, or every descriptor after its n-th, each time in a job of its
// own, until nothing is refused any more. What the ranks say goes to standard output, one line of
// JSON a job.

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "modes.h"
#include "short_jobs.h"
#include "support/refused_threads.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"

namespace tessera::faults {
namespace {

using comm::Group;

constexpr std::chrono::seconds kPatience{30};
constexpr int kMost = 200;
// Whatever is started last may be refused to no harm, so one job that ends well is not the end.
constexpr int kGoodInARow = 3;

void expect_sum(const at::Tensor& sum) {
  if (!at::all(sum == 3).item<bool>()) throw std::runtime_error("a sum is wrong");
}

// Two ranks that use all that needs threads or descriptors.
void work() {
  const Group world = comm::init();
  const auto mine = [&] { return at::full({1000}, world.rank() + 1, at::kFloat); };
  at::Tensor sum = mine();
  comm::all_reduce_(sum, world);
  expect_sum(sum);

  // Waited for by a future, which does not run what is queued itself; with one more behind it, and
  // one inside its callback.
  std::vector<at::Tensor> by_future{mine()};
  c10d::AllreduceOptions later;
  later.asyncOp = true;
  at::Tensor inside = mine();
  at::Tensor behind = mine();
  const auto future = world.process_group()->allreduce(by_future, later)->getFuture();
  const auto done = future->then(
      [&](c10::ivalue::Future&) -> c10::IValue {
        comm::all_reduce_(inside, world);
        return true;
      },
      c10::BoolType::get());
  auto pending = comm::all_reduce_async_(behind, world);
  done->waitAndThrow();
  pending.wait();
  for (const at::Tensor& one : {by_future[0], inside, behind}) expect_sum(one);

  const int other = 1 - world.rank();
  at::Tensor theirs = at::zeros({1000}, at::kFloat);
  auto sent = comm::send_async(mine(), other, world);
  comm::recv_(theirs, other, world);
  sent.wait();
  expect_sum(theirs + mine());

  const auto both = world.subgroup({0, 1}, "both");
  sum = mine();
  comm::all_reduce_(sum, *both);
  expect_sum(sum);
  comm::barrier(world);
}

void allow_descriptors(int more) {
  const int next = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::close(next);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max = static_cast<rlim_t>(next + more);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

int free_port() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const int probe = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::bind(probe, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(probe, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("no port");
  }
  ::close(probe);
  return ntohs(address.sin_port);
}

}  // namespace

int run_scarcity(const Options& options) {
  const std::string what = options.text("what", "threads");
  // The launcher's, or one that rank 0 hosts: with the job's secret or without.
  const std::string store = options.text("store", "launcher");
  ShortJobs jobs;
  int num_good = 0;
  const int step = static_cast<int>(options.number("step", 1));
  for (int n = 1; n <= kMost && num_good < kGoodInARow; n += step) {
    const int port = free_port();
    const auto begin = std::chrono::steady_clock::now();
    ShortJob job = jobs.start(2, [&] {
      if (store != "launcher") {
        ::unsetenv("TESSERA_STORE");
        ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
      }
      if (store == "open") ::unsetenv("TESSERA_JOB_SECRET");
      std::optional<testing::RefusedThread> refused;
      if (std::atoi(std::getenv("RANK")) == 0) {
        if (what == "threads") {
          refused.emplace(n);
        } else {
          allow_descriptors(n);
        }
      }
      work();
      tell("done");
      return 0;
    });
    const std::vector<pid_t> pids{job.pid(0), job.pid(1)};
    const std::vector<Json> errors = job.await("error", {0, 1}, kPatience);
    const std::vector<Json> done = job.await("done", {0, 1}, std::chrono::seconds(0));
    const std::vector<int> statuses = job.wait(kPatience);
    Json line{{"n", n},
              {"pids", pids},
              {"errors", errors},
              {"done", {!done[0].is_null(), !done[1].is_null()}},
              {"statuses", statuses},
              {"seconds",
               std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
    std::printf("%s\n", line.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    std::fflush(stdout);
    const bool is_good = !done[0].is_null() && !done[1].is_null();
    num_good = is_good ? num_good + 1 : 0;
  }
  return 0;
}

}  // namespace tessera::faults
