// tests/vocab_parallel/linear_cases.h — the fused linear forms, on every device.

#pragma once

#include "tessera/vocab_parallel/linear.h"
#include "tessera/vocab_parallel/log_probabilities.h"
#include "tessera/vocab_parallel/sampling.h"
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

// A reduced loss of kept logits has its gradient from forward where there is one rank: other
// upstream gradients than 1, and a second backward, must not notice.
TEST_P(Linear, ReducedLossGoesBackTwice) {
  at::manual_seed(11);
  const at::Tensor some_hidden = at::randn({9, 16}) * 0.5;
  const at::Tensor some_weight = at::randn({611, 16}) * 0.5;
  at::Tensor labels = at::randint(611, {9}, at::kLong);
  labels[4] = -100;
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto reduction : {Reduction::kSum, Reduction::kMean}) {
      for (const double upstream : {1.0, 0.375}) {
        const at::Tensor h = some_hidden.to(type).to(at::kDouble).requires_grad_(true);
        const at::Tensor w = some_weight.to(type).to(at::kDouble).requires_grad_(true);
        const PlainOptions plain{.z_loss = 1e-3};
        at::Tensor expected = plain_scores(at::matmul(h, w.t()), labels, plain).loss.sum();
        if (reduction == Reduction::kMean) expected = expected / 8;
        const auto gradients = torch::autograd::grad({expected * upstream}, {h, w});
        const double tolerance = type == at::kFloat ? 1e-5 : type == at::kHalf ? 4e-3 : 2e-2;
        on_all_ranks([&](const comm::Group& group) {
          const Columns columns = columns_of(611, group);
          const at::Tensor hidden = some_hidden.to(device(), type).clone().requires_grad_(true);
          const at::Tensor weight = some_weight.slice(0, columns.start, columns.end)
                                        .to(device(), type)
                                        .clone()
                                        .requires_grad_(true);
          LinearOptions options;
          options.columns = columns;
          options.reduction = reduction;
          options.z_loss = 1e-3;
          const at::Tensor loss =
              linear_cross_entropy(hidden, weight, labels.to(device()), group, options);
          expect_close(expected, loss, tolerance, 1e-6, "loss");
          for (const bool again : {false, true}) {
            hidden.mutable_grad() = weight.mutable_grad() = at::Tensor();
            (loss * upstream).backward({}, /*retain_graph=*/!again);
            const double absolute = tolerance * gradients[1].abs().max().item<double>();
            expect_close(gradients[0], hidden.grad(), tolerance, absolute, "gradient of hidden");
            expect_close(gradients[1].slice(0, columns.start, columns.end), weight.grad(),
                         tolerance, absolute, "gradient of weight");
          }
        });
      }
    }
  }
}

// Ranks need different numbers of parts for their columns, one of them none.
TEST_P(Linear, UnevenShardsInParts) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const LinearInput input = linear_input(type);
    const at::Tensor h = input.hidden.to(at::kDouble).requires_grad_(true);
    const at::Tensor w = input.weight.to(at::kDouble).requires_grad_(true);
    const at::Tensor expected = plain_scores(at::matmul(h, w.t()), input.labels).loss.sum() / 13;
    const auto gradients = torch::autograd::grad({expected}, {h, w});
    const double tolerance = type == at::kFloat ? 1e-5 : 2e-2;
    for (const std::int64_t part : {2, 30, 70, 150}) {
      on_all_ranks([&](const comm::Group& group) {
        // Half of the rest for every rank but the last; the third gets nothing.
        const std::int64_t ends[] = {105, 158, 158, 211};
        const int rank = group.rank();
        const Columns columns{rank == 0 ? 0 : ends[rank - 1],
                              rank + 1 == group.size() ? 211 : ends[rank]};
        const at::Tensor hidden = input.hidden.to(device()).clone().requires_grad_(true);
        const at::Tensor weight = input.weight.slice(0, columns.start, columns.end)
                                      .to(device())
                                      .clone()
                                      .requires_grad_(true);
        LinearOptions options;
        options.columns = columns;
        options.workspace_bytes = part * 13 * static_cast<std::int64_t>(hidden.element_size());
        const at::Tensor loss =
            linear_cross_entropy(hidden, weight, input.labels.to(device()), group, options);
        expect_close(expected, loss, tolerance, tolerance, "loss");
        loss.backward();
        expect_close(gradients[0], hidden.grad(), tolerance, tolerance, "gradient of hidden");
        expect_close(gradients[1].slice(0, columns.start, columns.end), weight.grad(), tolerance,
                     tolerance, "gradient of weight");
      });
    }
  }
}

TEST_P(Linear, NoTokenCounts) {
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(300, group);
    for (const std::int64_t tokens : {0, 3}) {
      const at::Tensor hidden = at::ones({tokens, 8}).to(device()).requires_grad_(true);
      const at::Tensor weight =
          at::ones({columns.end - columns.start, 8}).to(device()).requires_grad_(true);
      const at::Tensor labels = at::full({tokens}, -100, at::kLong).to(device());
      LinearOptions options;
      options.columns = columns;
      const at::Tensor loss = linear_cross_entropy(hidden, weight, labels, group, options);
      EXPECT_EQ(loss.item<double>(), 0.0);
      loss.backward();
      EXPECT_TRUE(at::equal(hidden.grad().cpu(), at::zeros({tokens, 8})));
      EXPECT_TRUE(at::equal(weight.grad().cpu(), at::zeros(weight.sizes())));
    }
  });
}

TEST_P(Linear, MeanAndScoresOfTheSamePass) {
  const LinearInput input = linear_input(at::kFloat);
  const at::Tensor logits = at::matmul(input.hidden, input.weight.t());
  const auto plain = plain_scores(logits, input.labels);
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(211, group);
    LinearOptions options;
    options.columns = columns;
    // In a few parts, and a column at a time.
    for (const std::int64_t bytes : {4 * 211 * 6, 4}) {
      options.workspace_bytes = bytes;
      const auto scores = linear_cross_entropy_with_scores(
          input.hidden.to(device()), input.weight.slice(0, columns.start, columns.end).to(device()),
          input.labels.to(device()), group, {true, true, true, true}, options);
      expect_close(plain.loss.sum() / 13, scores.loss, 1e-5, 1e-6, "loss");
      expect_close(plain.log_probability, scores.tokens.log_probability, 1e-5, 1e-5, "log p");
      expect_close(plain.entropy, scores.tokens.entropy, 1e-4, 1e-5, "entropy");
      EXPECT_TRUE(at::equal(logits.argmax(-1), scores.tokens.argmax.cpu()));
    }
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

// A log-sum-exp rounded to float32 would be off by 0.004 here.
TEST_P(Linear, LogProbabilitiesFarFromZero) {
  for (const double far : {1e5, -1e5}) {
    const at::Tensor whole = at::floor(whole_logits({3}, at::kFloat, 200)) + far;
    const at::Tensor target = whole.flip(-1);
    const at::Tensor ids = some_labels({3, 4}, 200);
    const at::Tensor best = whole.argmax(-1);
    const at::Tensor w = at::rand({4, 3, 200}, at::kDouble);
    const at::Tensor p = at::softmax(target.to(at::kDouble), -1);
    const at::Tensor x = whole.to(at::kDouble).requires_grad_(true);
    const at::Tensor log_p = at::log_softmax(x, -1);
    const at::Tensor kept = x.masked_fill(x < std::get<0>(x.topk(20, -1)).slice(-1, 19), -INFINITY);
    const std::vector<at::Tensor> expected = {
        log_p, log_p.gather(-1, ids), -(p * log_p).sum(-1),
        at::log_softmax(kept, -1).gather(-1, best.unsqueeze(-1)).squeeze(-1)};
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(200, group);
      const at::Tensor logits = shard_of(whole, columns, device());
      SamplingOptions options;
      options.operation = TokenOptions().operation;
      options.columns = columns;
      options.top_k = 20;
      const std::vector<at::Tensor> values = {
          log_softmax(logits, group, options),
          log_probabilities_at(logits, ids.to(device()), group, options),
          soft_cross_entropy(logits, shard_of(target, columns, device()).detach(), group, options),
          sampled_log_probabilities(logits, best.to(device()), group, options)};
      for (std::size_t i = 0; i < values.size(); ++i) {
        const at::Tensor weight =
            expected[i].dim() == 1 ? w[i].select(-1, 0) : w[i].slice(-1, 0, expected[i].size(-1));
        const auto own = [&](const at::Tensor& t) {
          return i == 0 ? t.slice(-1, columns.start, columns.end) : t;
        };
        expect_close(own(expected[i].detach()), values[i], 2e-6, 2e-6, std::to_string(i));
        const at::Tensor gradient =
            torch::autograd::grad({values[i]}, {logits}, {own(weight).to(device(), at::kFloat)})[0];
        const at::Tensor whole_gradient =
            torch::autograd::grad({expected[i]}, {x}, {weight}, /*retain_graph=*/true)[0];
        expect_close(whole_gradient.slice(-1, columns.start, columns.end), gradient, 2e-5, 2e-6,
                     "gradient of " + std::to_string(i));
      }
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
    // More ids than some ranks hold, and most of them impossible: still ids of the vocabulary.
    const at::Tensor masked = whole.masked_fill(whole > -2, -INFINITY);
    const auto [all, all_ids] = top_k(shard_of(masked, columns, device()), 40, group, options);
    EXPECT_TRUE(at::equal(std::get<0>(masked.topk(40, -1)), all.cpu()));
    EXPECT_TRUE(at::equal(std::get<0>(all_ids.cpu().sort(-1))[2][1], at::arange(40)));
  });
}

}  // namespace
}  // namespace tessera::vocab_parallel
