// tests/embedding/table_batches.h — a small batch of tables and what its tests have in common.

#pragma once

#include "tessera/embedding/table_batch.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

namespace tessera::testing {

using at::Tensor;
using embedding::Feature;
using embedding::LookupInput;
using embedding::OptimizerKind;
using embedding::PoolingType;
using embedding::Table;
using embedding::TableBatch;
using embedding::TableBatchOptions;

inline constexpr OptimizerKind kEveryOptimizer[] = {OptimizerKind::kSgd,
                                                    OptimizerKind::kAdagrad,
                                                    OptimizerKind::kRowWiseAdagrad,
                                                    OptimizerKind::kAdam,
                                                    OptimizerKind::kAdamW,
                                                    OptimizerKind::kPartialRowWiseAdam,
                                                    OptimizerKind::kLamb,
                                                    OptimizerKind::kPartialRowWiseLamb,
                                                    OptimizerKind::kLarsSgd};

inline Tensor longs(const std::vector<std::int64_t>& values) {
  return at::tensor(values, at::kLong);
}

struct Threads {
  explicit Threads(int count) : before(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before); }
  int before;
};

/// Three tables of 3, 17 and 64 columns; table 1 is a mean and serves two features.
struct Fixture {
  explicit Fixture(TableBatchOptions options = {}, at::ScalarType type = at::kFloat) {
    at::manual_seed(7);
    const std::int64_t rows[] = {11, 7, 5000};
    const std::int64_t columns[] = {3, 17, 64};
    for (int i = 0; i < 3; ++i) {
      Tensor weight = at::rand({rows[i], columns[i]}).sub_(0.5).to(type);
      weight.requires_grad_(true);
      tables.push_back({std::string("t").append(std::to_string(i)), weight,
                        i == 1 ? PoolingType::kMean : PoolingType::kSum});
    }
    batch.emplace(tables, features, options);
  }
  /// Four features, `size` samples each, 0 to 4 ids a sample.
  LookupInput input(std::int64_t size, bool is_weighted = false, at::ScalarType type = at::kLong,
                    std::vector<std::int64_t> sizes = {}) const {
    at::manual_seed(11);
    std::vector<Tensor> ids;
    std::vector<Tensor> lengths;
    for (std::size_t f = 0; f < features.size(); ++f) {
      const std::int64_t count = sizes.empty() ? size : sizes[f];
      lengths.push_back(at::randint(0, 5, {count}, at::kLong));
      const auto total = lengths.back().sum().item<std::int64_t>();
      ids.push_back(at::randint(tables[features[f].table].weight.size(0), {total}, at::kLong));
    }
    LookupInput input;
    input.ids = at::cat(ids).to(type);
    input.offsets = at::cat({at::zeros({1}, at::kLong), at::cat(lengths).cumsum(0)}).to(type);
    if (is_weighted) input.weights = at::rand({input.ids.numel()}).add_(0.5);
    input.batch_sizes = std::move(sizes);
    return input;
  }
  /// What `pooled` should give, from LibTorch, with a graph to the weights.
  Tensor judge(const LookupInput& input, std::vector<Tensor>* parts = nullptr) const {
    const Tensor offsets = input.offsets.to(at::kLong);
    const auto* offset = offsets.const_data_ptr<std::int64_t>();
    std::vector<Tensor> columns;
    std::int64_t bag = 0;
    for (std::size_t f = 0; f < features.size(); ++f) {
      const Table& table = tables[static_cast<std::size_t>(features[f].table)];
      const std::int64_t size = input.batch_sizes.empty()
                                    ? (offsets.numel() - 1) / static_cast<std::int64_t>(4)
                                    : input.batch_sizes[f];
      std::vector<Tensor> rows;
      for (std::int64_t b = bag; b < bag + size; ++b) {
        const Tensor ids = input.ids.slice(0, offset[b], offset[b + 1]).to(at::kLong);
        Tensor found = table.weight.index_select(0, ids).to(at::kDouble);
        if (input.weights.defined()) {
          found = found * input.weights.slice(0, offset[b], offset[b + 1]).unsqueeze(1);
        }
        found = found.sum(0);
        if (table.pooling == PoolingType::kMean && ids.numel() > 0) found = found / ids.numel();
        rows.push_back(found);
      }
      bag += size;
      columns.push_back(rows.empty() ? at::zeros({0, table.weight.size(1)}, at::kDouble)
                                     : at::stack(rows));
    }
    if (parts != nullptr) *parts = columns;
    if (input.batch_sizes.empty()) return at::cat(columns, 1);
    for (Tensor& column : columns) column = column.reshape({-1});
    return at::cat(columns);
  }
  std::vector<Tensor> clones() const {
    std::vector<Tensor> found;
    for (const Table& table : tables) found.push_back(table.weight.detach().clone());
    return found;
  }
  std::vector<Table> tables;
  std::vector<Feature> features{{"a", 0}, {"b", 1}, {"c", 2}, {"d", 1}};
  std::optional<TableBatch> batch;
};

inline void expect_close(const Tensor& found, const Tensor& wanted, double slack = 1e-5) {
  ASSERT_EQ(found.sizes(), wanted.sizes());
  EXPECT_TRUE(at::allclose(found.to(at::kDouble), wanted.to(at::kDouble), slack, slack))
      << (found.to(at::kDouble) - wanted.to(at::kDouble)).abs().max();
}

}  // namespace tessera::testing
