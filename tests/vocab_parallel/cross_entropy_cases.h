// tests/vocab_parallel/cross_entropy_cases.h — cases that hold on every device.
//
// Included by one file per device, which names the worlds.

#pragma once

#include <cmath>
#include <limits>

#include "vocab_parallel/samples.h"

namespace tessera::vocab_parallel {
namespace {

TEST_P(Vocab, LossAndGradientEqualOneProcess) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor whole = whole_logits({3, 5}, type);
    at::Tensor labels = some_labels({3, 5});
    labels[1][2] = -100;
    const at::Tensor mask = labels != -100;
    for (const auto reduction : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
      for (const double smoothing : {0.0, 0.1}) {
        for (const double z_loss : {0.0, 1e-3}) {
          const PlainOptions plain{
              .label_smoothing = smoothing, .z_loss = z_loss, .temperature = 0.8};
          const auto reduced = [&](const at::Tensor& x) {
            const at::Tensor loss = plain_scores(x, labels, plain).loss;
            return reduction == Reduction::kNone  ? loss
                   : reduction == Reduction::kSum ? loss.sum()
                                                  : loss.sum() / mask.sum();
          };
          const at::Tensor weights = at::rand({3, 5}, at::kDouble) + 0.5;
          const auto scalar = [&](const at::Tensor& x) {
            return reduction == Reduction::kNone ? (reduced(x) * weights).sum() : reduced(x) * 0.75;
          };
          const at::Tensor gradient = plain_gradient(whole, scalar);
          on_all_ranks([&](const comm::Group& group) {
            const Columns columns = columns_of(kVocab, group);
            const at::Tensor logits = shard_of(whole, columns, device());
            const at::Tensor before = logits.detach().clone();
            auto options = options_for(columns, reduction);
            options.label_smoothing = smoothing;
            options.z_loss = z_loss;
            options.temperature = 0.8;
            const at::Tensor loss = cross_entropy(logits, labels.to(device()), group, options);
            EXPECT_EQ(loss.scalar_type(), at::kFloat);
            expect_close(reduced(whole), loss, 3e-6, 1e-6, "loss");
            (reduction == Reduction::kNone ? (loss * weights.to(device(), at::kFloat)).sum()
                                           : loss * 0.75)
                .backward();
            expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(),
                         tolerance_of(type), 1e-7, "gradient");
            EXPECT_TRUE(at::equal(before, logits.detach())) << "the logits were written";
          });
        }
      }
    }
  }
}

TEST_P(Vocab, ScoresOfOnePassEqualOneProcess) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor whole = whole_logits({7}, type);
    const at::Tensor labels = some_labels({7});
    const auto plain = plain_scores(whole, labels);
    const at::Tensor w = at::rand({3, 7}, at::kDouble);
    const at::Tensor gradient = plain_gradient(whole, [&](const at::Tensor& x) {
      const auto s = plain_scores(x, labels);
      return (s.log_probability * w[0] + s.log_sum_exp * w[1] + s.entropy * w[2]).sum();
    });
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(kVocab, group);
      const at::Tensor logits = shard_of(whole, columns, device());
      TokenOptions options;
      options.columns = columns;
      const TokenScores scores =
          token_scores(logits, labels.to(device()), group, {true, true, true, true}, options);
      expect_close(plain.log_probability, scores.log_probability, 2e-6, 1e-6, "log-probability");
      expect_close(plain.log_sum_exp, scores.log_sum_exp, 2e-6, 1e-6, "log-sum-exp");
      expect_close(plain.entropy, scores.entropy, 1e-5, 1e-5, "entropy");
      EXPECT_TRUE(at::equal(whole.to(at::kFloat).argmax(-1), scores.argmax.cpu()));
      const at::Tensor v = w.to(device(), at::kFloat);
      (scores.log_probability * v[0] + scores.log_sum_exp * v[1] + scores.entropy * v[2])
          .sum()
          .backward();
      expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(),
                   type == at::kFloat ? 2e-5 : 8e-3, 2e-6, "gradient");
    });
  }
}

TEST_P(Vocab, EntropyNeedsNoLabels) {
  const at::Tensor whole = whole_logits({7});
  const at::Tensor labels = some_labels({7});
  const at::Tensor gradient = plain_gradient(
      whole, [&](const at::Tensor& x) { return plain_scores(x, labels).entropy.sum(); });
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor logits = shard_of(whole, columns, device());
    TokenOptions options;
    options.columns = columns;
    const TokenScores scores = token_scores(logits, {}, group, {.entropy = true}, options);
    expect_close(plain_scores(whole, labels).entropy, scores.entropy, 1e-5, 1e-5, "entropy");
    scores.entropy.sum().backward();
    expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(), 2e-5, 2e-6,
                 "gradient");
  });
}

TEST_P(Vocab, AllRanksGetTheSameBits) {
  const at::Tensor whole = whole_logits({9});
  const at::Tensor labels = some_labels({9});
  std::vector<at::Tensor> losses(size());
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    auto options = options_for(columns, Reduction::kNone);
    options.label_smoothing = 0.2;
    losses[group.rank()] =
        cross_entropy(shard_of(whole, columns, device()), labels.to(device()), group, options)
            .detach()
            .cpu();
  });
  for (int rank = 1; rank < size(); ++rank) EXPECT_TRUE(at::equal(losses[0], losses[rank]));
}

TEST_P(Vocab, EverythingIgnoredGivesZeroAndZeroGradient) {
  const at::Tensor whole = whole_logits({4});
  for (const auto reduction : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(kVocab, group);
      const at::Tensor logits = shard_of(whole, columns, device());
      const at::Tensor labels = at::full({4}, -100, at::kLong).to(device());
      const at::Tensor loss = cross_entropy(logits, labels, group, options_for(columns, reduction));
      EXPECT_TRUE(at::equal(loss.detach(), at::zeros_like(loss)));
      loss.sum().backward();
      EXPECT_TRUE(at::equal(logits.grad(), at::zeros_like(logits)));
    });
  }
}

TEST_P(Vocab, IgnoredTokenHasNoGradientEvenIfItsLogitsAreNaN) {
  at::Tensor whole = whole_logits({2});
  whole[1].fill_(std::nan(""));
  const at::Tensor labels = at::tensor({7, -100}, at::kLong);
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor logits = shard_of(whole, columns, device());
    const at::Tensor loss =
        cross_entropy(logits, labels.to(device()), group, options_for(columns, Reduction::kSum));
    EXPECT_TRUE(std::isfinite(loss.item<double>()));
    loss.backward();
    EXPECT_TRUE(at::equal(logits.grad()[1], at::zeros_like(logits.grad()[1])));
    EXPECT_TRUE(at::isfinite(logits.grad()[0]).all().item<bool>());
  });
}

TEST_P(Vocab, ShardOfMinusInfinityIsHarmless) {
  at::Tensor whole = whole_logits({6});
  const double infinity = std::numeric_limits<double>::infinity();
  whole.slice(0, 0, 3).slice(1, 0, 520).fill_(-infinity);       // more than the first rank's part
  whole.slice(0, 3, 6).slice(1, 100, kVocab).fill_(-infinity);  // all of the last rank's
  const at::Tensor labels = at::tensor({600, 700, 1002, 0, 50, 99}, at::kLong);
  const auto plain = plain_scores(whole, labels);
  const at::Tensor gradient = plain_gradient(
      whole, [&](const at::Tensor& x) { return plain_scores(x, labels).loss.sum(); });
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor logits = shard_of(whole, columns, device());
    auto options = options_for(columns, Reduction::kNone);
    const auto result = cross_entropy_with_scores(logits, labels.to(device()), group,
                                                  {false, true, true, true}, options);
    expect_close(plain.loss, result.loss, 3e-6, 1e-6, "loss");
    expect_close(plain.entropy, result.tokens.entropy, 1e-5, 1e-5, "entropy");
    result.loss.sum().backward();
    expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(), 2e-6, 1e-7,
                 "gradient");
  });
}

TEST_P(Vocab, LargeLogitsLoseNothing) {
  at::Tensor whole = at::zeros({3, kVocab});
  whole[0].fill_(1e4);
  whole[0][3] = 1e4 + 2;
  whole[1][900] = 1e4;
  whole[2][17] = -3e4;
  const at::Tensor labels = at::tensor({3, 900, 17}, at::kLong);
  const auto plain = plain_scores(whole, labels);
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const auto loss = cross_entropy(shard_of(whole, columns, device()), labels.to(device()), group,
                                    options_for(columns, Reduction::kNone));
    expect_close(plain.loss, loss, 1e-6, 1e-6, "loss");
  });
}

// Rows long enough for whole batches of every kernel, masked in every way that is in use, and far
// from zero: what a shortcut of the exponential must not lose.
TEST_P(Vocab, ScoresOfMaskedAndFarRows) {
  constexpr std::int64_t kColumns = 20011;
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double lowest = type == at::kHalf ? -65504.0 : -3.3e38;
    const double far = type == at::kHalf ? 3e4 : 3e6;
    const double step = type == at::kFloat ? 1 : type == at::kHalf ? 16 : 16384;
    at::manual_seed(11);
    at::Tensor whole = at::randn({7, kColumns}, at::kFloat) * 2;
    whole[1].slice(0, 0, kColumns, 3).fill_(-std::numeric_limits<float>::infinity());
    whole[2].slice(0, 1, kColumns, 2).fill_(lowest);
    whole[3].slice(0, 0, kColumns - 700).fill_(-std::numeric_limits<float>::infinity());
    whole[4] = at::floor(whole[4] / 2) * step + far;
    whole[5] = at::floor(whole[5] / 2) * step - far;
    whole[6].fill_(lowest);
    whole = whole.to(type);
    const at::Tensor labels = at::full({7}, kColumns - 1, at::kLong);
    const auto plain = plain_scores(whole, labels);
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(kColumns, group);
      TokenOptions options;
      options.columns = columns;
      const TokenScores scores =
          token_scores(shard_of(whole, columns, device()), labels.to(device()), group,
                       {true, true, true, true}, options);
      expect_close(plain.log_probability, scores.log_probability, 2e-6, 1e-6, "log-probability");
      expect_close(plain.log_sum_exp, scores.log_sum_exp, 2e-6, 1e-6, "log-sum-exp");
      expect_close(plain.entropy, scores.entropy, 1e-5, 1e-5, "entropy");
    });
  }
}

// Rounding the probability first would leave nothing of p - 1.
TEST_P(Vocab, ConfidentTokensKeepTheirGradientIn16Bits) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    at::Tensor whole = at::zeros({3, kVocab}, at::kFloat);
    whole.select(1, 500).copy_(at::tensor({13.875, 15.0, 18.0}, at::kFloat));
    whole = whole.to(type);
    const at::Tensor labels = at::full({3}, 500, at::kLong);
    const at::Tensor gradient = plain_gradient(
        whole, [&](const at::Tensor& x) { return plain_scores(x, labels).loss.sum(); });
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(kVocab, group);
      const at::Tensor logits = shard_of(whole, columns, device());
      cross_entropy(logits, labels.to(device()), group, options_for(columns, Reduction::kSum))
          .backward();
      // One rounding of the result, half a unit in its last place; and before it the sum of the
      // exponentials, of which a lane adds up at most 64 in float32, each within 2^-24.
      expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(),
                   type == at::kHalf ? 0x1p-11 : 0x1p-8, 0x1p-18, "gradient");
    });
  }
}

TEST_P(Vocab, NothingIsWrittenWithoutGradients) {
  const at::Tensor whole = whole_logits({4});
  const at::Tensor labels = some_labels({4});
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor logits = shard_of(whole, columns, device());
    const at::Tensor before = logits.detach().clone();
    const at::NoGradGuard no_grad;
    for (const auto overwrite :
         {Overwrite::kNever, Overwrite::kInBackward, Overwrite::kInForward}) {
      auto options = options_for(columns);
      options.overwrite = overwrite;
      cross_entropy(logits, labels.to(device()), group, options);
      EXPECT_TRUE(at::equal(before, logits));
    }
  });
}

TEST_P(Vocab, SlicesTransposesAndColumnsApartAreReadRight) {
  const at::Tensor whole = whole_logits({4, 6});
  const at::Tensor labels = some_labels({4, 6});
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor local = whole.slice(-1, columns.start, columns.end).to(device()).contiguous();
    const at::Tensor held = labels.to(device());
    const std::vector<std::pair<at::Tensor, at::Tensor>> views = {
        {local.slice(1, 0, 5), held.slice(1, 1, 6)},
        {local.transpose(0, 1), held.transpose(0, 1)},
        {local.slice(1, 0, 6, 2).slice(0, 1, 4), held.slice(1, 0, 6, 2).slice(0, 1, 4)},
        {local.permute({2, 0, 1}).contiguous().permute({1, 2, 0}), held},
        {local.unsqueeze(0).expand({2, 4, 6, columns.size()}),
         held.unsqueeze(0).expand({2, 4, 6})}};
    for (const auto& [view, view_labels] : views) {
      for (const auto overwrite : {Overwrite::kNever, Overwrite::kInBackward}) {
        if (overwrite != Overwrite::kNever && view.dim() == 4) continue;
        auto options = options_for(columns, Reduction::kSum);
        options.overwrite = overwrite;
        const at::Tensor compact = view.contiguous().clone().requires_grad_(true);
        const at::Tensor expected = cross_entropy(compact, view_labels.contiguous(), group,
                                                  options_for(columns, Reduction::kSum));
        expected.backward();
        // The base is fresh, so that overwriting one view does not spoil the next.
        const at::Tensor base = at::empty_strided(view.sizes(), view.strides(), view.options());
        const at::Tensor strided = view.dim() == 4 ? view.detach() : base.copy_(view);
        const at::Tensor logits = strided.detach().requires_grad_(true);
        const at::Tensor loss = cross_entropy(logits, view_labels, group, options);
        expect_close(expected, loss, 1e-6, 0.0, "loss");
        const at::Tensor gradient = torch::autograd::grad({loss}, {logits})[0];
        // On CUDA a row is cut at 16-byte boundaries, so its sum depends on its alignment.
        expect_close(compact.grad(), gradient, device().is_cuda() ? 1e-6 : 0.0, 0.0, "gradient");
      }
    }
  });
}

TEST_P(Vocab, ExpandedUpstreamGradientIsRead) {
  const at::Tensor whole = whole_logits({5});
  const at::Tensor labels = some_labels({5});
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor a = shard_of(whole, columns, device());
    const at::Tensor b = shard_of(whole, columns, device());
    cross_entropy(a, labels.to(device()), group, options_for(columns, Reduction::kNone))
        .sum()
        .backward();
    cross_entropy(b, labels.to(device()), group, options_for(columns, Reduction::kSum)).backward();
    EXPECT_TRUE(at::equal(a.grad(), b.grad()));
  });
}

TEST_P(Vocab, PaddedVocabularyHasNoMassAndNoGradient) {
  const at::Tensor whole = whole_logits({5}, at::kFloat, 1008);
  const at::Tensor labels = some_labels({5}, 1001);
  const at::Tensor real = whole.slice(-1, 0, 1001);
  const PlainOptions plain{.label_smoothing = 0.1};
  const at::Tensor gradient = at::constant_pad_nd(
      plain_gradient(
          real, [&](const at::Tensor& x) { return plain_scores(x, labels, plain).loss.sum(); }),
      {0, 7});
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(1008, group);
    const at::Tensor logits = shard_of(whole, columns, device());
    auto options = options_for(columns, Reduction::kSum);
    options.label_smoothing = 0.1;
    options.vocab_size = 1001;
    const at::Tensor loss = cross_entropy(logits, labels.to(device()), group, options);
    expect_close(plain_scores(real, labels, plain).loss.sum(), loss, 3e-6, 1e-6, "loss");
    loss.backward();
    expect_close(gradient.slice(-1, columns.start, columns.end), logits.grad(), 2e-6, 1e-7,
                 "gradient");
  });
}

TEST_P(Vocab, GradientMayOverwriteTheLogitsInBackward) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor whole = whole_logits({5}, type);
    const at::Tensor labels = some_labels({5});
    on_all_ranks([&](const comm::Group& group) {
      const Columns columns = columns_of(kVocab, group);
      const at::Tensor apart = shard_of(whole, columns, device());
      const at::Tensor over = shard_of(whole, columns, device());
      auto options = options_for(columns);
      cross_entropy(apart, labels.to(device()), group, options).backward();
      options.overwrite = Overwrite::kInBackward;
      const at::Tensor product = over * 1.0;
      const at::Tensor loss = cross_entropy(product, labels.to(device()), group, options);
      EXPECT_TRUE(at::equal(product.detach(), over.detach())) << "written in forward";
      const auto version = product.unsafeGetTensorImpl()->version_counter().current_version();
      loss.backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(at::equal(apart.grad(), over.grad()));
      EXPECT_TRUE(at::equal(apart.grad(), product.detach()));
      EXPECT_GT(product.unsafeGetTensorImpl()->version_counter().current_version(), version);
      try {
        loss.backward();
        ADD_FAILURE() << "a second backward was not refused";
      } catch (const c10::Error& error) {
        EXPECT_STREQ(error.what_without_backtrace(),
                     "vocab.cross_entropy: the logits were overwritten by their gradient in an "
                     "earlier backward. Use Overwrite::kNever to go back twice.");
      }
    });
  }
}

TEST_P(Vocab, GradientMayOverwriteTheLogitsInForward) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t vocab : {1003, 1024, 40000}) {
      const at::Tensor whole = whole_logits({6}, type, vocab);
      at::Tensor labels = some_labels({6}, vocab);
      labels[2] = -100;
      const at::Tensor gradient = plain_gradient(whole, [&](const at::Tensor& x) {
        const auto s = plain_scores(x, labels, {.z_loss = 1e-3});
        return s.loss.sum() / 5;
      });
      on_all_ranks([&](const comm::Group& group) {
        const Columns columns = columns_of(vocab, group);
        const at::Tensor logits = shard_of(whole, columns, device());
        auto options = options_for(columns);
        options.z_loss = 1e-3;
        options.overwrite = Overwrite::kInForward;
        const at::Tensor product = logits * 1.0;
        const at::Tensor loss = cross_entropy(product, labels.to(device()), group, options);
        expect_close(plain_scores(whole, labels, {.z_loss = 1e-3}).loss.sum() / 5, loss, 3e-6, 1e-6,
                     "loss");
        (loss * 0.5).backward();
        expect_close(gradient.slice(-1, columns.start, columns.end) * 0.5, logits.grad(),
                     1.5 * tolerance_of(type), 2e-7, "gradient");
        {
          const at::NoGradGuard no_grad;
          const at::Tensor untouched = shard_of(whole, columns, device());
          const at::Tensor copy = untouched.detach().clone();
          cross_entropy(untouched, labels.to(device()), group, options);
          EXPECT_TRUE(at::equal(copy, untouched.detach())) << "written without need";
        }
      });
    }
  }
}

TEST_P(Vocab, NoTokensAtAll) {
  on_all_ranks([&](const comm::Group& group) {
    const at::Tensor logits =
        at::zeros({0, 10}, at::TensorOptions().device(device())).requires_grad_(true);
    const at::Tensor labels = at::zeros({0}, at::kLong).to(device());
    const at::Tensor loss = cross_entropy(logits, labels, group);
    EXPECT_EQ(loss.item<float>(), 0.0F);
    loss.backward();
    EXPECT_EQ(logits.grad().sizes(), (std::vector<std::int64_t>{0, 10}));
    // One value per token, of no token: it still has a gradient.
    CrossEntropyOptions options;
    options.reduction = Reduction::kNone;
    cross_entropy(logits, labels, group, options).sum().backward();
    token_scores(logits, labels, group, {.log_probability = true}).log_probability.sum().backward();
    // Columns that lie apart are copied in pieces: there are none.
    const at::Tensor apart =
        at::zeros({0, 10, 3}, logits.options()).transpose(1, 2).detach().requires_grad_(true);
    cross_entropy(apart, labels.view({0, 3}), group).backward();
    EXPECT_EQ(apart.grad().sizes(), (std::vector<std::int64_t>{0, 3, 10}));
  });
}

TEST_P(Vocab, ARankMayHoldNoColumns) {
  const at::Tensor whole = whole_logits({5}, at::kFloat, 30);
  const at::Tensor labels = some_labels({5}, 30);
  on_all_ranks([&](const comm::Group& group) {
    // All columns are the last rank's.
    const bool is_last = group.rank() + 1 == group.size();
    const Columns columns = is_last ? Columns{0, 30} : Columns{0, 0};
    const at::Tensor logits = shard_of(whole, columns, device());
    const auto loss =
        cross_entropy(logits, labels.to(device()), group, options_for(columns, Reduction::kSum));
    expect_close(plain_scores(whole, labels).loss.sum(), loss, 3e-6, 1e-6, "loss");
    loss.backward();
    EXPECT_EQ(logits.grad().sizes(), logits.sizes());
  });
}

TEST_P(Vocab, LogProbabilitiesAreBitIdenticalForEveryNumberOfRanks) {
  const std::int64_t vocab = 12 * 96;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor whole = whole_logits({11}, type, vocab);
    const at::Tensor labels = some_labels({11}, vocab);
    at::Tensor expected;
    at::Tensor gradient;
    TokenOptions options;
    options.reproducible_tile = 96;
    tessera::testing::run_ranks(1, [&](const comm::Group& group) {
      const at::Tensor logits = shard_of(whole, {0, vocab}, device());
      const auto scores =
          token_scores(logits, labels.to(device()), group, {.log_probability = true}, options);
      scores.log_probability.sum().backward();
      expected = scores.log_probability.detach();
      gradient = logits.grad();
    });
    on_all_ranks([&](const comm::Group& group) {
      const at::Tensor logits = shard_of(whole, columns_of(vocab, group), device());
      const auto scores =
          token_scores(logits, labels.to(device()), group, {.log_probability = true}, options);
      EXPECT_TRUE(at::equal(expected, scores.log_probability.detach()));
      scores.log_probability.sum().backward();
      const Columns columns = columns_of(vocab, group);
      EXPECT_TRUE(at::equal(gradient.slice(-1, columns.start, columns.end), logits.grad()));
    });
  }
}

TEST_P(Vocab, LabelsAreNeverWritten) {
  const at::Tensor whole = whole_logits({5});
  const at::Tensor copy = some_labels({5}).to(device());
  on_all_ranks([&](const comm::Group& group) {
    const Columns columns = columns_of(kVocab, group);
    const at::Tensor labels = copy.clone();
    const at::Tensor logits = shard_of(whole, columns, device());
    cross_entropy(logits, labels, group, options_for(columns)).backward();
    EXPECT_TRUE(at::equal(copy, labels));
  });
}

}  // namespace
}  // namespace tessera::vocab_parallel
