// The dense part against plain loops, its derivatives against differences.

#include "dlrm/model.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/error_text.h"

namespace tessera::workloads::dlrm {
namespace {

using jagged::KeyedTensor;
using tessera::testing::error_text;

at::Tensor random_tensor(at::IntArrayRef shape, std::uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::TensorOptions(at::kDouble));
}

at::Tensor interaction_by_loop(const at::Tensor& dense, const at::Tensor& embeddings) {
  const std::int64_t dim = dense.size(1);
  const std::int64_t n = embeddings.size(1) / dim;
  at::Tensor out = at::zeros({dense.size(0), dim + n * (n + 1) / 2}, dense.options());
  for (std::int64_t b = 0; b < dense.size(0); ++b) {
    const auto vector = [&](std::int64_t i) {
      return i == 0 ? dense[b] : embeddings[b].narrow(0, (i - 1) * dim, dim);
    };
    out[b].narrow(0, 0, dim).copy_(dense[b]);
    std::int64_t at = dim;
    for (std::int64_t i = 1; i <= n; ++i) {
      for (std::int64_t j = 0; j < i; ++j) out[b][at++] = vector(i).dot(vector(j));
    }
  }
  return out;
}

// The gradient of `value` at `x` against central differences.
template <class Function>
void expect_gradient(const Function& value, const at::Tensor& x) {
  const at::Tensor input = x.detach().clone().requires_grad_(true);
  const at::Tensor exact = torch::autograd::grad({value(input)}, {input})[0];
  constexpr double kStep = 1e-6;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    double ends[2];
    for (const int side : {0, 1}) {
      const at::Tensor moved = x.detach().clone();
      moved.view(-1)[i] += side == 0 ? kStep : -kStep;
      ends[side] = value(moved).template item<double>();
    }
    const double numeric = (ends[0] - ends[1]) / (2 * kStep);
    EXPECT_NEAR(exact.reshape(-1)[i].item<double>(), numeric, 1e-7 * (1 + std::abs(numeric))) << i;
  }
}

TEST(DotInteraction, EqualsALoop) {
  for (const std::int64_t n : {1, 2, 5}) {
    const at::Tensor dense = random_tensor({3, 4}, 1);
    const at::Tensor embeddings = random_tensor({3, n * 4}, 2);
    const at::Tensor expected = interaction_by_loop(dense, embeddings);
    EXPECT_TRUE(at::allclose(dot_interaction(dense, embeddings), expected, 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(dot_interaction_reference(dense, embeddings), expected, 1e-12, 1e-12));
    const at::Tensor single = dot_interaction(dense.to(at::kFloat), embeddings.to(at::kFloat));
    EXPECT_TRUE(at::allclose(single.to(at::kDouble), expected, 1e-5, 1e-5));
  }
}

TEST(DotInteraction, GradientsAreRight) {
  const at::Tensor dense = random_tensor({2, 3}, 3);
  const at::Tensor embeddings = random_tensor({2, 12}, 4);
  const at::Tensor weights = random_tensor({2, 3 + 10}, 5);
  expect_gradient(
      [&](const at::Tensor& x) { return (dot_interaction(x, embeddings) * weights).sum(); }, dense);
  expect_gradient([&](const at::Tensor& x) { return (dot_interaction(dense, x) * weights).sum(); },
                  embeddings);
}

TEST(DotInteraction, GradientsEqualTheReference) {
  at::Tensor dense = random_tensor({64, 32}, 6).to(at::kFloat).requires_grad_(true);
  at::Tensor embeddings = random_tensor({64, 26 * 32}, 7).to(at::kFloat).requires_grad_(true);
  const at::Tensor weights = random_tensor({64, 32 + 351}, 8).to(at::kFloat);
  const auto ours = torch::autograd::grad({(dot_interaction(dense, embeddings) * weights).sum()},
                                          {dense, embeddings});
  const auto theirs = torch::autograd::grad(
      {(dot_interaction_reference(dense, embeddings) * weights).sum()}, {dense, embeddings});
  for (const int i : {0, 1}) EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-4));
}

TEST(DotInteraction, PartsMayLieInAnotherOrderBesideOthers) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    at::Tensor dense = random_tensor({3, 2}, 16).to(type).requires_grad_(true);
    at::Tensor embeddings = random_tensor({3, 8}, 17).to(type).requires_grad_(true);
    const std::vector<std::int64_t> order = {3, 0, 2};
    const at::Tensor weights = random_tensor({3, 2 + 6}, 18).to(type);
    std::vector<at::Tensor> parts;
    for (const std::int64_t part : order) parts.push_back(embeddings.narrow(1, 2 * part, 2));
    const at::Tensor expected = dot_interaction_reference(dense, at::cat(parts, 1));
    const at::Tensor out = dot_interaction(dense, embeddings, order);
    EXPECT_TRUE(at::allclose(out, expected, 1e-5, 1e-6));
    const auto ours = torch::autograd::grad({(out * weights).sum()}, {dense, embeddings});
    const auto theirs = torch::autograd::grad({(expected * weights).sum()}, {dense, embeddings});
    for (const int i : {0, 1}) EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-6));
  }
}

TEST(DotInteraction, EmptyBatchIsFine) {
  at::Tensor dense = at::zeros({0, 4}).requires_grad_(true);
  const at::Tensor out = dot_interaction(dense, at::zeros({0, 8}));
  EXPECT_EQ(out.sizes(), (std::vector<std::int64_t>{0, 7}));
  out.sum().backward();
  EXPECT_EQ(dense.grad().sizes(), dense.sizes());
}

TEST(DotInteraction, KeepsTheTypesOfItsInputs) {
  at::Tensor dense = random_tensor({4, 8}, 9).to(at::kBFloat16).requires_grad_(true);
  at::Tensor embeddings = random_tensor({4, 16}, 10).to(at::kFloat).requires_grad_(true);
  const at::Tensor out = dot_interaction(dense, embeddings);
  const at::Tensor expected =
      interaction_by_loop(dense.detach().to(at::kDouble), embeddings.detach().to(at::kDouble));
  EXPECT_TRUE(at::allclose(out.to(at::kDouble), expected, 1e-5, 1e-5));
  out.sum().backward();
  EXPECT_EQ(dense.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(embeddings.grad().scalar_type(), at::kFloat);
}

TEST(DotInteraction, RefusesShapesThatDoNotFit) {
  EXPECT_EQ(error_text([] { (void)dot_interaction(at::zeros({2, 4}), at::zeros({2, 6})); }),
            "dot_interaction: dense has shape [2, 4] and the embeddings [2, 6]; they must be "
            "[batch, dim] and [batch, n * dim].");
  const auto with_order = [](const std::vector<std::int64_t>& order) {
    return error_text([&] { (void)dot_interaction(at::zeros({2, 4}), at::zeros({2, 8}), order); });
  };
  EXPECT_EQ(
      with_order({1, 1}),
      "dot_interaction: the order names part 1 of 2, which is not there or was named before.");
  EXPECT_EQ(
      with_order({0, 2}),
      "dot_interaction: the order names part 2 of 2, which is not there or was named before.");
}

TEST(LowRankCross, EqualsItsFormula) {
  LowRankCross cross(6, 2, 2);
  cross.to(at::kDouble);
  const auto named = cross.named_parameters();
  const at::Tensor x0 = random_tensor({3, 6}, 11);
  at::Tensor x = x0;
  for (const std::string layer : {"0", "1"}) {
    const at::Tensor low = x.matmul(named["down_" + layer + ".weight"].t());
    x = x0 * (low.matmul(named["up_" + layer + ".weight"].t()) + named["up_" + layer + ".bias"]) +
        x;
  }
  EXPECT_TRUE(at::allclose(cross.forward(x0), x, 1e-12, 1e-12));
  const at::Tensor weights = random_tensor({3, 6}, 12);
  expect_gradient([&](const at::Tensor& y) { return (cross.forward(y) * weights).sum(); }, x0);
}

DlrmOptions small_options(Interaction interaction) {
  DlrmOptions options;
  options.num_dense = 3;
  options.features = {"a", "b"};
  options.embedding_dim = 4;
  options.bottom = {5, 4};
  options.top = {6, 1};
  options.interaction = interaction;
  options.cross_layers = 2;
  options.cross_rank = 3;
  return options;
}

at::Tensor perceptron_by_hand(const Dlrm& model, const std::string& part, at::Tensor x,
                              bool relu_at_end) {
  const auto named = model.named_parameters();
  for (const std::string layer : {"0", "1"}) {
    x = x.matmul(named[part + ".layer_" + layer + ".weight"].t()) +
        named[part + ".layer_" + layer + ".bias"];
    if (layer == "0" || relu_at_end) x = x.clamp_min(0);
  }
  return x;
}

TEST(Dlrm, EqualsItsParts) {
  for (const auto interaction : {Interaction::kDot, Interaction::kCross}) {
    Dlrm model(small_options(interaction));
    model.to(at::kDouble);
    const at::Tensor dense = random_tensor({5, 3}, 13);
    const at::Tensor rows = random_tensor({5, 8}, 14);
    const at::Tensor first = perceptron_by_hand(model, "bottom", dense, true);
    at::Tensor mixed;
    if (interaction == Interaction::kDot) {
      mixed = interaction_by_loop(first.detach(), rows);
    } else {
      const at::Tensor x0 = at::cat({first, rows}, 1);
      mixed = x0;
      const auto named = model.named_parameters();
      for (const std::string layer : {"0", "1"}) {
        const at::Tensor low = mixed.matmul(named["cross.down_" + layer + ".weight"].t());
        mixed = x0 * (low.matmul(named["cross.up_" + layer + ".weight"].t()) +
                      named["cross.up_" + layer + ".bias"]) +
                mixed;
      }
    }
    const at::Tensor expected = perceptron_by_hand(model, "top", mixed, false).squeeze(1);
    const at::Tensor logits = model.forward(dense, KeyedTensor({"a", "b"}, {4, 4}, rows));
    ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{5}));
    EXPECT_TRUE(at::allclose(logits, expected, 1e-11, 1e-11));
    // Features in another order, and one the model does not know.
    const KeyedTensor other(
        {"b", "x", "a"}, {4, 4, 4},
        at::cat({rows.narrow(1, 4, 4), random_tensor({5, 4}, 15), rows.narrow(1, 0, 4)}, 1));
    EXPECT_TRUE(at::allclose(model.forward(dense, other), expected, 1e-11, 1e-11));
  }
}

TEST(Dlrm, TablesOfOtherWidthsPassALayerOfTheirOwn) {
  for (const auto interaction : {Interaction::kDot, Interaction::kCross}) {
    auto options = small_options(interaction);
    options.dims = {4, 3};
    Dlrm model(options);
    model.to(at::kDouble);
    const auto layer = model.named_parameters()["projection_1.weight"];
    ASSERT_EQ(layer.sizes(), (std::vector<std::int64_t>{4, 3}));
    const at::Tensor dense = random_tensor({5, 3}, 13);
    const at::Tensor a = random_tensor({5, 4}, 14);
    const at::Tensor b = random_tensor({5, 3}, 15);
    Dlrm plain(small_options(interaction));
    plain.to(at::kDouble);
    for (const auto& one : plain.named_parameters()) {
      const torch::NoGradGuard no_grad;
      one.value().copy_(model.named_parameters()[one.key()]);
    }
    const at::Tensor expected =
        plain.forward(dense, KeyedTensor({"a", "b"}, {4, 4}, at::cat({a, b.matmul(layer.t())}, 1)));
    const at::Tensor logits =
        model.forward(dense, KeyedTensor({"b", "a"}, {3, 4}, at::cat({b, a}, 1)));
    EXPECT_TRUE(at::allclose(logits, expected, 1e-11, 1e-11));
    logits.sum().backward();
    EXPECT_GT(layer.grad().abs().sum().item<double>(), 0);
    EXPECT_EQ(error_text([&] {
                model.forward(dense, KeyedTensor({"a", "b"}, {4, 4}, at::cat({a, a}, 1)));
              }),
              "dlrm: feature 'b' has 4 columns; the model takes 3.");
  }
  auto options = small_options(Interaction::kDot);
  options.dims = {4};
  EXPECT_EQ(error_text([&] { Dlrm model(options); }),
            "dlrm: 1 widths of tables were named for 2 features.");
  options.dims = {4, 0};
  EXPECT_EQ(error_text([&] { Dlrm model(options); }),
            "dlrm: the table of feature 'b' has 0 columns.");
}

TEST(Perceptron, WeightsThatWaitGetTheSameBits) {
  for (const bool relu_at_end : {false, true}) {
    for (const std::int64_t batch : {0, 1, 37, 2048}) {
      Perceptron net(383, {128, 64, 1}, relu_at_end);
      const at::Tensor x = random_tensor({batch, 383}, 5).to(at::kFloat);
      std::vector<std::vector<at::Tensor>> found;
      for (const bool is_later : {false, true}) {
        const at::Tensor input = x.clone().requires_grad_(true);
        const at::Tensor out = is_later ? net.weights_later()(input) : net.forward(input);
        net.zero_grad();
        out.pow(2).sum().backward();
        found.push_back({out.detach(), input.grad()});
        for (const at::Tensor& parameter : net.parameters()) {
          found.back().push_back(parameter.grad().clone());
        }
      }
      for (std::size_t i = 0; i < found[0].size(); ++i) {
        EXPECT_TRUE(at::equal(found[0][i], found[1][i])) << batch << " samples, tensor " << i;
      }
    }
  }
}

TEST(Perceptron, TheInputsGradientComesBeforeThoseOfTheWeights) {
  Perceptron net(3, {4, 1}, false);
  std::vector<std::string> order;
  const auto top = net.weights_later();
  const at::Tensor x = at::ones({2, 3}).requires_grad_(true);
  const at::Tensor between = x.mul(2);  // what is recorded in between has its turn before
  x.register_hook([&](const at::Tensor& gradient) {
    order.emplace_back("x");
    return gradient;
  });
  for (const at::Tensor& parameter : net.parameters()) {
    parameter.register_hook([&](const at::Tensor& gradient) {
      order.emplace_back("weight");
      return gradient;
    });
  }
  top(between).sum().backward();
  EXPECT_EQ(order, (std::vector<std::string>{"x", "weight", "weight", "weight", "weight"}));
}

TEST(Perceptron, WeightsThatWaitAreDifferentiableOnce) {
  Perceptron net(3, {4, 1}, false);
  const at::Tensor x = at::ones({2, 3}).requires_grad_(true);
  const at::Tensor out = net.weights_later()(x).sum();
  EXPECT_EQ(error_text([&] { (void)torch::autograd::grad({out}, {x}, {}, true, true); }),
            "dlrm: the gradients of the top layers are not differentiable; call backward without "
            "create_graph.");
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(net.weights_later()(x), net.forward(x)));
}

TEST(Dlrm, OneSeedGivesOneModel) {
  const auto options = small_options(Interaction::kDot);
  Dlrm first(options);
  at::randn({7});  // the global generator plays no part
  Dlrm second(options);
  auto other_options = options;
  other_options.seed = 2;
  Dlrm other(other_options);
  for (std::size_t i = 0; i < first.parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(first.parameters()[i], second.parameters()[i]));
    EXPECT_FALSE(at::equal(first.parameters()[i], other.parameters()[i]));
  }
  // 3*5+5 + 5*4+4, then (4+3)*6+6 + 6*1+1.
  EXPECT_EQ(first.num_parameters(), 44 + 55);
}

TEST(Dlrm, GetsAllGradients) {
  Dlrm model(small_options(Interaction::kCross));
  at::Tensor rows = at::randn({5, 8}).requires_grad_(true);
  model.forward(at::randn({5, 3}), KeyedTensor({"a", "b"}, {4, 4}, rows)).sum().backward();
  for (const auto& parameter : model.named_parameters()) {
    EXPECT_TRUE(parameter.value().grad().defined()) << parameter.key();
  }
  EXPECT_GT(rows.grad().abs().sum().item<double>(), 0);
}

TEST(Dlrm, RefusesWhatDoesNotFit) {
  auto options = small_options(Interaction::kDot);
  options.bottom = {5, 3};
  EXPECT_EQ(error_text([&] { Dlrm model(options); }),
            "dlrm: the last bottom layer has 3 outputs, the embeddings have 4 columns; both must "
            "be equal.");
  options = small_options(Interaction::kDot);
  options.top = {6, 2};
  EXPECT_EQ(error_text([&] { Dlrm model(options); }),
            "dlrm: the last top layer has 2 outputs; it must have 1.");
  options.top = {0, 1};
  EXPECT_EQ(error_text([&] { Dlrm model(options); }), "dlrm: a layer of 0 outputs was asked for.");
  options.features.clear();
  EXPECT_EQ(error_text([&] { Dlrm model(options); }),
            "dlrm: features, bottom and top layers must not be empty.");
  EXPECT_EQ(error_text([&] { LowRankCross cross(6, 0, 2); }),
            "dlrm: 2 cross layers of width 6 and rank 0 were asked for.");
  Dlrm model(small_options(Interaction::kDot));
  const KeyedTensor rows({"a", "b"}, {4, 4}, at::zeros({2, 8}));
  EXPECT_EQ(error_text([&] { model.forward(at::zeros({2, 4}), rows); }),
            "dlrm: dense has shape [2, 4]; it must be [batch, 3].");
  EXPECT_EQ(error_text([&] {
              model.forward(at::zeros({2, 3}), KeyedTensor({"a", "b"}, {4, 5}, at::zeros({2, 9})));
            }),
            "dlrm: feature 'b' has 5 columns; the model takes 4.");
  EXPECT_EQ(error_text([&] {
              model.forward(at::zeros({2, 3}), KeyedTensor({"a", "c"}, {4, 4}, at::zeros({2, 8})));
            }),
            "dlrm: the embeddings have no feature 'b'.");
}

}  // namespace
}  // namespace tessera::workloads::dlrm
