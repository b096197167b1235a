#include <ATen/Functions.h>

#include "core/autograd.h"
#include "graph_parallel/halo_rows.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/graph_parallel/halo.h"

// Note [Two phases and their gradients]
//
// Each operator is two autograd functions joined by a token, a tensor of one element that carries
// the graph and no data; the rows fly outside of it, in a Flight. The backward of a finish starts
// the partner's flight and returns the partner's token; the backward of a start finishes that
// flight. Autograd runs later functions first, so what was computed between start and finish is
// differentiated between the partner's start and finish: the way back is hidden as well.

namespace tessera::graph_parallel {
namespace {

struct Flight : torch::CustomClassHolder {
  explicit Flight(HaloPlan plan) : plan(std::move(plan)) {}

  HaloPlan plan;
  std::optional<comm::Awaitable<at::Tensor>> rows;
  at::ScalarType dtype = at::kFloat;
  c10::intrusive_ptr<Flight> back;  // the latest backward pass's

  at::Tensor land() {
    TESSERA_INTERNAL_ASSERT(rows.has_value(), "halo rows are finished before they are started");
    const at::Tensor arrived = rows->wait();
    rows.reset();
    return arrived;
  }
};
using FlightPtr = c10::intrusive_ptr<Flight>;

// A flight for the way back, remembered for the function that ends it.
FlightPtr return_flight(const FlightPtr& flight) {
  flight->back = c10::make_intrusive<Flight>(flight->plan);
  return flight->back;
}

template <class Direction>
struct Start : Function<Start<Direction>> {
  static Variable forward(AutogradContext* context, const Variable& rows, const FlightPtr& flight);
  static variable_list backward(AutogradContext* context, const variable_list& tokens);
};

template <class Direction>
struct Finish : Function<Finish<Direction>> {
  static Variable forward(AutogradContext* context, const Variable& token, const FlightPtr& flight);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct Inward;

struct Outward {
  using Partner = Inward;
  static comm::Awaitable<at::Tensor> start(const at::Tensor& rows, const HaloPlan& plan) {
    return detail::start_exchange(detail::pack(rows, plan), plan);
  }
  static at::Tensor land(const at::Tensor& arrived, const Flight& flight) {
    return arrived.to(flight.dtype);
  }
};

struct Inward {
  using Partner = Outward;
  static comm::Awaitable<at::Tensor> start(const at::Tensor& rows, const HaloPlan& plan) {
    return detail::start_accumulate(detail::pack_back(rows, plan), plan);
  }
  static at::Tensor land(const at::Tensor& arrived, const Flight& flight) {
    return detail::unpack_back(arrived, flight.plan, flight.dtype);
  }
};

template <class Direction>
Variable Start<Direction>::forward(AutogradContext* context, const Variable& rows,
                                   const FlightPtr& flight) {
  carry(context, flight);
  flight->dtype = rows.scalar_type();
  flight->rows = Direction::start(rows, flight->plan);
  return at::zeros({1}, rows.options().requires_grad(false));
}

template <class Direction>
variable_list Start<Direction>::backward(AutogradContext* context, const variable_list& tokens) {
  return {Finish<typename Direction::Partner>::apply(tokens[0], carried<Flight>(context)->back),
          Variable()};
}

template <class Direction>
Variable Finish<Direction>::forward(AutogradContext* context, const Variable&,
                                    const FlightPtr& flight) {
  carry(context, flight);
  return Direction::land(flight->land(), *flight);
}

template <class Direction>
variable_list Finish<Direction>::backward(AutogradContext* context, const variable_list& grads) {
  return {
      Start<typename Direction::Partner>::apply(grads[0], return_flight(carried<Flight>(context))),
      Variable()};
}

}  // namespace

struct PendingRows::State {
  at::Tensor token;
  FlightPtr flight;
  at::Tensor (*finish)(const at::Tensor& token, const FlightPtr& flight);
};

PendingRows::PendingRows(std::unique_ptr<State> state) : state_(std::move(state)) {}
PendingRows::PendingRows(PendingRows&&) noexcept = default;
PendingRows& PendingRows::operator=(PendingRows&&) noexcept = default;
PendingRows::~PendingRows() = default;

at::Tensor PendingRows::finish() {
  TESSERA_CHECK_VALUE(state_ != nullptr, "graph.halo: these rows were finished before.");
  const auto state = std::move(state_);
  return state->finish(state->token, state->flight);
}

PendingRows halo_exchange_async(const at::Tensor& owned, const HaloPlan& plan) {
  auto flight = c10::make_intrusive<Flight>(plan);
  at::Tensor token = Start<Outward>::apply(
      detail::joining("halo_exchange_async", owned, plan.num_owned(), plan), flight);
  return PendingRows(std::make_unique<PendingRows::State>(PendingRows::State{
      std::move(token), std::move(flight), [](const at::Tensor& t, const FlightPtr& f) {
        return at::Tensor(Finish<Outward>::apply(t, f));
      }}));
}

PendingRows halo_accumulate_async(const at::Tensor& halo, const HaloPlan& plan) {
  auto flight = c10::make_intrusive<Flight>(plan);
  at::Tensor token = Start<Inward>::apply(
      detail::joining("halo_accumulate_async", halo, plan.num_halo(), plan), flight);
  return PendingRows(std::make_unique<PendingRows::State>(PendingRows::State{
      std::move(token), std::move(flight), [](const at::Tensor& t, const FlightPtr& f) {
        return at::Tensor(Finish<Inward>::apply(t, f));
      }}));
}

}  // namespace tessera::graph_parallel
