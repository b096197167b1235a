// Ranks in sandboxes, of some size, that make groups all the time, or that fork.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "modes.h"
#include "report.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/comm/failure.h"

namespace tessera::faults {
namespace {

using comm::Group;

at::Tensor one_value(float value) { return at::full({1}, value, at::kFloat); }

// What a child of this rank says to each of the things it may try with its parent's group.
void try_everything(const Group& world, comm::Awaitable<at::Tensor>& pending) {
  const auto attempt = [](const char* what, const std::function<void()>& run) {
    try {
      run();
      report("child_error", {{"what", what}, {"text", ""}});
    } catch (const std::exception&) {
      report_error("child_error", std::current_exception(), {{"what", what}});
    }
  };
  at::Tensor wrong = one_value(100);
  attempt("all_reduce", [&] { comm::all_reduce_(wrong, world); });
  attempt("all_reduce_async", [&] { comm::all_reduce_async_(wrong, world).wait(); });
  attempt("barrier", [&] { comm::barrier(world); });
  attempt("send", [&] { comm::send(wrong, 1 - world.rank(), world); });
  attempt("wait", [&] { pending.wait(); });
  comm::report_failure("a child's own business");
  world.abort("a child's own business");
}

}  // namespace

void refuse_pidfds() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(rules), rules};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    throw std::runtime_error("no sandbox");
  }
}

void take_memory(long mebibytes) {
  const std::size_t bytes = static_cast<std::size_t>(mebibytes) << 20;
  auto* memory = static_cast<char*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  madvise(memory, bytes, MADV_NOHUGEPAGE);
  for (std::size_t i = 0; i < bytes; i += 4096) memory[i] = 1;
}

int run_groups(const Options& options) {
  try {
    const Group world = comm::init();
    report_ready(world);
    if (world.rank() == options.number("victim", -1)) take_memory(options.number("memory", 0));
    std::vector<int> all;
    for (int r = 0; r < world.size(); ++r) all.push_back(r);
    for (int i = 0;; ++i) {
      if (i == 3) report("warm");
      const auto group = world.subgroup(all, "group " + std::to_string(i));
    }
  } catch (const comm::Error&) {
    report_error("error", std::current_exception());
    throw;
  }
}

int run_forks(const Options& options) {
  const std::string way = options.text("end", "exit");
  const Group world = comm::init();
  report_ready(world);
  comm::barrier(world);
  // Not met by the other rank yet, so that it waits in the queue while the child is made.
  at::Tensor early = one_value(static_cast<float>(world.rank() + 1));
  if (world.rank() == 1) wait_for_driver("go", 20);
  auto pending = comm::all_reduce_async_(early, world);
  if (world.rank() == 0) {
    const pid_t child = fork();
    if (child == 0) {
      try_everything(world, pending);
      if (way == "throw") throw std::runtime_error("the child has no rows");
      if (way == "destroy") {
        // Lets go of the group, as an interpreter does at its end.
        auto group = std::make_unique<Group>(world);
        const_cast<Group&>(world).~Group();
        group.reset();
      }
      if (way == "return") std::exit(0);
      ::_exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    report("child_ended", {{"pid", child}, {"status", status}});
  }
  const float sum_of_first = pending.wait().item<float>();
  at::Tensor value = one_value(static_cast<float>(world.rank() + 1));
  for (int i = 0; i < 100; ++i) comm::all_reduce_(value, world);
  report("sums", {{"first", sum_of_first}, {"last", value.item<float>()}});
  return 0;
}

}  // namespace tessera::faults
