#include "regions/slices.h"

#include <algorithm>
#include <numeric>

#include "tessera/comm/collectives.h"

namespace tessera::regions::detail {
namespace {

// Collectives cut along the first dimension.
at::Tensor to_front(const at::Tensor& tensor, const Cut& cut) {
  return tensor.movedim(cut.dim, 0).contiguous();
}

at::Tensor from_front(const at::Tensor& tensor, const Cut& cut) {
  return tensor.movedim(0, cut.dim).contiguous();
}

bool is_even(const Sizes& sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [&](auto size) { return size == sizes[0]; });
}

}  // namespace

at::Tensor join_slices(const at::Tensor& slice, const Cut& cut) {
  const at::Tensor rows = to_front(slice, cut);
  const at::Tensor whole = is_even(cut.sizes) ? comm::all_gather(rows, cut.group)
                                              : comm::all_gather_v(rows, cut.group, cut.sizes);
  return from_front(whole, cut);
}

at::Tensor own_slice(const at::Tensor& whole, const Cut& cut) {
  const int rank = cut.group.rank();
  const std::int64_t first =
      std::accumulate(cut.sizes.begin(), cut.sizes.begin() + rank, std::int64_t{0});
  // A copy: a view would forbid its users to write in place, and would keep the whole alive.
  return whole.narrow(cut.dim, first, cut.sizes[rank]).clone(at::MemoryFormat::Contiguous);
}

at::Tensor sum_slices(const at::Tensor& addend, const Cut& cut) {
  const at::Tensor rows = to_front(addend, cut);
  const at::Tensor slice = is_even(cut.sizes) ? comm::reduce_scatter(rows, cut.group)
                                              : comm::reduce_scatter_v(rows, cut.sizes, cut.group);
  return from_front(slice, cut);
}

}  // namespace tessera::regions::detail
