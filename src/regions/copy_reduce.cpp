#include "tessera/regions/copy_reduce.h"

#include "regions/saved_cut.h"
#include "tessera/comm/collectives.h"

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

struct Copy : Function<Copy> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct Reduce : Function<Reduce> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct AllReduce : Function<AllReduce> {
  static Variable forward(AutogradContext* context, const Variable& x, const CutPtr& cut);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

Variable Copy::forward(AutogradContext* context, const Variable& x, const CutPtr& cut) {
  save(context, cut);
  return x;
}

variable_list Copy::backward(AutogradContext* context, const variable_list& grads) {
  const CutPtr cut = saved_cut(context);
  return {Reduce::apply(rejoin(Operator::kReduce, grads[0], *cut), cut), Variable()};
}

Variable Reduce::forward(AutogradContext* context, const Variable& x, const CutPtr& cut) {
  save(context, cut);
  return comm::all_reduce(x, cut->group);
}

variable_list Reduce::backward(AutogradContext* context, const variable_list& grads) {
  const CutPtr cut = saved_cut(context);
  return {Copy::apply(rejoin(Operator::kCopy, grads[0], *cut), cut), Variable()};
}

Variable AllReduce::forward(AutogradContext* context, const Variable& x, const CutPtr& cut) {
  save(context, cut);
  return comm::all_reduce(x, cut->group);
}

variable_list AllReduce::backward(AutogradContext* context, const variable_list& grads) {
  const CutPtr cut = saved_cut(context);
  return {AllReduce::apply(rejoin(Operator::kAllReduce, grads[0], *cut), cut), Variable()};
}

}  // namespace

at::Tensor copy(const at::Tensor& x, const comm::Group& group) {
  const auto agreed = detail::agree(Operator::kCopy, x, group);
  return Copy::apply(agreed.input, agreed.cut);
}

at::Tensor reduce(const at::Tensor& x, const comm::Group& group) {
  const auto agreed = detail::agree(Operator::kReduce, x, group);
  return Reduce::apply(agreed.input, agreed.cut);
}

at::Tensor all_reduce(const at::Tensor& x, const comm::Group& group) {
  const auto agreed = detail::agree(Operator::kAllReduce, x, group);
  return AllReduce::apply(agreed.input, agreed.cut);
}

}  // namespace tessera::regions
