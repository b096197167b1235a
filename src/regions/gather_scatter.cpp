#include "tessera/regions/gather_scatter.h"

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

struct Gather : Function<Gather> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct Scatter : Function<Scatter> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

Variable Gather::forward(AutogradContext* context, const Variable& x, const CutPtr& cut) {
  save(context, cut);
  return detail::join_slices(x, *cut);
}

variable_list Gather::backward(AutogradContext* context, const variable_list& grads) {
  const CutPtr cut = saved_cut(context);
  return {Scatter::apply(rejoin(Operator::kScatter, grads[0], *cut), cut), Variable()};
}

Variable Scatter::forward(AutogradContext* context, const Variable& x, const CutPtr& cut) {
  save(context, cut);
  return detail::own_slice(x, *cut);
}

variable_list Scatter::backward(AutogradContext* context, const variable_list& grads) {
  const CutPtr cut = saved_cut(context);
  return {Gather::apply(rejoin(Operator::kGather, grads[0], *cut), cut), Variable()};
}

}  // namespace

at::Tensor gather(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                  const std::optional<Sizes>& sizes) {
  const auto agreed = detail::agree(Operator::kGather, x, group, dim, sizes);
  return Gather::apply(agreed.input, agreed.cut);
}

at::Tensor scatter(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                   const std::optional<Sizes>& sizes) {
  const auto agreed = detail::agree(Operator::kScatter, x, group, dim, sizes);
  return Scatter::apply(agreed.input, agreed.cut);
}

}  // namespace tessera::regions
