#include <functional>
#include <vector>

#include <ATen/ATen.h>

#include "modes.h"
#include "report.h"
#include "tessera/comm/collectives.h"

namespace tessera::faults {
namespace {

using comm::Group;
using comm::Reduction;
using Rows = std::vector<std::int64_t>;

// Small whole numbers, different on every rank, exact in every type used here.
at::Tensor values_of(int rank, std::int64_t rows, at::ScalarType dtype) {
  return ((at::arange(rows * 2) * (rank + 1)).remainder(7) + rank % 3).to(dtype).view({rows, 2});
}

std::string name_of(at::ScalarType dtype, std::int64_t rows) {
  std::string name(" ");
  return name.append(at::toString(dtype)).append(" ").append(std::to_string(rows));
}

// Counts comparisons and keeps the names of those that failed.
class Judge {
 public:
  void expect_equal(const std::string& what, const at::Tensor& result, const at::Tensor& expected) {
    ++num_checks_;
    const bool equal = result.scalar_type() == expected.scalar_type() &&
                       result.sizes() == expected.sizes() && at::equal(result, expected);
    if (!equal) wrong_.push_back(what);
  }
  int num_checks() const { return num_checks_; }
  const std::vector<std::string>& wrong() const { return wrong_; }

 private:
  int num_checks_ = 0;
  std::vector<std::string> wrong_;
};

at::Tensor reduced(const std::vector<at::Tensor>& inputs, Reduction reduction) {
  at::Tensor total = inputs[0].clone();
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    switch (reduction) {
      case Reduction::kMin:
        total = at::minimum(total, inputs[r]);
        break;
      case Reduction::kMax:
        total = at::maximum(total, inputs[r]);
        break;
      case Reduction::kProduct:
        total = total * inputs[r];
        break;
      case Reduction::kBor:
        total = at::bitwise_or(total, inputs[r]);
        break;
      default:
        total = total + inputs[r];
    }
  }
  if (reduction == Reduction::kAvg) total = total / static_cast<double>(inputs.size());
  return total;
}

void check_reductions(const Group& group, std::int64_t rows, at::ScalarType dtype, Judge& judge) {
  std::vector<at::Tensor> inputs;
  for (int r = 0; r < group.size(); ++r) inputs.push_back(values_of(r, rows, dtype));
  std::vector<Reduction> reductions{Reduction::kSum, Reduction::kMin, Reduction::kMax,
                                    Reduction::kProduct};
  reductions.push_back(at::isFloatingType(dtype) ? Reduction::kAvg : Reduction::kBor);
  const std::string suffix = name_of(dtype, rows);
  for (const Reduction reduction : reductions) {
    std::string name = suffix;
    name.append(" reduction ").append(std::to_string(static_cast<int>(reduction)));
    const at::Tensor expected = reduced(inputs, reduction);
    const at::Tensor& mine = inputs[group.rank()];
    judge.expect_equal("all_reduce" + name, comm::all_reduce(mine, group, reduction), expected);
    at::Tensor in_place = mine.clone();
    comm::all_reduce_async_(in_place, group, reduction).wait();
    judge.expect_equal("all_reduce_async_" + name, in_place, expected);
    for (int root = 0; root < group.size(); ++root) {
      judge.expect_equal("reduce to " + std::to_string(root) + name,
                         comm::reduce(mine, root, group, reduction),
                         group.rank() == root ? expected : mine);
    }
    std::vector<at::Tensor> wide;
    for (int r = 0; r < group.size(); ++r) {
      wide.push_back(values_of(r, rows * group.size(), dtype));
    }
    judge.expect_equal("reduce_scatter" + name,
                       comm::reduce_scatter(wide[group.rank()], group, reduction),
                       reduced(wide, reduction).narrow(0, group.rank() * rows, rows));
    // Rank r takes r rows, the last one what is left.
    Rows cut;
    std::int64_t left = rows * group.size();
    for (int r = 0; r < group.size(); ++r) {
      cut.push_back(r + 1 == group.size() ? left : std::min<std::int64_t>(r, left));
      left -= cut.back();
    }
    std::int64_t first = 0;
    for (int r = 0; r < group.rank(); ++r) first += cut[r];
    judge.expect_equal("reduce_scatter_v" + name,
                       comm::reduce_scatter_v(wide[group.rank()], cut, group, reduction),
                       reduced(wide, reduction).narrow(0, first, cut[group.rank()]));
  }
}

void check_moves(const Group& group, std::int64_t rows, at::ScalarType dtype, Judge& judge) {
  const int size = group.size();
  const int rank = group.rank();
  const std::string name = name_of(dtype, rows);
  std::vector<at::Tensor> even;
  std::vector<at::Tensor> uneven;
  Rows uneven_rows;
  for (int r = 0; r < size; ++r) {
    even.push_back(values_of(r, rows, dtype));
    uneven_rows.push_back(r == 1 ? 0 : rows + r);
    uneven.push_back(values_of(r, uneven_rows.back(), dtype));
  }
  judge.expect_equal("all_gather" + name, comm::all_gather(even[rank], group), at::cat(even));
  judge.expect_equal("all_gather_v" + name, comm::all_gather_v(uneven[rank], group),
                     at::cat(uneven));
  judge.expect_equal("all_gather_v with rows" + name,
                     comm::all_gather_v(uneven[rank], group, uneven_rows), at::cat(uneven));
  for (int root = 0; root < size; ++root) {
    const std::string at_root = " root " + std::to_string(root) + name;
    at::Tensor copy = even[rank].clone();
    comm::broadcast_(copy, root, group);
    judge.expect_equal("broadcast" + at_root, copy, even[root]);
    const at::Tensor gathered = comm::gather(uneven[rank], root, group);
    if (rank == root) judge.expect_equal("gather" + at_root, gathered, at::cat(uneven));
    std::int64_t total = 0;
    std::int64_t first = 0;
    for (int r = 0; r < size; ++r) {
      if (r < rank) first += uneven_rows[r];
      total += uneven_rows[r];
    }
    const at::Tensor whole = values_of(root, total, dtype);
    judge.expect_equal(
        "scatter" + at_root,
        comm::scatter(rank == root ? whole : at::zeros_like(whole), uneven_rows, root, group),
        whole.narrow(0, first, uneven_rows[rank]));
  }
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; ++r) {
    parts.push_back(values_of(r, rows * size, dtype).narrow(0, rank * rows, rows));
  }
  judge.expect_equal("all_to_all" + name,
                     comm::all_to_all(values_of(rank, rows * size, dtype), group), at::cat(parts));
  // Rank s sends s + d rows to rank d.
  const auto sent_by = [&](int s) {
    Rows counts;
    for (int d = 0; d < size; ++d) counts.push_back(s + d);
    return counts;
  };
  std::vector<at::Tensor> arriving;
  for (int s = 0; s < size; ++s) {
    std::int64_t offset = 0;
    for (int d = 0; d < rank; ++d) offset += s + d;
    std::int64_t total = 0;
    for (const auto count : sent_by(s)) total += count;
    arriving.push_back(values_of(s, total, dtype).narrow(0, offset, s + rank));
  }
  std::int64_t mine = 0;
  for (const auto count : sent_by(rank)) mine += count;
  judge.expect_equal("all_to_all_v" + name,
                     comm::all_to_all_v(values_of(rank, mine, dtype), sent_by(rank), group),
                     at::cat(arriving));
  if (size > 1) {
    auto sent = comm::send_async(even[rank], (rank + 1) % size, group, /*tag=*/3);
    at::Tensor received = at::empty_like(even[rank]);
    comm::recv_(received, (rank + size - 1) % size, group, /*tag=*/3);
    sent.wait();
    judge.expect_equal("send and recv" + name, received, even[(rank + size - 1) % size]);
  }
  comm::barrier(group);
}

}  // namespace

int run_collectives(const Options& options) {
  const Group world = comm::init();
  report_ready(world);
  Judge judge;
  const std::int64_t largest = options.number("largest", 50000);
  for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, largest}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kInt, at::kLong}) {
      if (rows == largest && dtype != at::kFloat && dtype != at::kLong) continue;
      check_reductions(world, rows, dtype, judge);
      check_moves(world, rows, dtype, judge);
    }
  }
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kShort, at::kByte, at::kBool}) {
    check_moves(world, 5, dtype, judge);
  }
  // The bits of sums of fractions: they tell whether a slow or lossy link changed anything.
  at::Tensor fractions = (at::arange(10007, at::kFloat) * 0.37F + world.rank()).sin();
  comm::all_reduce_(fractions, world);
  const std::int64_t digest =
      fractions.view(at::kInt).to(at::kLong).mul(31).cumsum(0)[-1].item<std::int64_t>();
  report("collectives",
         {{"checks", judge.num_checks()}, {"wrong", judge.wrong()}, {"digest", digest}});
  return judge.wrong().empty() ? 0 : 1;
}

}  // namespace tessera::faults
