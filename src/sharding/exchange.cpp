#include "sharding/exchange.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "core/autograd.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

struct Recorded : torch::CustomClassHolder {
  explicit Recorded(Journey own) : journey(std::move(own)) {}
  Journey journey;
};
using RecordedPtr = c10::intrusive_ptr<Recorded>;

void check_first_order() {
  TESSERA_CHECK_VALUE(!at::GradMode::is_enabled(),
                      "sharding.comm_ops: the gradients of an exchange are not differentiable; "
                      "call backward without create_graph.");
}

struct Start : Function<Start> {
  // `anchor` requires a gradient whatever the input does: the backward pass is collective.
  static Variable forward(AutogradContext* context, const Variable& input, const Variable& anchor,
                          const RecordedPtr& recorded) {
    static_cast<void>(anchor);
    carry(context, recorded);
    recorded->journey.start(input);
    return at::zeros({1}, input.options());
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    at::Tensor gradient = carried<Recorded>(context)->journey.wait_backward();
    if (!context->needs_input_grad(0)) gradient = at::Tensor();
    return {gradient, Variable(), Variable()};
  }
};

struct Wait : Function<Wait> {
  static variable_list forward(AutogradContext* context, const Variable& token,
                               const RecordedPtr& recorded) {
    static_cast<void>(token);
    carry(context, recorded);
    return recorded->journey.wait();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    carried<Recorded>(context)->journey.start_backward(gradients);
    return {at::zeros({1}, gradients[0].options()), Variable()};
  }
};

}  // namespace

void Journey::start_backward(const Exchange::Parts& gradients) {
  check_first_order();
  backward_ = exchange_->start_backward_of(gradients);
}

at::Tensor Journey::wait_backward() {
  check_first_order();
  TESSERA_INTERNAL_ASSERT(backward_, "an exchange ended before it began");
  return finish(backward_).front();
}

Exchange::Parts Journey::finish(Exchange::Pending& pending) const {
  const auto arriving = std::exchange(pending, Exchange::Pending());
  arriving.do_own_work();
  while (meanwhile_ && !arriving.is_ready() && meanwhile_()) {
  }
  return arriving.parts();
}

comm::Awaitable<Exchange::Parts> run_in_parts(std::shared_ptr<Exchange> exchange,
                                              const at::Tensor& input,
                                              Exchange::Meanwhile meanwhile) {
  auto recorded = c10::make_intrusive<Recorded>(Journey(std::move(exchange), std::move(meanwhile)));
  const at::Tensor anchor = at::empty({0}, input.options()).requires_grad_(true);
  const at::Tensor token = Start::apply(input, anchor, recorded);
  return comm::Awaitable<Exchange::Parts>([=] { return Wait::apply(token, recorded); });
}

comm::Awaitable<at::Tensor> run(std::shared_ptr<Exchange> exchange, const at::Tensor& input,
                                Exchange::Meanwhile meanwhile) {
  const auto parts = run_in_parts(std::move(exchange), input, std::move(meanwhile));
  return comm::Awaitable<at::Tensor>([parts] { return parts.wait().front(); });
}

}  // namespace tessera::sharding
