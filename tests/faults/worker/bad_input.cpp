#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "modes.h"
#include "report.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/comm/leader.h"
#include "tessera/comm/mesh.h"

namespace tessera::faults {
namespace {

using comm::Group;

}  // namespace

int run_bad_input(const Options&) {
  const Group world = comm::init();
  report_ready(world);
  const auto attempt = [&](const std::string& name, const std::function<void()>& work) {
    try {
      work();
      report("passed", {{"case", name}});
    } catch (const c10::Error&) {
      report_error("case", std::current_exception(), {{"case", name}});
    }
    // The mistake was the caller's: the group itself must still work.
    comm::barrier(world);
  };
  const at::Tensor on_meta = at::empty({4}, at::TensorOptions().device(at::kMeta));
  attempt("mesh", [&] { comm::Mesh(world, {{"data", 2}, {"model", world.size()}}); });
  attempt("mesh of one rank", [&] {
    comm::Mesh(world, world.rank() == 0
                          ? std::vector<comm::Axis>{{"data", world.size()}, {"model", 1}}
                          : std::vector<comm::Axis>{{"data", 1}, {"model", world.size()}});
  });
  attempt("device", [&] { comm::all_reduce(on_meta, world); });
  attempt("device of output", [&] { comm::all_gather(on_meta, world); });
  attempt("uneven reduce_scatter",
          [&] { comm::reduce_scatter(at::zeros({world.size() + 1}), world); });
  attempt("uneven all_to_all", [&] { comm::all_to_all(at::zeros({world.size() + 1}), world); });
  attempt("uneven all_gather rows",
          [&] { comm::all_gather_v(at::zeros({3}), world, std::vector<std::int64_t>{3}); });
  attempt("root", [&] { comm::reduce(at::zeros({3}), world.size(), world); });
  attempt("undefined", [&] { comm::all_reduce(at::Tensor(), world); });
  attempt("average of integers",
          [&] { comm::all_reduce(at::zeros({3}, at::kLong), world, comm::Reduction::kAvg); });

  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  const auto group = world.subgroup(all, "doomed");
  comm::barrier(*group);
  if (group->rank() == 0) group->abort("the operator pressed stop");
  for (const char* name : {"after abort", "after abort, again"}) {
    attempt(name, [&] { comm::all_reduce(at::zeros({3}), *group); });
  }
  // The group that was aborted takes no other down.
  comm::barrier(world);
  report("done");
  return 0;
}

int run_claim(const Options& options) {
  const auto store = c10::make_intrusive<c10d::FileStore>(options.text("store"), -1);
  comm::GroupOptions group_options = comm::default_group_options();
  group_options.name = options.text("name", "world");
  try {
    const Group group =
        comm::make_group(store, static_cast<int>(options.number("rank", 0)),
                         static_cast<int>(options.number("size", 1)), group_options);
    report_ready(group);
    comm::barrier(group);
    report("done");
  } catch (const c10::Error&) {
    report_error("error", std::current_exception());
    return 1;
  }
  return 0;
}

}  // namespace tessera::faults
