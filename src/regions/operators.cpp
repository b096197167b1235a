// The operators in conjugate pairs: the backward of one runs the other, so that derivatives of any
// order are right.

#include "core/autograd.h"
#include "regions/agreement.h"
#include "regions/slices.h"
#include "tessera/comm/collectives.h"
#include "tessera/regions/copy_reduce.h"
#include "tessera/regions/gather_scatter.h"
#include "tessera/regions/gather_shared.h"

namespace tessera::regions {
namespace {

using detail::Cut;
using detail::Operator;
using CutPtr = c10::intrusive_ptr<Cut>;

at::Tensor run(Operator op, const at::Tensor& x, const Cut& cut) {
  switch (op) {
    case Operator::kCopy:
      return x;
    case Operator::kReduce:
    case Operator::kAllReduce:
      return comm::all_reduce(x, cut.group);
    case Operator::kGather:
    case Operator::kGatherShared:
      return detail::join_slices(x, cut);
    case Operator::kScatter:
      return detail::own_slice(x, cut);
    case Operator::kReduceScatter:
      return detail::sum_slices(x, cut);
  }
  __builtin_unreachable();
}

Operator partner_of(Operator op) {
  switch (op) {
    case Operator::kCopy:
      return Operator::kReduce;
    case Operator::kReduce:
      return Operator::kCopy;
    case Operator::kAllReduce:
      return Operator::kAllReduce;
    case Operator::kGather:
      return Operator::kScatter;
    case Operator::kScatter:
      return Operator::kGather;
    case Operator::kGatherShared:
      return Operator::kReduceScatter;
    case Operator::kReduceScatter:
      return Operator::kGatherShared;
  }
  __builtin_unreachable();
}

struct Region : Function<Region> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut,
                          Operator op) {
    carry(context, cut);
    context->saved_data["partner"] = static_cast<std::int64_t>(partner_of(op));
    return run(op, x, *cut);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto cut = carried<Cut>(context);
    const auto partner = static_cast<Operator>(context->saved_data["partner"].toInt());
    return {Region::apply(detail::rejoin(partner, grads[0], *cut), cut, partner), {}, {}};
  }
};

at::Tensor apply(Operator op, const detail::Agreed& agreed) {
  return Region::apply(agreed.input, agreed.cut, op);
}

at::Tensor on_whole(Operator op, const at::Tensor& x, const comm::Group& group) {
  return apply(op, detail::agree(op, x, group));
}

at::Tensor on_slices(Operator op, const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                     const std::optional<Sizes>& sizes) {
  return apply(op, detail::agree(op, x, group, dim, sizes));
}

}  // namespace

at::Tensor copy(const at::Tensor& x, const comm::Group& group) {
  return on_whole(Operator::kCopy, x, group);
}

at::Tensor reduce(const at::Tensor& x, const comm::Group& group) {
  return on_whole(Operator::kReduce, x, group);
}

at::Tensor all_reduce(const at::Tensor& x, const comm::Group& group) {
  return on_whole(Operator::kAllReduce, x, group);
}

at::Tensor gather(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                  const std::optional<Sizes>& sizes) {
  return on_slices(Operator::kGather, x, group, dim, sizes);
}

at::Tensor scatter(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                   const std::optional<Sizes>& sizes) {
  return on_slices(Operator::kScatter, x, group, dim, sizes);
}

at::Tensor gather_shared(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                         const std::optional<Sizes>& sizes) {
  return on_slices(Operator::kGatherShared, x, group, dim, sizes);
}

at::Tensor reduce_scatter(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                          const std::optional<Sizes>& sizes) {
  return on_slices(Operator::kReduceScatter, x, group, dim, sizes);
}

}  // namespace tessera::regions
