#include "tessera/graph_parallel/neighbour_sum.h"

#include <mutex>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include "core/autograd.h"
#include "graph_parallel/device.h"
#include "graph_parallel/device_copies.h"
#include "kernels/neighbour_sum.h"
#include "tessera/core/check.h"

namespace tessera::graph_parallel {
namespace {

// The edges of each row behind each other, in the order given.
struct Sorted {
  at::Tensor first;
  at::Tensor column;
  at::Tensor edge;
  detail::DeviceCopies first_copies;
  detail::DeviceCopies column_copies;
  detail::DeviceCopies edge_copies;

  Sorted(const at::Tensor& rows, const at::Tensor& columns, std::int64_t num_rows)
      : first(at::zeros({num_rows + 1}, at::kLong)),
        edge(rows.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false)) {
    column = columns.index_select(0, edge);
    if (rows.numel() > 0) {
      at::Tensor ends = first.slice(0, 1);
      ends.copy_(at::bincount(rows, {}, num_rows).cumsum(0));
    }
  }

  kernels::EdgeRows view(at::Device device) const {
    const auto numbers = [&](const at::Tensor& tensor, const detail::DeviceCopies& copies) {
      return copies.of(tensor, device).const_data_ptr<std::int64_t>();  // the copies stay
    };
    return {numbers(first, first_copies), numbers(column, column_copies),
            numbers(edge, edge_copies)};
  }
};

// The edges as given, and turned around for whoever asks: backward passes turn them around every
// time and read the sorted ones alone.
class Ends {
 public:
  explicit Ends(at::Tensor given) : given_(std::move(given)) {}
  std::int64_t num_edges() const { return given_.size(1); }
  const at::Tensor& of(bool is_turned) const {
    if (!is_turned) return given_;
    std::call_once(once_, [this] { turned_ = given_.flip(0); });
    return turned_;
  }

 private:
  at::Tensor given_;
  mutable std::once_flag once_;
  mutable at::Tensor turned_;
};

}  // namespace

struct Adjacency::State {
  State(std::int64_t num_sources, std::int64_t num_targets, std::shared_ptr<const Ends> ends,
        bool is_turned, std::shared_ptr<const Sorted> by_target,
        std::shared_ptr<const Sorted> by_source)
      : num_sources(num_sources),
        num_targets(num_targets),
        ends(std::move(ends)),
        is_turned(is_turned),
        by_target(std::move(by_target)),
        by_source(std::move(by_source)) {}

  std::int64_t num_sources;
  std::int64_t num_targets;
  std::shared_ptr<const Ends> ends;
  bool is_turned;
  std::shared_ptr<const Sorted> by_target;
  std::shared_ptr<const Sorted> by_source;
  detail::DeviceCopies edge_copies;
};

Adjacency::Adjacency(std::shared_ptr<const State> state) : state_(std::move(state)) {}

Adjacency::Adjacency(const at::Tensor& edge_index, std::int64_t num_sources,
                     std::int64_t num_targets) {
  TESSERA_CHECK_VALUE(edge_index.defined() && edge_index.dim() == 2 && edge_index.size(0) == 2 &&
                          edge_index.scalar_type() == at::kLong,
                      "graph.adjacency: the edges must be a tensor of int64, [2, edges]: sources, "
                      "then targets.");
  const at::Tensor edges = edge_index.cpu().contiguous();
  if (edges.size(1) > 0) {
    const std::int64_t limits[] = {num_sources, num_targets};
    for (int end = 0; end < 2; ++end) {
      const auto low = edges[end].min().item<std::int64_t>();
      const auto high = edges[end].max().item<std::int64_t>();
      TESSERA_CHECK_VALUE(low >= 0 && high < limits[end], "graph.adjacency: there is no ",
                          end == 0 ? "source" : "target", " row ", low < 0 ? low : high, " among ",
                          limits[end], ".");
    }
  }
  state_ = std::make_shared<State>(num_sources, num_targets, std::make_shared<const Ends>(edges),
                                   /*is_turned=*/false,
                                   std::make_shared<Sorted>(edges[1], edges[0], num_targets),
                                   std::make_shared<Sorted>(edges[0], edges[1], num_sources));
}

std::int64_t Adjacency::num_sources() const noexcept { return state_->num_sources; }
std::int64_t Adjacency::num_targets() const noexcept { return state_->num_targets; }
std::int64_t Adjacency::num_edges() const noexcept { return state_->ends->num_edges(); }
const at::Tensor& Adjacency::edge_index() const { return state_->ends->of(state_->is_turned); }

Adjacency Adjacency::reversed() const {
  return Adjacency(std::make_shared<State>(state_->num_targets, state_->num_sources, state_->ends,
                                           !state_->is_turned, state_->by_source,
                                           state_->by_target));
}

namespace {

struct Saved : torch::CustomClassHolder {
  explicit Saved(Adjacency adjacency) : adjacency(std::move(adjacency)) {}
  Adjacency adjacency;
};
using SavedPtr = c10::intrusive_ptr<Saved>;

// About 2 microseconds of work: below it, another thread is not worth waking.
std::int64_t grain_of(std::int64_t num_columns) {
  return std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(1, num_columns));
}

template <typename T>
at::Tensor sum_rows(const at::Tensor& rows, const Adjacency& adjacency, const at::Tensor& weights) {
  const at::Tensor input = rows.contiguous();
  const at::Tensor factors = weights.defined() ? weights.contiguous() : weights;
  const std::int64_t columns = input.size(1);
  at::Tensor output = at::empty({adjacency.num_targets(), columns}, input.options());
  const auto view = adjacency.state().by_target->view(input.device());
  if (input.is_cuda()) {
    detail::device_neighbour_sum(view, input, factors, output);
    return output;
  }
  at::parallel_for(0, adjacency.num_targets(), grain_of(columns), [&](auto begin, auto end) {
    kernels::neighbour_sum_kernels<T>().neighbour_sum(
        view, begin, end, input.const_data_ptr<T>(), columns,
        factors.defined() ? factors.const_data_ptr<T>() : nullptr,
        factors.defined() ? factors.size(1) : 1, output.data_ptr<T>());
  });
  return output;
}

template <typename T>
at::Tensor multiply_ends(const at::Tensor& sources, const at::Tensor& targets,
                         const Adjacency& adjacency, std::int64_t width) {
  const at::Tensor a = sources.contiguous();
  const at::Tensor b = targets.contiguous();
  const std::int64_t columns = a.size(1);
  at::Tensor output = at::empty({adjacency.num_edges(), width}, a.options());
  const auto view = adjacency.state().by_target->view(a.device());
  if (a.is_cuda()) {
    detail::device_edge_product(view, a, b, output);
    return output;
  }
  at::parallel_for(0, adjacency.num_targets(), grain_of(columns), [&](auto begin, auto end) {
    kernels::neighbour_sum_kernels<T>().edge_product(view, begin, end, a.const_data_ptr<T>(),
                                                     b.const_data_ptr<T>(), columns, width,
                                                     output.data_ptr<T>());
  });
  return output;
}

// Note [Three ends of one product]
//
// sum over edges e and columns c of x[source(e)][c] * w[e][c] * g[target(e)][c] is linear in each
// of x, w and g. Its derivative in g is the neighbour sum of x and w, in x the neighbour sum of g
// and w over the reversed edges, in w the products of the two ends. Derivatives of these are these
// again, so two functions serve all orders.

// LibTorch refuses undefined tensors among the inputs of a function that is recorded.
using MaybeVariable = std::optional<Variable>;

struct Sum : Function<Sum> {
  static Variable forward(AutogradContext* context, const Variable& rows,
                          const MaybeVariable& weights, const SavedPtr& saved);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct Product : Function<Product> {
  static Variable forward(AutogradContext* context, const Variable& sources,
                          const Variable& targets, std::int64_t width, const SavedPtr& saved);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

SavedPtr reversed(const SavedPtr& saved) {
  return c10::make_intrusive<Saved>(saved->adjacency.reversed());
}

MaybeVariable maybe(const Variable& weights) {
  return weights.defined() ? MaybeVariable(weights) : std::nullopt;
}

Variable Sum::forward(AutogradContext* context, const Variable& rows, const MaybeVariable& weights,
                      const SavedPtr& saved) {
  const Variable factors = weights.value_or(Variable());
  context->save_for_backward({rows, factors});
  carry(context, saved);
  return rows.scalar_type() == at::kFloat ? sum_rows<float>(rows, saved->adjacency, factors)
                                          : sum_rows<double>(rows, saved->adjacency, factors);
}

variable_list Sum::backward(AutogradContext* context, const variable_list& grads) {
  const SavedPtr saved = carried<Saved>(context);
  const auto inputs = context->get_saved_variables();
  const Variable& rows = inputs[0];
  const Variable& weights = inputs[1];
  Variable grad_rows;
  Variable grad_weights;
  if (context->needs_input_grad(0)) {
    grad_rows = Sum::apply(grads[0], maybe(weights), reversed(saved));
  }
  if (weights.defined() && context->needs_input_grad(1)) {
    grad_weights = Product::apply(rows, grads[0], weights.size(1), saved);
  }
  return {grad_rows, grad_weights, Variable()};
}

Variable Product::forward(AutogradContext* context, const Variable& sources,
                          const Variable& targets, std::int64_t width, const SavedPtr& saved) {
  context->save_for_backward({sources, targets});
  carry(context, saved);
  return sources.scalar_type() == at::kFloat
             ? multiply_ends<float>(sources, targets, saved->adjacency, width)
             : multiply_ends<double>(sources, targets, saved->adjacency, width);
}

variable_list Product::backward(AutogradContext* context, const variable_list& grads) {
  const SavedPtr saved = carried<Saved>(context);
  const auto inputs = context->get_saved_variables();
  Variable grad_sources;
  Variable grad_targets;
  if (context->needs_input_grad(0)) {
    grad_sources = Sum::apply(inputs[1], MaybeVariable(grads[0]), reversed(saved));
  }
  if (context->needs_input_grad(1))
    grad_targets = Sum::apply(inputs[0], MaybeVariable(grads[0]), saved);
  return {grad_sources, grad_targets, Variable(), Variable()};
}

// Other devices and types: the same out of LibTorch's operators.
at::Tensor composed(const at::Tensor& rows, const Adjacency& adjacency, const at::Tensor& weights) {
  const at::Tensor edges = adjacency.state().edge_copies.of(adjacency.edge_index(), rows.device());
  at::Tensor messages = rows.index_select(0, edges[0]);
  if (weights.defined()) messages = messages * weights;
  return at::zeros({adjacency.num_targets(), rows.size(1)}, rows.options().requires_grad(false))
      .index_add(0, edges[1], messages);
}

}  // namespace

at::Tensor neighbour_sum(const at::Tensor& rows, const Adjacency& adjacency,
                         const at::Tensor& weights) {
  TESSERA_CHECK_VALUE(rows.defined() && rows.dim() == 2 && rows.size(0) == adjacency.num_sources(),
                      "graph.neighbour_sum: the rows have shape ",
                      rows.defined() ? rows.sizes() : at::IntArrayRef{}, ", the edges have ",
                      adjacency.num_sources(), " source rows.");
  TESSERA_CHECK_VALUE(
      !weights.defined() || (weights.dim() == 2 && weights.size(0) == adjacency.num_edges() &&
                             (weights.size(1) == 1 || weights.size(1) == rows.size(1))),
      "graph.neighbour_sum: the weights have shape ",
      weights.defined() ? weights.sizes() : at::IntArrayRef{}, " for ", adjacency.num_edges(),
      " edges and ", rows.size(1), " columns.");
  TESSERA_CHECK_TYPE(!weights.defined() || weights.scalar_type() == rows.scalar_type(),
                     "graph.neighbour_sum: the rows are ", rows.scalar_type(), ", the weights are ",
                     weights.scalar_type(), ".");
  TESSERA_CHECK_VALUE(!weights.defined() || weights.device() == rows.device(),
                      "graph.neighbour_sum: the rows are on ", rows.device(),
                      ", the weights are on ", weights.defined() ? weights.device() : rows.device(),
                      ".");
  const bool has_kernel =
      (rows.is_cpu() && (rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kDouble)) ||
      detail::has_kernels_for(rows);
  if (!has_kernel) return composed(rows, adjacency, weights);
  return Sum::apply(rows, maybe(weights), c10::make_intrusive<Saved>(adjacency));
}

}  // namespace tessera::graph_parallel
