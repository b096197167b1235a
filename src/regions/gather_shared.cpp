#include "tessera/regions/gather_shared.h"

#include "regions/saved_cut.h"
#include "regions/slices.h"

namespace tessera::regions {
namespace {

using detail::Cut;
using detail::Operator;
using detail::rejoin;
using detail::save;
using detail::saved_cut;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using CutPtr = c10::intrusive_ptr<Cut>;

struct GatherShared : Function<GatherShared> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct ReduceScatter : Function<ReduceScatter> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

Variable GatherShared::forward(AutogradContext* context, const Variable& x, const CutPtr& cut) {
  save(context, cut);
  return detail::join_slices(x, *cut);
}

variable_list GatherShared::backward(AutogradContext* context, const variable_list& grads) {
  const CutPtr cut = saved_cut(context);
  return {ReduceScatter::apply(rejoin(Operator::kReduceScatter, grads[0], *cut), cut), Variable()};
}

Variable ReduceScatter::forward(AutogradContext* context, const Variable& x, const CutPtr& cut) {
  save(context, cut);
  return detail::sum_slices(x, *cut);
}

variable_list ReduceScatter::backward(AutogradContext* context, const variable_list& grads) {
  const CutPtr cut = saved_cut(context);
  return {GatherShared::apply(rejoin(Operator::kGatherShared, grads[0], *cut), cut), Variable()};
}

}  // namespace

at::Tensor gather_shared(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                         const std::optional<Sizes>& sizes) {
  const auto agreed = detail::agree(Operator::kGatherShared, x, group, dim, sizes);
  return GatherShared::apply(agreed.input, agreed.cut);
}

at::Tensor reduce_scatter(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                          const std::optional<Sizes>& sizes) {
  const auto agreed = detail::agree(Operator::kReduceScatter, x, group, dim, sizes);
  return ReduceScatter::apply(agreed.input, agreed.cut);
}

}  // namespace tessera::regions
