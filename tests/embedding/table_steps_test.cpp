// How a batch of tables steps its rows: every rule against one step in double, fused and unfused,
// rounding, state, learning rates, and ids that were sorted ahead.

#include <cmath>

#include "embedding/table_batches.h"
#include "support/error_text.h"

namespace tessera::embedding {
namespace {

using at::Tensor;
using tessera::testing::error_text;
using tessera::testing::expect_close;
using tessera::testing::Fixture;
using tessera::testing::kEveryOptimizer;
using tessera::testing::longs;
using tessera::testing::Threads;

// One step of every rule in double, for tables whose every gradient is known.
struct Judge {
  Judge(const OptimizerOptions& options, std::vector<Tensor> weights) : o(options) {
    for (Tensor& weight : weights) {
      w.push_back(weight.to(at::kDouble));
      m.push_back(at::zeros_like(w.back()));
      v.push_back(at::zeros_like(w.back()));
    }
  }
  /// `touched`: rows that were looked up, as a column of 0 and 1.
  void step(std::size_t i, Tensor g, const Tensor& touched) {
    const Tensor before_w = w[i].clone();
    const Tensor before_m = m[i].clone();
    const Tensor before_v = v[i].clone();
    const bool is_layerwise = o.kind == OptimizerKind::kLamb ||
                              o.kind == OptimizerKind::kPartialRowWiseLamb ||
                              o.kind == OptimizerKind::kLarsSgd;
    const bool is_decoupled =
        o.kind == OptimizerKind::kAdamW || o.weight_decay_mode == WeightDecayMode::kDecoupled;
    if (!is_layerwise && is_decoupled) w[i] = w[i] * (1 - o.learning_rate * o.weight_decay);
    if (!is_layerwise && !is_decoupled) g = g + o.weight_decay * w[i];
    const auto row_mean = [](const Tensor& x) { return x.pow(2).mean(1, true).expand_as(x); };
    const auto norm = [](const Tensor& x) { return x.pow(2).sum(1, true).sqrt(); };
    const auto adam = [&](const Tensor& square) {
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * square;
      return m[i] / (1 - std::pow(o.beta1, t)) /
             ((v[i] / (1 - std::pow(o.beta2, t))).sqrt() + o.eps);
    };
    const auto lamb = [&](const Tensor& square) {
      const Tensor u = adam(square) + o.weight_decay * w[i];
      const Tensor ratio = norm(w[i]) / norm(u);
      w[i] = w[i] - o.learning_rate * ratio * u;
    };
    switch (o.kind) {
      case OptimizerKind::kSgd:
        w[i] = w[i] - o.learning_rate * g;
        break;
      case OptimizerKind::kAdagrad:
        m[i] = m[i] + g.pow(2);
        w[i] = w[i] - o.learning_rate * g / (m[i].sqrt() + o.eps);
        break;
      case OptimizerKind::kRowWiseAdagrad:
        m[i] = m[i] + row_mean(g);
        w[i] = w[i] - o.learning_rate * g / (m[i].sqrt() + o.eps);
        break;
      case OptimizerKind::kAdam:
      case OptimizerKind::kAdamW:
        w[i] = w[i] - o.learning_rate * adam(g.pow(2));
        break;
      case OptimizerKind::kPartialRowWiseAdam:
        w[i] = w[i] - o.learning_rate * adam(row_mean(g));
        break;
      case OptimizerKind::kLamb:
        lamb(g.pow(2));
        break;
      case OptimizerKind::kPartialRowWiseLamb:
        lamb(row_mean(g));
        break;
      case OptimizerKind::kLarsSgd: {
        const Tensor rate =
            o.learning_rate * o.eta * norm(w[i]) / (norm(g) + o.weight_decay * norm(w[i]));
        m[i] = o.momentum * m[i] + rate * (g + o.weight_decay * w[i]);
        w[i] = w[i] - m[i];
        break;
      }
    }
    w[i] = at::where(touched, w[i], before_w);
    m[i] = at::where(touched, m[i], before_m);
    v[i] = at::where(touched, v[i], before_v);
  }
  OptimizerOptions o;
  std::vector<Tensor> w, m, v;
  double t = 0;
};

OptimizerOptions options_of(OptimizerKind kind) {
  return {.kind = kind,
          .learning_rate = 0.05,
          .eps = 1e-4,
          .weight_decay = 0.02,
          .weight_decay_mode = WeightDecayMode::kL2,
          .eta = 0.5};
}

TEST(TableBatch, FusedStepsAreExactWithDuplicates) {
  for (const OptimizerKind kind : kEveryOptimizer) {
    for (const auto mode : {WeightDecayMode::kL2, WeightDecayMode::kDecoupled}) {
      SCOPED_TRACE(std::string(name_of(kind)));
      OptimizerOptions options = options_of(kind);
      options.weight_decay_mode = mode;
      Fixture fixture({.gradients = GradientForm::kFused, .optimizer = options});
      const Fixture twin;  // same weights, gradients from LibTorch
      Judge judge(options, fixture.clones());
      for (int step = 0; step < 3; ++step) {
        const LookupInput input = fixture.input(64 + step, step == 1);
        const Tensor grad = at::rand({64 + step, 101}).sub_(0.5);
        for (std::size_t i = 0; i < 3; ++i) {
          twin.tables[i].weight.mutable_grad() = Tensor();
          at::NoGradGuard no_grad;
          twin.tables[i].weight.copy_(judge.w[i]);
        }
        std::vector<Tensor> parts;
        twin.judge(input, &parts);
        at::cat(parts, 1).backward(grad.to(at::kDouble));
        ++judge.t;
        const auto* offset = input.offsets.const_data_ptr<std::int64_t>();
        for (std::size_t i = 0; i < 3; ++i) {
          Tensor touched = at::zeros({fixture.tables[i].weight.size(0)}, at::kBool);
          for (int f = 0; f < 4; ++f) {
            if (fixture.features[f].table != static_cast<std::int64_t>(i)) continue;
            const Tensor ids =
                input.ids.slice(0, offset[f * (64 + step)], offset[(f + 1) * (64 + step)]);
            touched.index_fill_(0, ids, true);
          }
          judge.step(i, twin.tables[i].weight.grad().to(at::kDouble), touched.unsqueeze(1));
        }
        fixture.batch->pooled(input).backward(grad);
        EXPECT_EQ(fixture.batch->optimizer()->num_steps(), step + 1);
        for (std::size_t i = 0; i < 3; ++i) {
          expect_close(fixture.tables[i].weight.detach(), judge.w[i], 3e-5);
          EXPECT_FALSE(fixture.tables[i].weight.grad().defined());
        }
      }
    }
  }
}

TEST(TableBatch, TheNumberOfThreadsChangesNoBit) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    std::vector<std::vector<Tensor>> results;
    for (const int threads : {1, 2, 3, 4}) {
      const Threads guard(threads);
      OptimizerOptions options = options_of(OptimizerKind::kRowWiseAdagrad);
      options.stochastic_rounding = true;
      Fixture fixture({.gradients = GradientForm::kFused, .optimizer = options}, type);
      for (int step = 0; step < 2; ++step) {
        // Enough ids that tables are cut, and one of them has most.
        const LookupInput input = fixture.input(0, true, at::kLong, {50, 700, 20000, 3});
        fixture.batch->pooled(input).pow(2).sum().backward();
      }
      results.push_back(fixture.clones());
      for (const auto& [name, tensor] : fixture.batch->optimizer()->state_dict()) {
        results.back().push_back(tensor.clone());
      }
      for (std::size_t i = 0; i < results.back().size(); ++i) {
        EXPECT_TRUE(results.back()[i].equal(results.front()[i])) << threads << " threads, " << i;
      }
    }
  }
}

// Backward finds some tables sorted, all, or none, or sorted and then overwritten by another call.
TEST(TableBatch, WhatIsPreparedChangesNoBit) {
  constexpr int kAll = 100;
  for (const int threads : {1, 3}) {
    for (const bool is_weighted : {false, true}) {
      const Threads guard(threads);
      OptimizerOptions options = options_of(OptimizerKind::kAdam);
      options.max_gradient = 0.75;  // gradients are gathered first
      const auto steps = [&](int num_prepared, bool is_disturbed) {
        Fixture fixture({.gradients = GradientForm::kFused, .optimizer = options});
        for (const std::int64_t size : {0, 1, 700}) {
          const LookupInput input = fixture.input(0, is_weighted, at::kLong, {size, 50, size, 3});
          const LookupInput other = fixture.input(9, is_weighted);
          const PreparedRows found = fixture.batch->pooled_ahead(input);
          const Tensor rows = fixture.batch->pooled(other);
          int num_calls = 0;
          while (num_calls < num_prepared && found.prepare()) ++num_calls;
          EXPECT_LE(num_calls, 3);
          if (num_prepared == kAll) {
            EXPECT_FALSE(found.prepare());
          }
          if (is_disturbed) rows.pow(2).sum().backward();
          found.rows.pow(2).sum().backward({}, /*retain_graph=*/true);
          found.rows.pow(2).sum().backward();
          if (!is_disturbed) rows.pow(2).sum().backward();
        }
        return fixture.clones();
      };
      for (const bool is_disturbed : {false, true}) {
        const std::vector<Tensor> wanted = steps(0, is_disturbed);
        for (const int num_prepared : {1, 2, kAll}) {
          const std::vector<Tensor> found = steps(num_prepared, is_disturbed);
          for (std::size_t i = 0; i < found.size(); ++i) {
            EXPECT_TRUE(found[i].equal(wanted[i])) << num_prepared << " prepared, table " << i;
          }
        }
      }
    }
  }
}

TEST(TableBatch, FeaturesLeftForLaterGiveTheSameBits) {
  OptimizerOptions options = options_of(OptimizerKind::kAdam);
  for (const bool is_weighted : {false, true}) {
    const auto steps = [&](FeatureRange later, bool is_recorded, std::vector<Tensor>& rows) {
      Fixture fixture({.gradients = GradientForm::kFused, .optimizer = options});
      for (const std::int64_t size : {0, 1, 701}) {
        const at::AutoGradMode mode(is_recorded);
        const LookupInput input = fixture.input(0, is_weighted, at::kLong, {size, 50, size, 3});
        const PreparedRows found = fixture.batch->pooled_ahead(input, later);
        EXPECT_EQ(found.look_up_later != nullptr, later.begin < later.end);
        Tensor whole = found.rows.detach().clone();
        if (found.look_up_later) {
          std::int64_t begin = 0;
          std::int64_t count = 0;
          for (std::int64_t f = 0; f < later.end; ++f) {
            const auto table = static_cast<std::size_t>(fixture.features[f].table);
            const std::int64_t numbers =
                input.batch_sizes[f] * fixture.tables[table].weight.size(1);
            (f < later.begin ? begin : count) += numbers;
          }
          const Tensor output = at::full({count}, 99.0F);
          std::int64_t num_calls = 0;
          while (found.look_up_later(output)) ++num_calls;
          EXPECT_EQ(num_calls, later.end - later.begin);
          EXPECT_FALSE(found.look_up_later(output));
          whole.narrow(0, begin, count).copy_(output);
        }
        rows.push_back(whole);
        if (is_recorded) found.rows.backward(whole);  // a gradient that depends on all rows
      }
      return fixture.clones();
    };
    for (const bool is_recorded : {true, false}) {
      std::vector<Tensor> wanted_rows;
      const std::vector<Tensor> wanted = steps({}, is_recorded, wanted_rows);
      for (const FeatureRange later : {FeatureRange{0, 4}, {0, 1}, {1, 3}, {3, 4}, {2, 2}}) {
        std::vector<Tensor> rows;
        const std::vector<Tensor> found = steps(later, is_recorded, rows);
        for (std::size_t i = 0; i < rows.size(); ++i) {
          EXPECT_TRUE(rows[i].equal(wanted_rows[i])) << later.begin << " to " << later.end;
        }
        for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(wanted[i]));
      }
    }
  }
}

TEST(TableBatch, FeaturesThatCannotBeLeftForLater) {
  Fixture fixture({.gradients = GradientForm::kFused});
  const LookupInput uneven = fixture.input(0, false, at::kLong, {2, 3, 4, 5});
  for (const FeatureRange later : {FeatureRange{-1, 2}, {3, 2}, {0, 5}}) {
    EXPECT_THROW((void)fixture.batch->pooled_ahead(uneven, later), c10::ValueError);
  }
  EXPECT_THROW((void)fixture.batch->pooled_ahead(fixture.input(4), {0, 1}), c10::ValueError);
  const PreparedRows found = fixture.batch->pooled_ahead(uneven, {0, 2});
  EXPECT_THROW((void)found.look_up_later(at::empty({3})), c10::ValueError);
}

TEST(TableBatch, RowsGoWhereTheCallerSays) {
  Fixture fixture({.gradients = GradientForm::kFused});
  const LookupInput uneven = fixture.input(0, false, at::kLong, {2, 0, 701, 5});
  const Tensor wanted = fixture.batch->pooled(uneven).detach();
  Tensor given;
  const RowMemory memory = [&](std::int64_t size) { return given = at::full({size}, 99.0F); };
  const PreparedRows found = fixture.batch->pooled_ahead(uneven, {}, memory);
  EXPECT_EQ(found.rows.const_data_ptr(), given.const_data_ptr());
  EXPECT_TRUE(found.rows.equal(wanted));
  EXPECT_TRUE(found.rows.requires_grad());
  EXPECT_THROW((void)fixture.batch->pooled_ahead(fixture.input(4), {}, memory), c10::ValueError);
}

TEST(TableBatch, GradientsForASinkCanBePrepared) {
  std::vector<std::vector<RowGradient>> found;
  for (const bool is_prepared : {false, true}) {
    Fixture fixture({.gradients = GradientForm::kSparse,
                     .sink = [&](auto gradients) { found.push_back(std::move(gradients)); }});
    const PreparedRows rows = fixture.batch->pooled_ahead(fixture.input(40));
    while (is_prepared && rows.prepare()) {
    }
    rows.rows.pow(2).sum().backward();
  }
  ASSERT_EQ(found.size(), 2U);
  for (std::size_t i = 0; i < found[0].size(); ++i) {
    EXPECT_TRUE(found[0][i].rows.equal(found[1][i].rows));
    EXPECT_TRUE(found[0][i].values.equal(found[1][i].values));
  }
}

TEST(TableBatch, NothingIsPreparedForGradientsThatNobodyTakes) {
  Fixture dense;
  EXPECT_EQ(dense.batch->pooled_ahead(dense.input(4)).prepare, nullptr);
  Fixture fused({.gradients = GradientForm::kFused});
  EXPECT_NE(fused.batch->pooled_ahead(fused.input(4)).prepare, nullptr);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(fused.batch->pooled_ahead(fused.input(4)).prepare, nullptr);
}

TEST(TableBatch, UnfusedPassesAddUpToOneStep) {
  for (const OptimizerKind kind : kEveryOptimizer) {
    SCOPED_TRACE(std::string(name_of(kind)));
    // Two halves and one whole batch: the same gradient, so the same step.
    Fixture halves({.gradients = GradientForm::kSparse});
    Fixture whole({.gradients = GradientForm::kSparse});
    const auto optimizer_of = [&](const Fixture& fixture) {
      std::vector<std::pair<std::string, Tensor>> weights;
      for (const Table& table : fixture.tables) weights.emplace_back(table.name, table.weight);
      return RowOptimizer(weights, options_of(kind));
    };
    RowOptimizer of_halves = optimizer_of(halves);
    RowOptimizer of_whole = optimizer_of(whole);
    for (int step = 0; step < 2; ++step) {
      const LookupInput input = whole.input(40);
      const Tensor grad = at::rand({40, 101});
      whole.batch->pooled(input).backward(grad);
      halves.batch->pooled(input).backward(0.25 * grad);
      halves.batch->pooled(input).backward(0.75 * grad);
      const double norm = of_whole.clip_grad_norm(0.5);
      double wanted = 0;
      for (const Table& table : halves.tables) {
        wanted += table.weight.grad().to_dense().to(at::kDouble).pow(2).sum().item<double>();
      }
      EXPECT_NEAR(norm, std::sqrt(wanted), 1e-4 * norm);
      EXPECT_NEAR(of_halves.clip_grad_norm(0.5), norm, 1e-5 * norm);
      EXPECT_NEAR(of_halves.clip_grad_norm(0.5), 0.5, 1e-6);
      of_whole.step();
      of_halves.step();
      of_whole.zero_grad();
      of_halves.zero_grad();
      for (std::size_t i = 0; i < 3; ++i) {
        expect_close(halves.tables[i].weight.detach(), whole.tables[i].weight.detach(), 1e-5);
        EXPECT_FALSE(whole.tables[i].weight.grad().defined());
      }
    }
  }
}

TEST(TableBatch, FusedAndUnfusedGiveTheSameBits) {
  for (const OptimizerKind kind : kEveryOptimizer) {
    Fixture fused({.gradients = GradientForm::kFused, .optimizer = options_of(kind)});
    Fixture sparse({.gradients = GradientForm::kSparse});
    Fixture dense({.gradients = GradientForm::kDense});
    std::vector<std::pair<std::string, Tensor>> weights;
    for (const Table& table : sparse.tables) weights.emplace_back(table.name, table.weight);
    RowOptimizer optimizer(weights, options_of(kind));
    const LookupInput input = fused.input(30);
    const Tensor grad = at::rand({30, 101});
    fused.batch->pooled(input).backward(grad);
    sparse.batch->pooled(input).backward(grad);
    optimizer.step();
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(fused.tables[i].weight.equal(sparse.tables[i].weight)) << name_of(kind);
    }
    // A dense gradient steps every row.
    weights.clear();
    weights.emplace_back("t0", dense.tables[0].weight);
    RowOptimizer of_dense(weights, {.learning_rate = 0.5});
    const Tensor before = dense.tables[0].weight.detach().clone();
    dense.batch->pooled(input).backward(grad);
    of_dense.clip_grad_value(0.125);
    of_dense.step();
    expect_close(dense.tables[0].weight.detach(),
                 before - 0.5 * dense.tables[0].weight.grad().clamp(-0.125, 0.125), 1e-6);
  }
}

TEST(TableBatch, MaxGradientLimitsWhatComesIn) {
  OptimizerOptions options{.learning_rate = 1.0, .max_gradient = 0.25};
  Fixture fixture({.gradients = GradientForm::kFused, .optimizer = options});
  const Tensor before = fixture.tables[0].weight.detach().clone();
  LookupInput input;
  input.ids = longs({4, 4, 5});
  input.offsets = longs({0, 2, 3, 3, 3, 3, 3, 3, 3});
  Tensor grad = at::zeros({2, 101});
  grad.select(0, 0).slice(0, 0, 3).copy_(at::tensor(std::vector<double>{3.0, -0.125, -9.0}));
  fixture.batch->pooled(input).backward(grad);
  Tensor wanted = before.clone();
  wanted[4] -= 2 * at::tensor(std::vector<double>{0.25, -0.125, -0.25});
  expect_close(fixture.tables[0].weight.detach(), wanted, 1e-6);
}

TEST(TableBatch, TheLearningRateChangesFromTheNextStepOn) {
  Fixture fixture({.gradients = GradientForm::kFused, .optimizer = {.learning_rate = 1.0}});
  const LookupInput input = fixture.input(5);
  fixture.batch->optimizer()->set_learning_rate(0.0);
  const std::vector<Tensor> before = fixture.clones();
  fixture.batch->pooled(input).sum().backward();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(fixture.tables[i].weight.equal(before[i]));
  EXPECT_EQ(fixture.batch->optimizer()->options().learning_rate, 0.0);
}

TEST(TableBatch, StateGoesIntoADictionaryAndBack) {
  const OptimizerOptions options = options_of(OptimizerKind::kPartialRowWiseAdam);
  Fixture first({.gradients = GradientForm::kFused, .optimizer = options});
  Fixture second({.gradients = GradientForm::kFused, .optimizer = options});
  const LookupInput input = first.input(20);
  first.batch->pooled(input).pow(2).sum().backward();
  auto state = first.batch->optimizer()->state_dict();
  EXPECT_EQ(state.size(), 7U);
  EXPECT_EQ(state.at("t2.momentum1").sizes(), at::IntArrayRef({5000, 64}));
  EXPECT_EQ(state.at("t2.momentum2").sizes(), at::IntArrayRef({5000}));
  second.batch->optimizer()->load_state_dict(state);
  for (std::size_t i = 0; i < 3; ++i) {
    at::NoGradGuard no_grad;
    second.tables[i].weight.copy_(first.tables[i].weight);
  }
  first.batch->pooled(input).pow(2).sum().backward();
  second.batch->pooled(input).pow(2).sum().backward();
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(first.tables[i].weight.equal(second.tables[i].weight));
  }
  auto wrong = state;
  wrong.erase("t1.momentum2");
  EXPECT_EQ(error_text([&] { second.batch->optimizer()->load_state_dict(wrong); }),
            "embedding.load_state_dict: 't1.momentum2' is missing.");
  wrong = state;
  wrong["t9.momentum1"] = at::zeros({1});
  EXPECT_EQ(error_text([&] { second.batch->optimizer()->load_state_dict(wrong); }),
            "embedding.load_state_dict: 't9.momentum1' is nothing this optimizer "
            "(PARTIAL_ROWWISE_ADAM) has a state for.");
  wrong = state;
  wrong["t0.momentum2"] = at::zeros({4});
  EXPECT_EQ(error_text([&] { second.batch->optimizer()->load_state_dict(wrong); }),
            "embedding.load_state_dict: 't0.momentum2' has shape [4], it should have [11].");
}

TEST(TableBatch, StochasticRoundingMovesWhatRoundingWouldNot) {
  // Steps of 2^-12 on bfloat16 ones vanish when rounded to nearest.
  for (const bool is_stochastic : {false, true}) {
    Tensor weight = at::ones({4, 64}, at::kBFloat16);
    TableBatch batch(
        {{"t", weight}}, {{"f", 0}},
        {.gradients = GradientForm::kFused,
         .optimizer = {.learning_rate = 0x1p-12, .stochastic_rounding = is_stochastic, .seed = 5}});
    LookupInput input;
    input.ids = longs({0, 1, 2, 3});
    input.offsets = longs({0, 4});
    for (int step = 0; step < 400; ++step) batch.pooled(input).sum().backward();
    const double mean = weight.to(at::kDouble).mean().item<double>();
    if (is_stochastic) {
      EXPECT_NEAR(mean, 1.0 - 400 * 0x1p-12, 0.005);
    } else {
      EXPECT_EQ(mean, 1.0);
    }
  }
}

}  // namespace
}  // namespace tessera::embedding
