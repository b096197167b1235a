// src/graph_parallel/halo_rows.h — the data movement behind the halo operators; no gradients here.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "tessera/comm/awaitable.h"
#include "tessera/graph_parallel/halo_plan.h"

namespace tessera::graph_parallel::detail {

/// Rows to send for an exchange, in the payload's type.
at::Tensor pack(const at::Tensor& owned, const HaloPlan& plan);
/// Rows to send for an accumulation, in the payload's type.
at::Tensor pack_back(const at::Tensor& halo, const HaloPlan& plan);

comm::Awaitable<at::Tensor> start_exchange(const at::Tensor& packed, const HaloPlan& plan);
comm::Awaitable<at::Tensor> start_accumulate(const at::Tensor& packed, const HaloPlan& plan);

/// Adds up arrived rows at their owners, in `dtype`.
at::Tensor unpack_back(const at::Tensor& arrived, const HaloPlan& plan, at::ScalarType dtype);

/// Checks rows against the plan and makes them take part in the backward pass. See halo.h.
at::Tensor joining(const char* operation, const at::Tensor& rows, std::int64_t expected,
                   const HaloPlan& plan);

/// A plan inside an autograd context. Its index tensors are its own and never written, so they need
/// no saved variables.
struct SavedPlan : torch::CustomClassHolder {
  explicit SavedPlan(HaloPlan plan) : plan(std::move(plan)) {}
  HaloPlan plan;
};

}  // namespace tessera::graph_parallel::detail
