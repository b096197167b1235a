// Rows of few bits on the GPU: the bits of the CPU, whose tests judge that one.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tessera/core/check.h"
#include "tessera/embedding/quantised_tables.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

struct Twins {
  Twins(RowType type, PoolingType pooling, std::int64_t alignment,
        std::vector<std::int64_t> columns) {
    at::manual_seed(3);
    std::vector<QuantisedTableSpec> specs;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const std::string name = "t" + std::to_string(i);
      specs.push_back({name, 50 + 7 * static_cast<std::int64_t>(i), columns[i], type, {name}});
    }
    specs[0].features.push_back("again");
    host.emplace(specs, pooling, alignment);
    device.emplace(specs, pooling, alignment, at::Device(at::kCUDA, 0));
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const Tensor numbers = at::randn({specs[i].num_embeddings, columns[i]});
      host->assign(i, numbers);
      device->assign(i, numbers.cuda());
      EXPECT_TRUE(device->rows(i).is_cuda());
      EXPECT_TRUE(at::equal(device->rows(i).cpu(), host->rows(i)));
      EXPECT_TRUE(at::equal(device->dequantised(i).cpu(), host->dequantised(i)));
    }
    num_features = static_cast<std::int64_t>(columns.size()) + 1;
  }

  void compare(std::int64_t batch, bool is_weighted, at::ScalarType type = at::kLong) const {
    at::manual_seed(batch);
    const Tensor lengths = at::randint(0, 9, {num_features * batch}, at::kLong);
    const Tensor offsets = at::cat({at::zeros({1}, at::kLong), lengths.cumsum(0)}).to(type);
    const auto count = offsets[num_features * batch].item<std::int64_t>();
    const Tensor ids = at::randint(50, {count}, at::kLong).to(type);
    std::optional<Tensor> weights;
    std::optional<Tensor> moved;
    if (is_weighted) {
      weights = at::randn({count});
      moved = weights->cuda();
    }
    const Tensor wanted = host->forward(ids, offsets, weights);
    const Tensor found = device->forward(ids.cuda(), offsets.cuda(), moved);
    ASSERT_TRUE(found.is_cuda());
    ASSERT_EQ(found.sizes(), wanted.sizes());
    EXPECT_TRUE(at::equal(found.cpu(), wanted)) << (found.cpu() - wanted).abs().max();
  }

  std::optional<QuantisedTables> host;
  std::optional<QuantisedTables> device;
  std::int64_t num_features = 0;
};

constexpr RowType kTypes[] = {RowType::kFp32, RowType::kFp16, RowType::kBf16, RowType::kInt8,
                              RowType::kInt4, RowType::kInt2, RowType::kFp8};

TEST(QuantisedCuda, PooledRowsHaveTheBitsOfTheCpu) {
  for (const RowType type : kTypes) {
    for (const PoolingType pooling : {PoolingType::kSum, PoolingType::kMean}) {
      for (const std::int64_t alignment : {1, 4, 16}) {
        // Odd widths, one word, more words than lanes.
        const Twins twins(type, pooling, alignment, {64, 1, 3, 17, 128, 200, 515});
        for (const std::int64_t batch : {1, 2, 33, 300}) {
          twins.compare(batch, false);
          twins.compare(batch, true);
        }
      }
    }
  }
}

TEST(QuantisedCuda, SequencesHaveTheBitsOfTheCpu) {
  for (const RowType type : kTypes) {
    for (const std::int64_t columns : {1, 16, 17, 64, 200}) {
      const Twins twins(type, PoolingType::kNone, 16, {columns, columns, columns});
      for (const std::int64_t batch : {1, 50}) {
        twins.compare(batch, false);
        twins.compare(batch, true, at::kInt);
      }
    }
  }
}

TEST(QuantisedCuda, NothingToLookUpIsZeroOrNothing) {
  const Twins pooled(RowType::kInt4, PoolingType::kMean, 16, {64, 32});
  const auto cuda = at::TensorOptions(at::kLong).device(at::kCUDA);
  const Tensor found = pooled.device->forward(at::empty({0}, cuda), at::zeros({7}, cuda));
  EXPECT_EQ(found.sizes(), (std::vector<std::int64_t>{2, 160}));
  EXPECT_TRUE(found.eq(0).all().item<bool>());
  const Twins sequence(RowType::kInt4, PoolingType::kNone, 16, {64, 64});
  EXPECT_EQ(sequence.device->forward(at::empty({0}, cuda), at::zeros({4}, cuda)).size(0), 0);
}

TEST(QuantisedCuda, WhatIsNotARowIsNamed) {
  const Twins twins(RowType::kInt8, PoolingType::kSum, 16, {64, 32});
  const auto forward = [&](std::vector<std::int64_t> ids, std::vector<std::int64_t> offsets) {
    return twins.device->forward(at::tensor(ids).cuda(), at::tensor(offsets).cuda());
  };
  forward({1, 2, 3}, {0, 1, 2, 3});
  try {
    forward({1, 2, 3, 57}, {0, 1, 2, 4});
    ADD_FAILURE() << "was accepted";
  } catch (const c10::IndexError& error) {
    EXPECT_NE(std::string(error.what()).find("id 57 at position 1 of feature 't1'"),
              std::string::npos)
        << error.what();
  }
  EXPECT_THROW(forward({-1}, {0, 1, 1, 1}), c10::IndexError);
  EXPECT_THROW(forward({1, 2}, {0, 2, 1, 2}), c10::ValueError);
  EXPECT_THROW(forward({1, 2}, {0, 1, 2, 9}), c10::ValueError);
  EXPECT_THROW(twins.device->forward(at::tensor(std::vector<std::int64_t>{1}),
                                     at::tensor(std::vector<std::int64_t>{0, 1, 1, 1})),
               c10::ValueError);
}

}  // namespace
}  // namespace tessera::embedding
