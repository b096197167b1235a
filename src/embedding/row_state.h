// src/embedding/row_state.h — what a RowOptimizer keeps, for the passes that step rows.

#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "kernels/table_rows.h"
#include "tessera/embedding/optimizer.h"

namespace tessera::embedding {

struct RowOptimizer::State {
  struct Rows {
    std::string name;
    at::Tensor weight;
    at::Tensor momentum1;  // undefined if the rule has none
    at::Tensor momentum2;
    at::Tensor is_stepped;  // [rows], bool; undefined if nobody asked for it
  };
  OptimizerOptions options;
  std::vector<Rows> tables;
  std::int64_t num_steps = 0;

  /// The numbers of step `num_steps` for one table. Its number is part of the random bits' key.
  kernels::RowStep step_of(std::size_t table) const;
  kernels::RowState state_of(std::size_t table) const;
};

namespace detail {

/// The rows of a weight as the kernels see them.
kernels::TableRows rows_of(const at::Tensor& weight);

}  // namespace detail
}  // namespace tessera::embedding
