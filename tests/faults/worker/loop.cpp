#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <new>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>

#include "modes.h"
#include "report.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/comm/failure.h"

namespace tessera::faults {
namespace {

using comm::Group;

// The operation that is repeated. Ranks that only serve another rank's operation do so by `op` too.
std::function<void(const Group&)> operation(const std::string& op, long count) {
  at::Tensor tensor = at::zeros({count}, at::kFloat);
  if (op == "all_reduce") return [=](const Group& g) mutable { comm::all_reduce_(tensor, g); };
  if (op == "all_reduce_async") {
    return [=](const Group& g) mutable { comm::all_reduce_async_(tensor, g).wait(); };
  }
  if (op == "broadcast") return [=](const Group& g) mutable { comm::broadcast_(tensor, 0, g); };
  if (op == "all_gather") return [=](const Group& g) { comm::all_gather(tensor, g); };
  if (op == "barrier") return [](const Group& g) { comm::barrier(g); };
  if (op == "all_to_all") {
    return [=](const Group& g) {
      comm::all_to_all(tensor.narrow(0, 0, tensor.size(0) / g.size() * g.size()), g);
    };
  }
  if (op == "ring") {
    return [=](const Group& g) mutable {
      auto sent = comm::send_async(tensor, (g.rank() + 1) % g.size(), g);
      at::Tensor received = at::empty_like(tensor);
      comm::recv_(received, (g.rank() + g.size() - 1) % g.size(), g);
      sent.wait();
    };
  }
  throw std::invalid_argument("no operation " + op);
}

// What the misbehaving rank does instead of its next operation.
int misbehave(const std::string& action, const Options& options, const Group& world) {
  const auto pause = std::chrono::milliseconds(options.number("milliseconds", 1000));
  report("injected", {{"action", action}});
  if (action == "kill") std::raise(SIGKILL);
  if (action == "stop") std::raise(SIGSTOP);
  if (action == "segfault") std::raise(SIGSEGV);
  if (action == "sleep") std::this_thread::sleep_for(pause);
  if (action == "throw") throw std::runtime_error("batch 17 has no rows");
  if (action == "allocate") {
    // More than any address space: what an allocation that cannot be served looks like.
    volatile std::size_t bytes = std::size_t{1} << 62;
    ::operator delete(::operator new(bytes));
  }
  if (action == "exit") ::_exit(static_cast<int>(options.number("code", 3)));
  if (action == "leave") std::exit(static_cast<int>(options.number("code", 3)));
  if (action == "guarded") {
    // The process lives on: only the guard can tell the others.
    try {
      comm::guarded([] { throw std::runtime_error("batch 17 has no rows"); });
    } catch (const std::exception&) {
      report("lived", {{"released", wait_for_driver("release", 30)}});
    }
    ::_exit(3);
  }
  if (action == "abort") world.abort("the validation loss is not a number");
  if (action == "mismatch") {
    at::Tensor other = at::zeros({7}, at::kFloat);
    comm::broadcast_(other, 0, world);
  }
  return 0;
}

// Makes a new group when the driver asks for it, and goes on with the old one afterwards.
void make_new_group(const Group& world) {
  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  try {
    world.subgroup(all, "late");
    report("new_group");
  } catch (...) {
    report_error("new_group_error", std::current_exception());
  }
}

}  // namespace

int run_loop(const Options& options) {
  const long at = options.number("at", 30);
  const long steps = options.number("steps", 0);
  const long victim = options.number("victim", -1);
  const std::string action = options.text("action", "none");
  if (options.text("pidfds") == "refused") refuse_pidfds();
  try {
    const Group world = comm::init();
    report_ready(world);
    if (world.rank() == options.number("large", -1)) take_memory(1024);
    if (options.text("deaf") != "") {
      std::signal(SIGTERM, SIG_IGN);
      std::signal(SIGINT, SIG_IGN);
    }
    const auto run = operation(options.text("op", "all_reduce"), options.number("count", 1 << 20));
    for (long step = 0; steps == 0 || step < steps; ++step) {
      comm::set_step(step);
      if (step == at && options.text("hold") != "") wait_for_driver("go", 20);
      if (step == at && world.rank() == options.number("slow", -1)) {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(options.number("slow_milliseconds", 0)));
      }
      if (step == at && world.rank() == victim) misbehave(action, options, world);
      if (step == at && options.text("new_group") != "" && wait_for_driver("go", 20)) {
        make_new_group(world);
      }
      run(world);
      if (step == 10) report("warm");
    }
    report("done");
  } catch (const comm::Error&) {
    report_error("error", std::current_exception());
    throw;
  }
  return 0;
}

int run_join(const Options& options) {
  std::this_thread::sleep_for(std::chrono::milliseconds(options.number("late", 0)));
  try {
    const Group world = comm::init();
    report_ready(world);
    comm::barrier(world);
    report("done");
    // The store lives in rank 0's process when nobody else hosts it.
    if (options.number("linger", 0) > 0) wait_for_driver("release", 30);
  } catch (const c10::Error&) {
    report_error("error", std::current_exception());
    throw;
  }
  return 0;
}

}  // namespace tessera::faults
