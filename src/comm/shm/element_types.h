// src/comm/shm/element_types.h — the kernels' names for the transport's types and reductions.

#pragma once

#include "comm/transport.h"
#include "kernels/reduce.h"

namespace tessera::comm::shm {

static_assert(static_cast<int>(DataType::kBool) == static_cast<int>(kernels::Element::kBool));
static_assert(static_cast<int>(DataType::kInt64) == static_cast<int>(kernels::Element::kInt64));
static_assert(static_cast<int>(DataType::kFloat16) == static_cast<int>(kernels::Element::kFloat16));
static_assert(static_cast<int>(DataType::kFloat64) == static_cast<int>(kernels::Element::kFloat64));
static_assert(static_cast<int>(ReduceOp::kSum) == static_cast<int>(kernels::Reduction::kSum) + 1);
static_assert(static_cast<int>(ReduceOp::kBxor) == static_cast<int>(kernels::Reduction::kBxor) + 1);

inline kernels::Element element_of(DataType dtype) noexcept {
  return static_cast<kernels::Element>(dtype);
}

/// Not for ReduceOp::kNone.
inline kernels::Reduction reduction_of(ReduceOp op) noexcept {
  return static_cast<kernels::Reduction>(static_cast<int>(op) - 1);
}

}  // namespace tessera::comm::shm
