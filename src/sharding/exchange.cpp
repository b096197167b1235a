#include "sharding/exchange.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct Journey : torch::CustomClassHolder {
  std::shared_ptr<Exchange> exchange;
  Exchange::Pending forward;
  Exchange::Pending backward;
  Exchange::Meanwhile meanwhile;

  Exchange::Parts finish(Exchange::Pending& pending) const {
    const auto arriving = std::exchange(pending, Exchange::Pending());
    arriving.do_own_work();
    while (meanwhile && !arriving.is_ready() && meanwhile()) {
    }
    return arriving.parts();
  }
};
using JourneyPtr = c10::intrusive_ptr<Journey>;

void save(AutogradContext* context, const JourneyPtr& journey) {
  context->saved_data["journey"] = c10::IValue::make_capsule(journey);
}

JourneyPtr saved(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Journey>(context->saved_data["journey"].toCapsule());
}

void check_first_order() {
  TESSERA_CHECK_VALUE(!at::GradMode::is_enabled(),
                      "sharding.comm_ops: the gradients of an exchange are not differentiable; "
                      "call backward without create_graph.");
}

struct Start : Function<Start> {
  // `anchor` requires a gradient whatever the input does: the backward pass is collective.
  static Variable forward(AutogradContext* context, const Variable& input, const Variable& anchor,
                          const JourneyPtr& journey) {
    static_cast<void>(anchor);
    save(context, journey);
    journey->forward = journey->exchange->start(input.detach());
    return at::zeros({1}, input.options());
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    check_first_order();
    const JourneyPtr journey = saved(context);
    TESSERA_INTERNAL_ASSERT(journey->backward, "an exchange ended before it began");
    at::Tensor gradient = journey->finish(journey->backward).front();
    if (!context->needs_input_grad(0)) gradient = at::Tensor();
    return {gradient, Variable(), Variable()};
  }
};

struct Wait : Function<Wait> {
  static variable_list forward(AutogradContext* context, const Variable& token,
                               const JourneyPtr& journey) {
    static_cast<void>(token);
    save(context, journey);
    return journey->finish(journey->forward);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_first_order();
    const JourneyPtr journey = saved(context);
    journey->backward = journey->exchange->start_backward_of(gradients);
    return {at::zeros({1}, gradients[0].options()), Variable()};
  }
};

}  // namespace

comm::Awaitable<Exchange::Parts> run_in_parts(std::shared_ptr<Exchange> exchange,
                                              const at::Tensor& input,
                                              Exchange::Meanwhile meanwhile) {
  auto journey = c10::make_intrusive<Journey>();
  journey->exchange = std::move(exchange);
  journey->meanwhile = std::move(meanwhile);
  const at::Tensor anchor = at::empty({0}, input.options()).requires_grad_(true);
  const at::Tensor token = Start::apply(input, anchor, journey);
  return comm::Awaitable<Exchange::Parts>([=] { return Wait::apply(token, journey); });
}

comm::Awaitable<at::Tensor> run(std::shared_ptr<Exchange> exchange, const at::Tensor& input,
                                Exchange::Meanwhile meanwhile) {
  const auto parts = run_in_parts(std::move(exchange), input, std::move(meanwhile));
  return comm::Awaitable<at::Tensor>([parts] { return parts.wait().front(); });
}

}  // namespace tessera::sharding
