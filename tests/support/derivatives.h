// tests/support/derivatives.h — checks derivatives of operators that span ranks, all ranks in step.
//
// An objective is a scalar per rank. If it is replicated, every rank holds the whole; otherwise the
// ranks' scalars add up. An input is replicated (all ranks move together) or a rank's own.

#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/collectives.h"
#include "tessera/regions/placement.h"

namespace tessera::testing {

struct Objective {
  std::function<at::Tensor(const at::Tensor&)> value;
  bool is_replicated = false;
};

/// A random tensor in double precision, the same for equal seeds.
inline at::Tensor random_tensor(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

/// The gradient on this rank, as part of a graph.
inline at::Tensor gradient_of(const Objective& objective, const at::Tensor& x) {
  return torch::autograd::grad({objective.value(x)}, {x}, {}, std::nullopt,
                               /*create_graph=*/true)[0];
}

/// The objective of the next order: the gradient against fixed random weights. Its placement
/// follows the input's: the gradient of a replicated input is replicated.
inline Objective derivative_of(const Objective& objective, const comm::Group& group,
                               bool has_replicated_input, std::uint64_t seed) {
  return {[=](const at::Tensor& x) {
            const at::Tensor weights =
                random_tensor(x.sizes(), has_replicated_input ? seed : seed * 100 + group.rank());
            return (gradient_of(objective, x) * weights).sum();
          },
          has_replicated_input};
}

inline double total_of(const Objective& objective, const at::Tensor& x, const comm::Group& group) {
  const at::Tensor mine = objective.value(x.detach().clone().requires_grad_(true)).detach();
  return objective.is_replicated ? mine.item<double>()
                                 : comm::all_reduce(mine, group).item<double>();
}

/// Compares the gradient with central differences, and the gradients of the next `order - 1` orders
/// with central differences of the order below. Collective.
inline void check_derivatives(Objective objective, const at::Tensor& x, const comm::Group& group,
                              bool has_replicated_input, int order = 3) {
  constexpr double kStep = 1e-5;
  constexpr double kTolerance = 2e-6;  // the step's own error, about step squared over rounding
  for (int level = 1; level <= order; ++level) {
    const at::Tensor exact =
        gradient_of(objective, x.detach().clone().requires_grad_(true)).detach();
    const int num_owners = has_replicated_input ? 1 : group.size();
    for (int owner = 0; owner < num_owners; ++owner) {
      const bool is_mine = has_replicated_input || owner == group.rank();
      const at::Tensor count = comm::all_gather(at::full({1}, x.numel(), at::kLong), group);
      const auto num = count[owner].item<std::int64_t>();
      for (std::int64_t i = 0; i < num; i += level) {  // a sample is enough at higher orders
        double ends[2];
        for (int side = 0; side < 2; ++side) {
          at::Tensor moved = x.detach().clone();
          if (is_mine) moved.view(-1)[i] += side == 0 ? kStep : -kStep;
          ends[side] = total_of(objective, moved, group);
        }
        if (is_mine) {
          const double numeric = (ends[0] - ends[1]) / (2 * kStep);
          const double analytic = exact.reshape(-1)[i].item<double>();
          EXPECT_NEAR(analytic, numeric, kTolerance * (1 + std::abs(numeric)))
              << "order " << level << ", element " << i << " on rank " << group.rank() << " of "
              << group.size();
        }
      }
    }
    objective = derivative_of(objective, group, has_replicated_input, 77 + level);
  }
}

/// The sum over the ranks of the product of two tensors; a replicated pair counts once.
inline double inner(const at::Tensor& a, const at::Tensor& b, const comm::Group& group,
                    regions::Placement placement) {
  const at::Tensor mine = (a * b).sum().detach();
  return placement == regions::Placement::kReplicated
             ? mine.item<double>()
             : comm::all_reduce(mine, group).item<double>();
}

}  // namespace tessera::testing
