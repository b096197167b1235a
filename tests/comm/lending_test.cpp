#include "comm/lending.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;

using Counts = std::vector<std::int64_t>;

// Uneven, and nothing for some.
std::int64_t count_of(int from, int to) { return (from * 5 + to * 3) % 4 * 1000; }

at::Tensor values_of(int from, int to, int turn) {
  return at::arange(count_of(from, to), at::kFloat) + (100 * from + 10 * to + turn);
}

Counts counts_to(int rank, int size) {
  Counts counts;
  for (int from = 0; from < size; ++from) counts.push_back(count_of(from, rank));
  return counts;
}

std::vector<at::Tensor> inputs_of(const Group& group, int turn, bool is_lendable) {
  std::vector<at::Tensor> inputs;
  for (int to = 0; to < group.size(); ++to) {
    const at::Tensor values = values_of(group.rank(), to, turn);
    at::Tensor input =
        is_lendable ? lendable(values.numel(), at::kFloat, group) : at::empty_like(values);
    inputs.push_back(input.copy_(values));
  }
  return inputs;
}

void expect_values(const std::vector<at::Tensor>& found, const Group& group, int turn) {
  ASSERT_EQ(found.size(), static_cast<std::size_t>(group.size()));
  for (int from = 0; from < group.size(); ++from) {
    if (from == group.rank()) {
      EXPECT_FALSE(found[static_cast<std::size_t>(from)].defined());
      continue;
    }
    EXPECT_TRUE(
        at::equal(found[static_cast<std::size_t>(from)], values_of(from, group.rank(), turn)));
  }
}

class Lending : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Sizes, Lending, ::testing::Values(1, 2, 3, 4));

TEST_P(Lending, WhatComesIsWhatWasLent) {
  run_ranks(
      GetParam(),
      [](const Group& group) {
        ASSERT_TRUE(can_lend(group));
        for (int turn = 0; turn < 20; ++turn) {
          const auto pending = lend_async(inputs_of(group, turn, true),
                                          counts_to(group.rank(), group.size()), group);
          expect_values(pending.wait(), group, turn);
        }
      },
      test_options(Engine::kShm));
}

TEST_P(Lending, WhatIsKeptStaysAsItWas) {
  run_ranks(
      GetParam(),
      [](const Group& group) {
        std::vector<std::vector<at::Tensor>> kept;
        for (int turn = 0; turn < 6; ++turn) {
          kept.push_back(
              lend_async(inputs_of(group, turn, true), counts_to(group.rank(), group.size()), group)
                  .wait());
        }
        for (int turn = 0; turn < 6; ++turn) {
          expect_values(kept[static_cast<std::size_t>(turn)], group, turn);
        }
      },
      test_options(Engine::kShm));
}

TEST_P(Lending, SeveralAtOnceAndCollectivesBetween) {
  run_ranks(
      GetParam(),
      [](const Group& group) {
        const Counts counts = counts_to(group.rank(), group.size());
        const auto first = lend_async(inputs_of(group, 1, true), counts, group);
        const auto sum = all_reduce_async(at::ones({5}), group);
        const auto second = lend_async(inputs_of(group, 2, true), counts, group);
        expect_values(second.wait(), group, 2);
        EXPECT_TRUE(first.is_ready());
        expect_values(first.wait(), group, 1);
        EXPECT_TRUE(at::equal(sum.wait(), at::full({5}, group.size(), at::kFloat)));
      },
      test_options(Engine::kShm));
}

// Memory that the peers do not reach, on one rank or on all.
TEST_P(Lending, OtherMemoryIsCopied) {
  run_ranks(
      GetParam(),
      [](const Group& group) {
        const Counts counts = counts_to(group.rank(), group.size());
        for (int turn = 0; turn < 6; ++turn) {
          const bool is_lendable = turn % 3 != 0 && (turn % 3 == 1 || group.rank() != 0);
          const auto pending = lend_async(inputs_of(group, turn, is_lendable), counts, group);
          expect_values(pending.wait(), group, turn);
        }
      },
      test_options(Engine::kShm));
}

TEST_P(Lending, TheGroupMayGoFirst) {
  std::vector<at::Tensor> kept(static_cast<std::size_t>(GetParam()));
  run_ranks(
      GetParam(),
      [&](const Group& group) {
        const auto found =
            lend_async(inputs_of(group, 3, true), counts_to(group.rank(), group.size()), group)
                .wait();
        const int next = (group.rank() + 1) % group.size();
        kept[static_cast<std::size_t>(group.rank())] = found[static_cast<std::size_t>(next)];
        barrier(group);
      },
      test_options(Engine::kShm));
  for (int rank = 0; rank < GetParam(); ++rank) {
    const int next = (rank + 1) % GetParam();
    if (next == rank) continue;
    EXPECT_TRUE(at::equal(kept[static_cast<std::size_t>(rank)], values_of(next, rank, 3)));
  }
}

TEST(Lending, CountsThatDoNotFitAreTheSameErrorOnAllRanks) {
  const auto errors = run_ranks_collecting(
      3,
      [](const Group& group) {
        Counts counts = counts_to(group.rank(), 3);
        if (group.rank() == 2) counts[1] += 7;
        lend_async(inputs_of(group, 0, true), counts, group).wait();
      },
      test_options(Engine::kShm));
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error),
              "comm.all_to_all #0: rank 1 gives 3000 elements for rank 2, which expects 3007. Give "
              "every rank the same table of sizes.");
  }
}

TEST(Lending, TypesThatDifferAreTheSameErrorOnAllRanks) {
  const auto errors = run_ranks_collecting(
      3,
      [](const Group& group) {
        const auto dtype = group.rank() == 2 ? at::kInt : at::kFloat;  // as wide as each other
        std::vector<at::Tensor> inputs;
        for (int to = 0; to < 3; ++to) inputs.push_back(lendable(1000, dtype, group).zero_());
        lend_async(inputs, Counts(3, 1000), group).wait();
      },
      test_options(Engine::kShm));
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error),
              "comm.all_to_all #0: rank 0 gives elements of Float, rank 2 of Int. Give all ranks "
              "tensors of one type.");
  }
}

TEST(Lending, TypesThatDifferWithinARankAreRefusedBeforeAnythingIsSent) {
  run_ranks(
      2,
      [](const Group& group) {
        const std::vector<at::Tensor> mixed{lendable(10, at::kFloat, group),
                                            lendable(10, at::kInt, group)};
        EXPECT_THROW(lend_async(mixed, Counts(2, 10), group), c10::TypeError);
        barrier(group);
      },
      test_options(Engine::kShm));
}

TEST(Lending, GlooCannot) {
  run_ranks(
      2,
      [](const Group& group) {
        EXPECT_FALSE(can_lend(group));
        EXPECT_EQ(lendable(1000, at::kFloat, group).numel(), 1000);
      },
      test_options(Engine::kGloo));
}

}  // namespace
}  // namespace tessera::comm
