#include <chrono>
#include <functional>
#include <vector>

#include <ATen/ATen.h>

#include "modes.h"
#include "report.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"

namespace tessera::faults {
namespace {

using comm::Group;
using comm::Reduction;
using Rows = std::vector<std::int64_t>;
using Operation = std::function<void(const Group&)>;

struct Case {
  std::string name;
  Operation usual;  // of all ranks but the last
  Operation odd;    // of the last rank
};

at::Tensor zeros(std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return at::zeros({count}, dtype);
}

Operation all_reduce(std::int64_t count, at::ScalarType dtype = at::kFloat,
                     Reduction reduction = Reduction::kSum) {
  return [=](const Group& g) { comm::all_reduce(zeros(count, dtype), g, reduction); };
}
Operation reduce(int root, std::int64_t count = 60, Reduction reduction = Reduction::kSum) {
  return [=](const Group& g) { comm::reduce(zeros(count), root, g, reduction); };
}
Operation broadcast(int root, std::int64_t count = 60, at::ScalarType dtype = at::kFloat) {
  return [=](const Group& g) {
    at::Tensor tensor = zeros(count, dtype);
    comm::broadcast_(tensor, root, g);
  };
}
Operation all_gather(std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return [=](const Group& g) { comm::all_gather(zeros(count, dtype), g); };
}
Operation reduce_scatter(std::int64_t count, at::ScalarType dtype = at::kFloat,
                         Reduction reduction = Reduction::kSum) {
  return
      [=](const Group& g) { comm::reduce_scatter(zeros(count * g.size(), dtype), g, reduction); };
}
Operation all_to_all(std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return [=](const Group& g) { comm::all_to_all(zeros(count * g.size(), dtype), g); };
}
Operation gather(int root, std::int64_t mine, std::int64_t claimed) {
  return [=](const Group& g) {
    comm::gather(zeros(mine), root, g, Rows(static_cast<std::size_t>(g.size()), claimed));
  };
}
Operation scatter(int root, std::int64_t rows) {
  return [=](const Group& g) {
    comm::scatter(zeros(rows * g.size()), Rows(static_cast<std::size_t>(g.size()), rows), root, g);
  };
}
Operation barrier() {
  return [](const Group& g) { comm::barrier(g); };
}
Operation sequence(std::vector<Operation> operations) {
  return [=](const Group& g) {
    for (const Operation& operation : operations) operation(g);
  };
}

std::vector<Case> cases_of_operators() {
  return {
      {"all_reduce or broadcast", all_reduce(60), broadcast(0)},
      {"all_reduce or barrier", all_reduce(60), barrier()},
      {"all_reduce or all_gather", all_reduce(60), all_gather(60)},
      {"all_reduce or reduce", all_reduce(60), reduce(0)},
      {"all_reduce or reduce_scatter", all_reduce(60), reduce_scatter(20)},
      {"all_reduce or all_to_all", all_reduce(60), all_to_all(20)},
      {"all_gather or gather", all_gather(60), gather(0, 60, 60)},
      {"reduce or broadcast", reduce(0), broadcast(0)},
      {"broadcast or scatter", broadcast(0), scatter(0, 60)},
      {"all_gather or all_to_all", all_gather(60), all_to_all(60)},
      {"barrier first or all_reduce first", sequence({barrier(), all_reduce(60)}),
       sequence({all_reduce(60), barrier()})},
      {"broadcast first or all_reduce first", sequence({broadcast(0), all_reduce(60)}),
       sequence({all_reduce(60), broadcast(0)})},
      {"one all_reduce more before the barrier", sequence({all_reduce(4), barrier()}),
       sequence({all_reduce(4), all_reduce(4), barrier()})},
  };
}

std::vector<Case> cases_of_sizes_and_types() {
  return {
      {"all_reduce of 60 or 59", all_reduce(60), all_reduce(59)},
      {"all_reduce of 60 or 0", all_reduce(60), all_reduce(0)},
      {"all_reduce of 60 or a million", all_reduce(60), all_reduce(1 << 20)},
      {"all_reduce of a million or one more", all_reduce(1 << 20), all_reduce((1 << 20) + 1)},
      {"broadcast of 60 or 61", broadcast(0, 60), broadcast(0, 61)},
      {"reduce of 60 or 61", reduce(0, 60), reduce(0, 61)},
      {"all_gather of 60 or 61", all_gather(60), all_gather(61)},
      {"reduce_scatter of 60 or 61", reduce_scatter(60), reduce_scatter(61)},
      {"all_to_all of 60 or 61", all_to_all(60), all_to_all(61)},
      {"all_reduce of float32 or int32", all_reduce(60), all_reduce(60, at::kInt)},
      {"all_reduce of float32 or float64", all_reduce(60), all_reduce(60, at::kDouble)},
      {"all_reduce of float16 or bfloat16", all_reduce(60, at::kHalf),
       all_reduce(60, at::kBFloat16)},
      {"all_reduce of int64 or float64", all_reduce(60, at::kLong), all_reduce(60, at::kDouble)},
      {"all_reduce of uint8 or bool", all_reduce(60, at::kByte), all_reduce(60, at::kBool)},
      {"all_reduce of int8 or uint8", all_reduce(60, at::kChar), all_reduce(60, at::kByte)},
      {"all_gather of float32 or int32", all_gather(60), all_gather(60, at::kInt)},
      {"broadcast of float32 or int32", broadcast(0, 60), broadcast(0, 60, at::kInt)},
      {"all_to_all of float32 or int32", all_to_all(60), all_to_all(60, at::kInt)},
      {"reduce_scatter of float32 or int32", reduce_scatter(60), reduce_scatter(60, at::kInt)},
      {"broadcast of 60 float32 or 30 float64", broadcast(0, 60), broadcast(0, 30, at::kDouble)},
  };
}

std::vector<Case> cases_of_reductions_and_roots() {
  using enum Reduction;
  return {
      {"sum or maximum", all_reduce(60), all_reduce(60, at::kFloat, kMax)},
      {"sum or average", all_reduce(60), all_reduce(60, at::kFloat, kAvg)},
      {"minimum or maximum", all_reduce(60, at::kFloat, kMin), all_reduce(60, at::kFloat, kMax)},
      {"product or sum", all_reduce(60, at::kFloat, kProduct), all_reduce(60)},
      {"and or or", all_reduce(60, at::kInt, kBand), all_reduce(60, at::kInt, kBor)},
      {"reduce_scatter of sum or maximum", reduce_scatter(60),
       reduce_scatter(60, at::kFloat, kMax)},
      {"reduce of sum or minimum", reduce(0), reduce(0, 60, kMin)},
      {"broadcast from 0 or 1", broadcast(0), broadcast(1)},
      {"reduce to 0 or 1", reduce(0), reduce(1)},
      {"gather to 0 or 1", gather(0, 60, 60), gather(1, 60, 60)},
      {"scatter from 0 or 1", scatter(0, 60), scatter(1, 60)},
  };
}

Rows filled(const Group& g, std::int64_t value) {
  return Rows(static_cast<std::size_t>(g.size()), value);
}

std::vector<Case> cases_of_splits() {
  const auto all_to_all_v = [](std::int64_t expected) -> Operation {
    return [=](const Group& g) {
      comm::all_to_all_v(zeros(4 * g.size()), filled(g, 4), g, filled(g, expected));
    };
  };
  const auto all_gather_v = [](std::int64_t of_first) -> Operation {
    return [=](const Group& g) {
      Rows rows = filled(g, 4);
      rows[0] = of_first;
      comm::all_gather_v(zeros(4), g, rows);
    };
  };
  const auto reduce_scatter_v = [](std::int64_t more) -> Operation {
    return [=](const Group& g) {
      Rows rows = filled(g, 4);
      rows[0] += more;
      rows[1] -= more;
      comm::reduce_scatter_v(zeros(4 * g.size()), rows, g);
    };
  };
  const auto message = [](std::int64_t count, at::ScalarType dtype) -> Operation {
    return [=](const Group& g) {
      at::Tensor tensor = zeros(count, dtype);
      if (g.rank() == 0) comm::send(tensor, g.size() - 1, g);
      if (g.rank() == g.size() - 1) comm::recv_(tensor, 0, g);
    };
  };
  return {
      {"all_to_all_v expects another split", all_to_all_v(4), all_to_all_v(5)},
      {"all_gather_v expects other rows", all_gather_v(4), all_gather_v(6)},
      {"reduce_scatter_v cuts elsewhere", reduce_scatter_v(0), reduce_scatter_v(2)},
      {"gather brings more than the root expects", gather(0, 60, 60), gather(0, 61, 61)},
      {"scatter expects other rows", scatter(0, 60), scatter(0, 61)},
      {"message of 60 or 61", message(60, at::kFloat), message(61, at::kFloat)},
      {"message of float32 or int32", message(60, at::kFloat), message(60, at::kInt)},
  };
}

}  // namespace

int run_mismatches(const Options&) {
  const Group world = comm::init();
  report_ready(world);
  std::vector<Case> cases = cases_of_operators();
  for (const auto& more :
       {cases_of_sizes_and_types(), cases_of_reductions_and_roots(), cases_of_splits()}) {
    cases.insert(cases.end(), more.begin(), more.end());
  }
  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const auto group = world.subgroup(all, "case-" + std::to_string(i));
    comm::barrier(*group);
    const auto begin = std::chrono::steady_clock::now();
    const auto milliseconds = [&] {
      return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
          .count();
    };
    const bool is_odd = world.rank() + 1 == world.size();
    try {
      (is_odd ? cases[i].odd : cases[i].usual)(*group);
      // A rank that is not concerned itself, or whose message left before anybody looked at it.
      comm::barrier(*group);
      report("passed", {{"case", cases[i].name}});
    } catch (const c10::Error&) {
      report_error("case", std::current_exception(),
                   {{"case", cases[i].name}, {"milliseconds", milliseconds()}});
    }
    try {
      comm::barrier(*group);
      report("passed", {{"case", cases[i].name}});
    } catch (const c10::Error&) {
      report_error("again", std::current_exception(), {{"case", cases[i].name}});
    }
    comm::barrier(world);
  }
  report("done", {{"cases", cases.size()}});
  return 0;
}

}  // namespace tessera::faults
