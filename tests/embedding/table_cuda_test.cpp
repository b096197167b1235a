// A batch of tables on the GPU does what it does on the CPU, whose tests judge that one.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "embedding/table_batches.h"

namespace tessera::embedding {
namespace {

using at::Tensor;
using tessera::testing::kEveryOptimizer;

/// The same tables on both devices: 3, 17, 64, 128 and 200 columns, the second a mean that serves
/// two features.
struct Twins {
  explicit Twins(TableBatchOptions options = {}, at::ScalarType type = at::kFloat) {
    at::manual_seed(5);
    const std::int64_t columns[] = {3, 17, 64, 128, 200};
    std::vector<Feature> features;
    for (int i = 0; i < 5; ++i) {
      const std::string name = std::string("t").append(std::to_string(i));
      const Tensor weight = at::rand({300 + 7 * i, columns[i]}).sub_(0.5).to(type);
      const auto pooling = i == 1 ? PoolingType::kMean : PoolingType::kSum;
      host.push_back({name, weight.clone().requires_grad_(true), pooling});
      device.push_back({name, weight.cuda().requires_grad_(true), pooling});
      features.push_back({name, i});
      num_columns += columns[i];
    }
    features.push_back({"again", 1});
    num_columns += 17;
    on_host.emplace(host, features, options);
    on_device.emplace(device, features, options);
  }
  std::vector<Table> host;
  std::vector<Table> device;
  std::optional<TableBatch> on_host;
  std::optional<TableBatch> on_device;
  std::int64_t num_columns = 0;
};

/// Six features of `batch` samples; half of all ids are 3, so that one row has very many entries.
LookupInput input_of(std::int64_t batch, bool is_weighted, bool is_hot = false,
                     at::ScalarType type = at::kLong, std::vector<std::int64_t> sizes = {}) {
  at::manual_seed(9);
  std::int64_t bags = 0;
  for (const std::int64_t size : sizes) bags += size;
  if (sizes.empty()) bags = 6 * batch;
  const Tensor lengths = at::randint(0, 7, {bags}, at::kLong);
  LookupInput input;
  input.offsets = at::cat({at::zeros({1}, at::kLong), lengths.cumsum(0)});
  const auto count = input.offsets[bags].item<std::int64_t>();
  input.ids = at::randint(300, {count}, at::kLong);
  if (is_hot) input.ids.masked_fill_(at::rand({count}) < 0.5, 3);
  input.ids = input.ids.to(type);
  input.offsets = input.offsets.to(type);
  if (is_weighted) input.weights = at::rand({count}).add_(0.5);
  input.batch_sizes = std::move(sizes);
  return input;
}

LookupInput on_cuda(const LookupInput& input) {
  LookupInput moved = input;
  moved.ids = input.ids.cuda();
  moved.offsets = input.offsets.cuda();
  if (input.weights.defined()) moved.weights = input.weights.detach().cuda();
  return moved;
}

void expect_close(const Tensor& found, const Tensor& wanted, double slack) {
  ASSERT_EQ(found.sizes(), wanted.sizes());
  const Tensor a = found.detach().cpu().to(at::kDouble);
  const Tensor b = wanted.detach().cpu().to(at::kDouble);
  EXPECT_TRUE(at::allclose(a, b, slack, slack)) << (a - b).abs().max();
}

TEST(TableCuda, LooksUpAsTheCpuDoes) {
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const Twins twins({}, type);
    for (const auto id_type : {at::kLong, at::kInt}) {
      for (const bool is_weighted : {false, true}) {
        for (const std::int64_t batch : {0, 1, 100}) {
          const LookupInput input = input_of(batch, is_weighted, false, id_type);
          expect_close(twins.on_device->pooled(on_cuda(input)), twins.on_host->pooled(input), 2e-6);
          expect_close(twins.on_device->sequence(on_cuda(input)), twins.on_host->sequence(input),
                       1e-6);
        }
      }
    }
    const LookupInput uneven = input_of(0, true, false, at::kLong, {5, 0, 60, 1, 2, 3});
    expect_close(twins.on_device->pooled(on_cuda(uneven)), twins.on_host->pooled(uneven), 2e-6);
    expect_close(twins.on_device->sequence(on_cuda(uneven)), twins.on_host->sequence(uneven), 1e-6);
  }
}

TEST(TableCuda, HandsOutTheGradientsOfTheCpu) {
  for (const auto form : {GradientForm::kDense, GradientForm::kSparse}) {
    for (const bool is_sequence : {false, true}) {
      for (const bool is_weighted : {false, true}) {
        Twins twins({.gradients = form});
        LookupInput input = input_of(700, is_weighted, true);
        LookupInput moved = on_cuda(input);
        if (is_weighted) {
          input.weights.requires_grad_(true);
          moved.weights.requires_grad_(true);
        }
        const auto look_up = [&](const TableBatch& batch, const LookupInput& of) {
          return is_sequence ? batch.sequence(of) : batch.pooled(of);
        };
        const Tensor output = look_up(*twins.on_host, input);
        const Tensor grad = at::rand_like(output).sub_(0.5);
        output.backward(grad);
        look_up(*twins.on_device, moved).backward(grad.cuda());
        for (std::size_t i = 0; i < twins.host.size(); ++i) {
          Tensor found = twins.device[i].weight.grad();
          Tensor wanted = twins.host[i].weight.grad();
          EXPECT_EQ(found.is_sparse(), form == GradientForm::kSparse);
          if (found.is_sparse()) {
            EXPECT_TRUE(found.coalesce().indices().cpu().equal(wanted.coalesce().indices()));
            found = found.to_dense();
            wanted = wanted.to_dense();
          }
          expect_close(found, wanted, 3e-5);
        }
        if (is_weighted) expect_close(moved.weights.grad(), input.weights.grad(), 2e-5);
      }
    }
  }
}

TEST(TableCuda, StepsAsTheCpuDoes) {
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const OptimizerKind kind : kEveryOptimizer) {
      for (const bool is_decoupled : {false, true}) {
        SCOPED_TRACE(std::string(name_of(kind)));
        OptimizerOptions options{.kind = kind,
                                 .learning_rate = 0.03,
                                 .eps = 1e-3,
                                 .weight_decay = 0.02,
                                 .eta = 0.5,
                                 .max_gradient = 0.4};
        if (is_decoupled) options.weight_decay_mode = WeightDecayMode::kDecoupled;
        Twins twins({.gradients = GradientForm::kFused, .optimizer = options}, type);
        for (int step = 0; step < 2; ++step) {
          const LookupInput input = input_of(400, step == 1, true);
          const Tensor grad = at::rand({400, twins.num_columns}).sub_(0.5);
          twins.on_host->pooled(input).backward(grad);
          twins.on_device->pooled(on_cuda(input)).backward(grad.cuda());
        }
        const double slack = type == at::kFloat ? 5e-5 : (type == at::kHalf ? 4e-3 : 3e-2);
        for (std::size_t i = 0; i < twins.host.size(); ++i) {
          expect_close(twins.device[i].weight, twins.host[i].weight, slack);
        }
        const auto wanted = twins.on_host->optimizer()->state_dict();
        for (const auto& [name, tensor] : twins.on_device->optimizer()->state_dict()) {
          expect_close(tensor, wanted.at(name), type == at::kFloat ? 1e-4 : 3e-2);
        }
      }
    }
  }
}

TEST(TableCuda, LongBagsAreSummedAsOnTheCpu) {
  // Bags of 0 to 70 ids, so that several lanes share one, some of them without an id.
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const Twins twins({}, type);
    for (const bool is_weighted : {false, true}) {
      at::manual_seed(11);
      LookupInput input;
      const Tensor lengths = at::arange(6 * 71, at::kLong).remainder(71);
      input.offsets = at::cat({at::zeros({1}, at::kLong), lengths.cumsum(0)});
      const auto count = input.offsets[6 * 71].item<std::int64_t>();
      input.ids = at::randint(300, {count}, at::kLong);
      if (is_weighted) input.weights = at::rand({count}).add_(0.5);
      expect_close(twins.on_device->pooled(on_cuda(input)), twins.on_host->pooled(input), 1e-5);
    }
  }
}

TEST(TableCuda, RowsOfEveryNumberOfEntriesAreStepped) {
  // Row r of each table occurs counts[r] times: alone, a few times, in one segment and in several,
  // at the borders between them. Gradients are small whole numbers, so that sums are exact in any
  // order, and SGD with a rate of 1 leaves them behind.
  const std::vector<std::int64_t> counts = {1,  2,   3,   7,   8,   9,   31,  32,  33,   64,
                                            65, 127, 255, 256, 257, 511, 512, 513, 2048, 5000};
  const auto on_device = at::TensorOptions().device(at::kCUDA);
  std::vector<Tensor> parts;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    parts.push_back(at::full({counts[r]}, static_cast<std::int64_t>(r), at::kLong));
  }
  at::manual_seed(3);
  const Tensor in_order = at::cat(parts);
  const Tensor ids = in_order.index_select(0, at::randperm(in_order.numel())).to(at::kCUDA);
  const std::int64_t num_ids = ids.numel();
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kRowWiseAdagrad}) {
    for (const std::int64_t columns : {1, 8, 24, 64, 128, 132, 256}) {
      SCOPED_TRACE(columns);
      const Tensor weight =
          at::zeros({static_cast<std::int64_t>(counts.size()), columns}, on_device)
              .requires_grad_(true);
      TableBatch batch({{"t", weight}}, {{"f", 0}},
                       {.gradients = GradientForm::kFused,
                        .optimizer = {.kind = kind, .learning_rate = 1.0, .eps = 1e-3}});
      LookupInput input;
      input.ids = ids;
      input.offsets = at::arange(num_ids + 1, on_device.dtype(at::kLong));
      const Tensor grad = at::randint(-3, 4, {num_ids, columns}, on_device.dtype(at::kFloat));
      batch.pooled(input).backward(grad);
      const Tensor sums = at::zeros_like(weight.detach()).index_add_(0, ids, grad);
      if (kind == OptimizerKind::kSgd) {
        EXPECT_TRUE(weight.detach().equal(-sums));
      } else {
        const Tensor squares = sums.pow(2).mean(1, /*keepdim=*/true);
        expect_close(batch.optimizer()->state_dict().at("t.momentum1").reshape({-1, 1}), squares,
                     1e-6);
        expect_close(weight, -sums / (squares.sqrt() + 1e-3), 1e-6);
      }
    }
  }
}

TEST(TableCuda, BagsOfManyIdsAreSteppedAsTheirRowsAre) {
  // Rows that occur once take another way than the others, and share it with rows that a coarse
  // mark takes for repeated (the largest table). Gradients are small whole numbers, exact in all
  // types, in bags of 20 ids; an empty bag is among them.
  constexpr std::int64_t kBags = 500;
  constexpr std::int64_t kIds = 20 * kBags;
  const auto on_device = at::TensorOptions().device(at::kCUDA);
  at::manual_seed(6);
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const std::int64_t num_rows : {700, 40'000, 3'000'000}) {
      for (const std::int64_t columns : {8, 24, 128, 256}) {
        SCOPED_TRACE(columns);
        const Tensor weight = at::zeros({num_rows, columns}, on_device.dtype(type));
        const TableBatch batch({{"t", weight}, {"other", at::zeros({9, 3}, on_device)}},
                               {{"f", 0}, {"g", 0}, {"h", 1}},
                               {.gradients = GradientForm::kFused,
                                .optimizer = {.kind = OptimizerKind::kSgd, .learning_rate = 1.0}});
        LookupInput input;
        input.ids = at::randint(num_rows, {2 * kIds}, on_device.dtype(at::kLong));
        input.ids = at::cat({input.ids, at::randint(9, {kIds}, on_device.dtype(at::kLong))});
        input.offsets = at::arange(0, 3 * kIds + 1, 20, on_device.dtype(at::kLong));
        input.offsets[1] = 0;
        const Tensor grad =
            at::randint(-2, 3, {kBags, 2 * columns + 3}, on_device.dtype(at::kFloat));
        batch.pooled(input).backward(grad);
        const Tensor bags = at::arange(kBags, on_device.dtype(at::kLong)).repeat_interleave(20);
        Tensor wanted = at::zeros({num_rows, columns}, on_device);
        for (int f = 0; f < 2; ++f) {
          Tensor own = bags.clone();
          if (f == 0) own.narrow(0, 0, 20).fill_(1);  // the first bag is empty: they are the next's
          wanted.index_add_(0, input.ids.narrow(0, f * kIds, kIds),
                            -grad.narrow(1, f * columns, columns).index_select(0, own));
        }
        EXPECT_TRUE(weight.to(at::kFloat).equal(wanted));
      }
    }
  }
}

TEST(TableCuda, UnfusedStepsAreTheFusedOnes) {
  for (const OptimizerKind kind : kEveryOptimizer) {
    const OptimizerOptions options{
        .kind = kind, .learning_rate = 0.03, .eps = 1e-3, .weight_decay = 0.02, .eta = 0.5};
    Twins fused({.gradients = GradientForm::kFused, .optimizer = options});
    Twins sparse({.gradients = GradientForm::kSparse});
    std::vector<std::pair<std::string, Tensor>> weights;
    for (const Table& table : sparse.device) weights.emplace_back(table.name, table.weight);
    RowOptimizer optimizer(weights, options);
    const LookupInput input = on_cuda(input_of(90, false));
    const Tensor grad = at::rand({90, fused.num_columns}).cuda();
    fused.on_device->pooled(input).backward(grad);
    sparse.on_device->pooled(input).backward(grad);
    EXPECT_GT(optimizer.clip_grad_norm(1e9), 0.0);
    optimizer.step();
    for (std::size_t i = 0; i < sparse.device.size(); ++i) {
      expect_close(fused.device[i].weight, sparse.device[i].weight, 1e-6);
    }
  }
}

TEST(TableCuda, TwoRunsGiveTheSameBits) {
  std::vector<Tensor> first;
  for (int run = 0; run < 3; ++run) {
    Twins twins({.gradients = GradientForm::kFused,
                 .optimizer = {.kind = OptimizerKind::kRowWiseAdagrad,
                               .learning_rate = 0.1,
                               .stochastic_rounding = true,
                               .seed = 3}},
                at::kBFloat16);
    const LookupInput input = on_cuda(input_of(3000, true, true));
    for (int step = 0; step < 2; ++step) {
      at::manual_seed(4);
      twins.on_device->pooled(input).backward(at::rand({3000, twins.num_columns}).cuda());
    }
    for (std::size_t i = 0; i < twins.device.size(); ++i) {
      if (run == 0) first.push_back(twins.device[i].weight.detach().clone());
      EXPECT_TRUE(twins.device[i].weight.equal(first[i]));
    }
  }
}

TEST(TableCuda, StepsTheRowsOfSmallAndLargeTables) {
  // How rows are sorted depends on the number of all rows. With gradients of 1 and plain SGD every
  // row ends as minus the number of its ids.
  constexpr std::int64_t kIds = 200'000;
  for (const int bits : {8, 20, 22, 23, 24, 25, 26, 27}) {
    SCOPED_TRACE(bits);
    const std::int64_t num_rows = (std::int64_t{1} << bits) - 3;
    const auto on_device = at::TensorOptions().device(at::kCUDA);
    const Tensor weight = at::zeros({num_rows, 1}, on_device).requires_grad_(true);
    TableBatch batch({{"t", weight}}, {{"f", 0}},
                     {.gradients = GradientForm::kFused,
                      .optimizer = {.kind = OptimizerKind::kSgd, .learning_rate = 1.0}});
    LookupInput input;
    input.ids = at::randint(num_rows, {kIds}, on_device.dtype(at::kLong));
    input.ids.narrow(0, 0, 50).fill_(num_rows - 1);
    input.ids.narrow(0, 50, 1000).remainder_(50);
    input.offsets = at::arange(kIds + 1, on_device.dtype(at::kLong));
    batch.pooled(input).backward(at::ones({kIds, 1}, on_device));
    const Tensor wanted = at::zeros({num_rows, 1}, on_device)
                              .index_add_(0, input.ids, -at::ones({kIds, 1}, on_device));
    EXPECT_TRUE(weight.detach().equal(wanted));
  }
}

TEST(TableCuda, IdsOutsideTheirTable) {
  LookupInput input = on_cuda(input_of(4, false));
  input.ids = input.ids.clone();
  input.ids[2] = 12345;
  const Twins fatal;
  std::string text;
  try {
    fatal.on_device->pooled(input);
  } catch (const c10::IndexError& error) {
    text = error.what_without_backtrace();
  }
  EXPECT_NE(text.find("has id 12345, but table 't0' has 300 rows."), std::string::npos) << text;
  const Twins ignoring({.bounds_check = BoundsCheckMode::kIgnore});
  LookupInput zeroed = input;
  zeroed.ids = input.ids.clone();
  zeroed.ids[2] = 0;
  EXPECT_TRUE(ignoring.on_device->pooled(input).equal(ignoring.on_device->pooled(zeroed)));
  zeroed.offsets = at::flip(zeroed.offsets, {0}).contiguous();
  EXPECT_THROW(fatal.on_device->pooled(zeroed), c10::ValueError);
}

}  // namespace
}  // namespace tessera::embedding
