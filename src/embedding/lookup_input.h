// src/embedding/lookup_input.h — what a batch of tables holds, and what a call of it asks for.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "embedding/row_cache.h"
#include "embedding/table_pass.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::embedding {

struct TableBatch::State {
  std::vector<Table> tables;
  std::vector<Feature> features;
  TableBatchOptions options;
  std::int64_t num_columns = 0;
  std::shared_ptr<RowOptimizer> optimizer;
  at::Tensor anchor;  // makes the output of a fused batch ask for a gradient
  detail::Workspace workspace;
  std::atomic<std::uint64_t> num_calls{0};
  std::shared_ptr<detail::RowCache> cache;  // null: no table has one
  std::mutex ahead_mutex;
  std::vector<std::unique_ptr<detail::Admission>> ahead;  // prefetched, not yet looked up
  std::atomic<int> num_held{0};                           // calls whose rows the cache must keep

  const at::Tensor& weight_of(const Feature& feature) const {
    return tables[static_cast<std::size_t>(feature.table)].weight;
  }
  at::Device device() const { return tables.front().weight.device(); }
  /// Whether backward keeps the gradients to itself.
  bool has_anchor() const {
    return options.gradients == GradientForm::kFused || options.sink != nullptr;
  }
};

namespace detail {

/// Throws ValueError or TypeError for tensors that do not fit the tables and each other.
void check_input(const TableBatch::State& state, const LookupInput& input, bool is_sequence);

/// The call as the kernels take it; points into `input`. `row_stride`: from one sample of an even
/// batch to the next. Throws ValueError for offsets that do not ascend, which on CUDA the lookup
/// finds.
TablePass make_pass(const TableBatch::State& state, const LookupInput& input, bool is_sequence,
                    std::int64_t row_stride);

[[noreturn]] void refuse_offsets(bool is_sequence);

/// Says which id was outside, that at `position`; throws, or warns once, or does nothing. Nothing
/// for a position below 0.
void report(const TableBatch::State& state, const TablePass& pass, const LookupInput& input,
            std::int64_t position);

}  // namespace detail
}  // namespace tessera::embedding
