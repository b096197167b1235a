// tests/vocab_parallel/linear_cases.h — the fused linear forms, on every device.

#pragma once

#include "tessera/vocab_parallel/linear.h"
#include "tessera/vocab_parallel/log_probabilities.h"
#include "vocab_parallel/samples.h"

namespace tessera::vocab_parallel {
namespace {

class Linear : public Vocab {};

struct LinearInput {
  at::Tensor hidden;  // [3, 5, 24]
  at::Tensor weight;  // [211, 24]
  at::Tensor labels;
};

LinearInput linear_input(at::ScalarType type) {
  at::manual_seed(9);
  LinearInput input{at::randn({3, 5, 24}).to(type), at::randn({211, 24}).to(type) * 0.5,
                    at::randint(211, {3, 5}, at::kLong)};
  input.labels[0][1] = -100;
  input.labels[2][4] = -100;
  return input;
}

TEST_P(Linear, EqualsLogitsAndLossInOneProcess) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const LinearInput input = linear_input(type);
    const at::Tensor weights = at::rand({3, 5}, at::kDouble) + 0.5;
    const PlainOptions plain{.label_smoothing = 0.1, .z_loss = 1e-3};
    const at::Tensor h = input.hidden.to(at::kDouble).requires_grad_(true);
    const at::Tensor w = input.weight.to(at::kDouble).requires_grad_(true);
    const at::Tensor expected = plain_scores(at::matmul(h, w.t()), input.labels, plain).loss;
    const auto gradients = torch::autograd::grad({(expected * weights).sum()}, {h, w});
    const double relative = type == at::kFloat ? 2e-5 : 3e-2;
    const double absolute = type == at::kFloat ? 1e-5 : 2e-2;
    // All rows at a time, then four, then one.
    for (const std::int64_t rows : {100, 4, 1}) {
      on_all_ranks([&](const comm::Group& group) {
        const Columns columns = columns_of(211, group);
        const at::Tensor hidden = input.hidden.to(device()).clone().requires_grad_(true);
        const at::Tensor weight = input.weight.slice(0, columns.start, columns.end)
                                      .to(device())
                                      .clone()
                                      .requires_grad_(true);
        LinearOptions options;
        options.columns = columns;
        options.reduction = Reduction::kNone;
        options.label_smoothing = 0.1;
        options.z_loss = 1e-3;
        options.workspace_bytes = rows * 211 * static_cast<std::int64_t>(hidden.element_size());
        const at::Tensor loss =
            linear_cross_entropy(hidden, weight, input.labels.to(device()), group, options);
        expect_close(expected, loss, relative, absolute, "loss");
        (loss * weights.to(device(), at::kFloat)).sum().backward({}, /*retain_graph=*/true);
        expect_close(gradients[0], hidden.grad(), relative, 2 * absolute, "gradient of hidden");
        expect_close(gradients[1].slice(0, columns.start, columns.end), weight.grad(), relative,
                     2 * absolute, "gradient of weight");
        // A second backward computes the logits again.
        const at::Tensor once = hidden.grad().clone();
        hidden.mutable_grad() = at::Tensor();
        (loss * weights.to(device(), at::kFloat)).sum().backward();
        expect_close(once, hidden.grad(), 1e-6, 1e-6, "second backward");
      });
    }
  }
}

TEST_P(Linear, MeanAndScoresOfTheSamePass) {
  const LinearInput input = linear_input(at::kFloat);
  const at::Tensor logits = at::matmul(input.hidden, input.weight.t());
  const auto plain = plain_scores(logits, input.labels);
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(211, group);
    LinearOptions options;
    options.columns = columns;
    options.workspace_bytes = 4 * 211 * 6;
    const auto scores = linear_cross_entropy_with_scores(
        input.hidden.to(device()), input.weight.slice(0, columns.start, columns.end).to(device()),
        input.labels.to(device()), group, {true, true, true, true}, options);
    expect_close(plain.loss.sum() / 13, scores.loss, 1e-5, 1e-6, "loss");
    expect_close(plain.log_probability, scores.tokens.log_probability, 1e-5, 1e-5, "log p");
    expect_close(plain.entropy, scores.tokens.entropy, 1e-4, 1e-5, "entropy");
    EXPECT_TRUE(at::equal(logits.argmax(-1), scores.tokens.argmax.cpu()));
  });
}

TEST_P(Linear, LogProbabilitiesAtSeveralIds) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor whole = whole_logits({2, 3}, type);
    at::Tensor ids = some_labels({2, 3, 5});
    ids.select(-1, 1).copy_(ids.select(-1, 0));  // the same id twice
    const at::Tensor weights = at::rand({2, 3, 5}, at::kDouble) - 0.3;
    const auto of = [&](const at::Tensor& x) {
      return at::log_softmax(x / 0.7, -1).gather(-1, ids);
    };
    const at::Tensor gradient =
        plain_gradient(whole, [&](const at::Tensor& x) { return (of(x) * weights).sum(); });
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(kVocab, group);
      const at::Tensor logits = shard_of(whole, columns, device());
      TokenOptions options;
      options.columns = columns;
      options.temperature = 0.7;
      const at::Tensor log_p = log_probabilities_at(logits, ids.to(device()), group, options);
      expect_close(of(whole.to(at::kDouble)), log_p, 3e-6, 2e-6, "log p");
      (log_p * weights.to(device(), at::kFloat)).sum().backward();
      expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(),
                   tolerance_of(type) * 2, 1e-6, "gradient");
    });
  }
}

TEST_P(Linear, LogitsAtSeveralIds) {
  const at::Tensor whole = whole_logits({4});
  const at::Tensor ids = some_labels({4, 3});
  const at::Tensor gradient =
      plain_gradient(whole, [&](const at::Tensor& x) { return x.gather(-1, ids).sum(); });
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor logits = shard_of(whole, columns, device());
    TokenOptions options;
    options.columns = columns;
    const at::Tensor values = logits_at(logits, ids.to(device()), group, options);
    EXPECT_TRUE(at::equal(whole.gather(-1, ids), values.detach().cpu()));
    values.sum().backward();
    expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(), 0.0, 0.0,
                 "gradient");
  });
}

TEST_P(Linear, SoftTargets) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor whole = whole_logits({2, 4}, type);
    at::manual_seed(77);
    at::Tensor target = (at::randn({2, 4, kVocab}) * 2).to(type);
    target.slice(-1, 0, 5).fill_(-INFINITY);
    const at::Tensor p = at::softmax(target.to(at::kDouble), -1);
    const at::Tensor weights = at::rand({2, 4}, at::kDouble);
    const auto of = [&](const at::Tensor& x) { return -(p * at::log_softmax(x, -1)).sum(-1); };
    const at::Tensor gradient =
        plain_gradient(whole, [&](const at::Tensor& x) { return (of(x) * weights).sum(); });
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(kVocab, group);
      const at::Tensor logits = shard_of(whole, columns, device());
      TokenOptions options;
      options.columns = columns;
      const at::Tensor loss =
          soft_cross_entropy(logits, shard_of(target, columns, device()).detach(), group, options);
      expect_close(of(whole.to(at::kDouble)), loss, 5e-6, 1e-6, "loss");
      (loss * weights.to(device(), at::kFloat)).sum().backward();
      expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(),
                   type == at::kFloat ? 1e-4 : 8e-3, 1e-7, "gradient");
    });
  }
}

TEST_P(Linear, LogSoftmaxAndTopK) {
  const at::Tensor whole = whole_logits({3, 2}, at::kFloat, 40);
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(40, group);
    TokenOptions options;
    options.columns = columns;
    const at::Tensor logits = shard_of(whole, columns, device());
    const at::Tensor log_p = log_softmax(logits, group, options);
    expect_close(at::log_softmax(whole, -1).slice(-1, columns.start, columns.end), log_p, 2e-6,
                 1e-6, "log softmax");
    const auto [values, ids] = top_k(logits, 17, group, options);
    const auto [expected_values, expected_ids] = whole.topk(17, -1);
    EXPECT_TRUE(at::equal(expected_values, values.cpu()));
    EXPECT_TRUE(at::equal(expected_ids, ids.cpu()));
  });
}

}  // namespace
}  // namespace tessera::vocab_parallel
