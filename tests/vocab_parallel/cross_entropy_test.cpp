#include <algorithm>
#include <thread>

#include "tessera/vocab_parallel/linear.h"
#include "tessera/vocab_parallel/log_probabilities.h"
#include "tessera/vocab_parallel/sampling.h"
#include "vocab_parallel/cross_entropy_cases.h"

namespace tessera::vocab_parallel {
namespace {

using tessera::testing::cpu_worlds;
using tessera::testing::run_ranks;
using tessera::testing::vocab_world_name;

INSTANTIATE_TEST_SUITE_P(Worlds, Vocab, ::testing::ValuesIn(cpu_worlds()), vocab_world_name);

template <typename Exception>
std::string text_thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST_P(Vocab, LabelOutsideTheVocabularyIsNamedOnEveryRank) {
  const at::Tensor whole = whole_logits({2, 3});
  at::Tensor labels = some_labels({2, 3});
  labels[1][2] = kVocab;
  for (const std::string& text : texts_of_all_ranks([&](const comm::Group& group) {
         const Columns columns = columns_of(kVocab, group);
         cross_entropy(shard_of(whole, columns, device()), labels, group, options_for(columns));
       })) {
    EXPECT_EQ(
        text,
        "vocab.cross_entropy: label 1003 at position [1, 2] is outside the vocabulary of 1003 "
        "ids. Use -100 where there is no label.");
  }
}

// Only rank 0 calls, and would wait for ever if it communicated first.
TEST(VocabErrors, LabelOutsideAGivenVocabularyIsFoundBeforeTheExchange) {
  run_ranks(2, [](const comm::Group& group) {
    if (group.rank() != 0) return;
    const at::Tensor logits = at::zeros({2, 7});
    const at::Tensor labels = at::tensor({0, 13}, at::kLong);
    const at::Tensor ids = labels.view({2, 1});
    const auto ending = [&](const std::function<void(const TokenOptions&)>& body) {
      TokenOptions options;
      options.vocab_size = 13;
      const std::string text = text_thrown_by<c10::IndexError>([&] { body(options); });
      return text.substr(std::min(text.find(": "), text.size()));
    };
    const auto given = [](const TokenOptions& from, auto options) {
      options.vocab_size = from.vocab_size;
      return options;
    };
    const std::string label =
        ": label 13 at position [1] is outside the vocabulary of 13 ids. Use -100 where there is "
        "no label.";
    const std::string id =
        ": id 13 at position [1, 0] is outside the vocabulary of 13 ids. Use -100 where there is "
        "no id.";
    EXPECT_EQ(ending([&](const auto& o) { log_probabilities(logits, labels, group, o); }), label);
    EXPECT_EQ(ending([&](const auto& o) {
                cross_entropy(logits, labels, group, given(o, CrossEntropyOptions()));
              }),
              label);
    EXPECT_EQ(ending([&](const auto& o) {
                linear_cross_entropy(at::zeros({2, 3}), at::zeros({7, 3}), labels, group,
                                     given(o, LinearOptions()));
              }),
              label);
    EXPECT_EQ(ending([&](const auto& o) {
                sampled_log_probabilities(logits, labels, group, given(o, SamplingOptions()));
              }),
              label);
    EXPECT_EQ(ending([&](const auto& o) { log_probabilities_at(logits, ids, group, o); }), id);
    EXPECT_EQ(ending([&](const auto& o) { logits_at(logits, ids, group, o); }), id);
  });
}

// With ranks that hold 7 and 8 columns, the label 14 is too large for what rank 0 knows.
TEST(VocabErrors, ColumnsThatDifferAreNamedBeforeALabelOutsideThem) {
  const auto errors = tessera::testing::run_ranks_collecting(2, [](const comm::Group& group) {
    cross_entropy(at::zeros({2, 7 + group.rank()}), at::full({2}, 14, at::kLong), group);
  });
  for (const auto& error : errors) {
    EXPECT_EQ(tessera::testing::text_of(error),
              "vocab.cross_entropy: logits have 7 columns on rank 0 and 8 on rank 1. Pad the "
              "vocabulary, or pass the column ranges.");
  }
}

TEST(VocabErrors, WrongLabelLeavesTheLogitsAsTheyWere) {
  run_ranks(1, [](const comm::Group& group) {
    at::Tensor logits = at::arange(14, at::kFloat).view({2, 7});
    const at::Tensor before = logits.clone();
    logits.requires_grad_(true);
    CrossEntropyOptions options;
    options.overwrite = Overwrite::kInForward;
    EXPECT_THROW(cross_entropy(logits, at::tensor({0, 7}, at::kLong), group, options),
                 c10::IndexError);
    EXPECT_TRUE(at::equal(logits, before));
  });
}

TEST(VocabErrors, ColumnsThatDifferAreRefusedOnEveryRank) {
  const auto errors = tessera::testing::run_ranks_collecting(3, [](const comm::Group& group) {
    const at::Tensor logits = at::zeros({2, group.rank() == 2 ? 8 : 7});
    cross_entropy(logits, at::zeros({2}, at::kLong), group);
  });
  for (const auto& error : errors) {
    EXPECT_EQ(tessera::testing::text_of(error),
              "vocab.cross_entropy: logits have 7 columns on rank 0 and 8 on rank 2. Pad the "
              "vocabulary, or pass the column ranges.");
  }
}

TEST(VocabErrors, RangesThatDoNotJoinAreRefusedOnEveryRank) {
  const auto errors = tessera::testing::run_ranks_collecting(2, [](const comm::Group& group) {
    CrossEntropyOptions options;
    options.columns = group.rank() == 0 ? Columns{0, 7} : Columns{8, 15};
    cross_entropy(at::zeros({2, 7}), at::zeros({2}, at::kLong), group, options);
  });
  for (const auto& error : errors) {
    EXPECT_EQ(
        tessera::testing::text_of(error),
        "vocab.cross_entropy: the columns of rank 1 begin at 8, those of rank 0 end at 7. The "
        "ranges must follow each other in rank order.");
  }
}

TEST(VocabErrors, RangesThatAreNotTheVocabularyAreRefusedOnEveryRank) {
  for (const int size : {1, 2}) {
    for (const bool is_late : {false, true}) {
      const auto errors = tessera::testing::run_ranks_collecting(size, [&](const auto& group) {
        CrossEntropyOptions options;
        const std::int64_t start = 7 * group.rank() + (is_late ? 3 : 0);
        options.columns = Columns{start, start + 7};
        options.vocab_size = 7 * size + (is_late ? 0 : 1);
        cross_entropy(at::zeros({2, 7}), at::full({2}, 5, at::kLong), group, options);
      });
      for (const auto& error : errors) {
        EXPECT_EQ(tessera::testing::text_of(error),
                  is_late
                      ? "vocab.cross_entropy: the columns of rank 0 begin at 3. The first id of "
                        "a vocabulary is 0."
                      : "vocab.cross_entropy: a vocabulary of " + std::to_string(7 * size + 1) +
                            " ids does not fit ranks that hold " + std::to_string(7 * size) + ".");
      }
    }
  }
}

TEST(VocabErrors, WrongArgumentsAreNamed) {
  run_ranks(1, [](const comm::Group& group) {
    const at::Tensor logits = at::zeros({2, 7});
    const at::Tensor labels = at::zeros({2}, at::kLong);
    const auto value = [&](const std::function<void(CrossEntropyOptions&)>& change) {
      CrossEntropyOptions options;
      change(options);
      return text_thrown_by<c10::ValueError>(
          [&] { cross_entropy(logits, labels, group, options); });
    };
    EXPECT_EQ(
        value([](auto& o) { o.temperature = 0; }),
        "vocab.cross_entropy: a temperature of 0 is not possible. It must be greater than 0.");
    EXPECT_EQ(text_thrown_by<c10::ValueError>([&] {
                cross_entropy(logits, labels, group, {.label_smoothing = 1.5, .z_loss = 1e-4});
              }),
              "vocab.cross_entropy: a label smoothing of 1.5 is not possible. It lies between 0 "
              "and 1.");
    EXPECT_EQ(value([](auto& o) {
                o.temperature = -1;
                o.operation = "mine";
              }),
              "mine: a temperature of -1 is not possible. It must be greater than 0.");
    EXPECT_EQ(text_thrown_by<c10::ValueError>(
                  [&] { token_scores(logits, labels, group, {}, {.temperature = 0.0}); }),
              "vocab.token_scores: a temperature of 0 is not possible. It must be greater than 0.");
    EXPECT_EQ(value([](auto& o) { o.columns = Columns{3, 11}; }),
              "vocab.cross_entropy: the column range [3, 11) does not fit logits with 7 columns.");
    EXPECT_EQ(value([](auto& o) { o.vocab_size = 0; }),
              "vocab.cross_entropy: a vocabulary of 0 ids is not possible.");
    EXPECT_EQ(
        value([](auto& o) {
          o.columns = Columns{3, 10};
          o.reproducible_tile = 2;
        }),
        "vocab.cross_entropy: the columns of rank 0 begin at 3, which is not a multiple of the "
        "tile of 2. Choose a tile that divides every rank's first column.");
    EXPECT_EQ(value([](auto& o) {
                o.overwrite = Overwrite::kInForward;
                o.reduction = Reduction::kNone;
              }),
              "vocab.cross_entropy: the gradient can be written in forward only for a loss that is "
              "summed or averaged, without other scores. Use Overwrite::kInBackward.");
    const at::Tensor shared = at::zeros({1, 7}).expand({2, 7}).requires_grad_(true);
    for (const auto overwrite : {Overwrite::kInBackward, Overwrite::kInForward}) {
      CrossEntropyOptions options;
      options.overwrite = overwrite;
      EXPECT_EQ(
          text_thrown_by<c10::ValueError>([&] { cross_entropy(shared, labels, group, options); }),
          "vocab.cross_entropy: logits of strides [0, 1] share memory, so that their "
          "gradients would overwrite each other. Use Overwrite::kNever.");
    }
    EXPECT_EQ(text_thrown_by<c10::ValueError>(
                  [&] { cross_entropy(logits, at::zeros({3}, at::kLong), group); }),
              "vocab.cross_entropy: the labels have shape [3], the logits [2, 7]. The labels need "
              "[2].");
    EXPECT_EQ(text_thrown_by<c10::TypeError>([&] { cross_entropy(logits, at::zeros({2}), group); }),
              "vocab.cross_entropy: labels of type Float are not ids. Use int64 or int32.");
    EXPECT_EQ(text_thrown_by<c10::TypeError>(
                  [&] { cross_entropy(logits.to(at::kDouble), labels, group); }),
              "vocab.cross_entropy: logits of type Double are not supported. Use float32, bfloat16 "
              "or float16.");
    EXPECT_EQ(text_thrown_by<c10::ValueError>(
                  [&] { token_scores(logits, {}, group, {.log_probability = true}); }),
              "vocab.token_scores: log-probabilities need labels.");
  });
}

TEST(VocabErrors, SecondDerivativesAreRefused) {
  run_ranks(1, [](const comm::Group& group) {
    const at::Tensor logits = at::zeros({2, 7}).requires_grad_(true);
    const at::Tensor loss = cross_entropy(logits, at::zeros({2}, at::kLong), group);
    EXPECT_EQ(
        text_thrown_by<c10::Error>([&] {
          torch::autograd::grad({loss}, {logits}, {}, std::nullopt, /*create_graph=*/true);
        }),
        "vocab.cross_entropy: gradients of gradients are not available. Call backward without "
        "create_graph.");
  });
}

// Rows that share their memory: the places of elements pass 2^31, their bytes do not.
TEST(VocabLarge, MoreThanTwoToThe31Elements) {
  run_ranks(1, [](const comm::Group& group) {
    constexpr std::int64_t kRows = 16896;
    constexpr std::int64_t kColumns = 128256;
    static_assert(kRows * kColumns > (std::int64_t{1} << 31));
    at::Tensor row = at::zeros({1, kColumns}, at::kBFloat16);
    row[0][7] = 3.0;
    CrossEntropyOptions options;
    options.reduction = Reduction::kNone;
    const at::Tensor labels = at::full({kRows}, 7, at::kLong);
    const at::Tensor loss = cross_entropy(row.expand({kRows, kColumns}), labels, group, options);
    const double expected = std::log((kColumns - 1) * std::exp(-3.0) + 1.0);
    EXPECT_NEAR(loss.min().item<double>(), expected, 1e-5);
    EXPECT_NEAR(loss.max().item<double>(), expected, 1e-5);
  });
}

TEST(VocabLarge, GradientsReuseMemoryThatIsFree) {
  run_ranks(1, [](const comm::Group& group) {
    const at::Tensor logits = at::randn({2048, 2048}).requires_grad_(true);
    const at::Tensor labels = at::randint(2048, {2048}, at::kLong);
    const auto gradient = [&] {
      return torch::autograd::grad({cross_entropy(logits, labels, group)}, {logits})[0];
    };
    at::Tensor first = gradient();
    const at::Tensor second = gradient();
    EXPECT_NE(first.data_ptr(), second.data_ptr());
    EXPECT_TRUE(at::equal(first, second));
    const void* place = first.data_ptr();
    first = at::Tensor();
    const at::Tensor third = gradient();
    EXPECT_EQ(third.data_ptr(), place);
    EXPECT_TRUE(at::equal(second, third));
    // Threads that allocate and free at the same time.
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < 5; ++k) EXPECT_TRUE(at::equal(gradient(), second));
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(VocabColumns, AreDealtOutEvenly) {
  EXPECT_EQ(columns_of(10, 0, 3).end, 4);
  EXPECT_EQ(columns_of(10, 1, 3).start, 4);
  EXPECT_EQ(columns_of(10, 1, 3).end, 7);
  EXPECT_EQ(columns_of(10, 2, 3).end, 10);
  EXPECT_EQ(columns_of(1, 2, 3).size(), 0);
  EXPECT_EQ(text_thrown_by<c10::ValueError>([] { columns_of(10, 3, 3); }),
            "vocab.columns_of: rank 3 is not in a group of 3.");
}

TEST(VocabWarnings, InputsThatNeedNoGradientMakeNone) {
  run_ranks(1, [](const comm::Group& group) {
    const at::Tensor loss = cross_entropy(at::zeros({2, 7}), at::zeros({2}, at::kLong), group);
    EXPECT_FALSE(loss.requires_grad());
    EXPECT_NEAR(loss.item<double>(), std::log(7.0), 1e-6);
  });
}

}  // namespace
}  // namespace tessera::vocab_parallel
