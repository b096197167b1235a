#include "tessera/regions/regions.h"

#include <gtest/gtest.h>

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/derivatives.h"
#include "support/ranks.h"

namespace tessera::regions {
namespace {

using comm::Engine;
using comm::Group;
using tessera::testing::check_derivatives;
using tessera::testing::inner;
using tessera::testing::Objective;
using tessera::testing::random_tensor;
using tessera::testing::run_ranks;
using tessera::testing::test_options;

struct World {
  Engine engine;
  int size;
};

class Regions : public ::testing::TestWithParam<World> {
 protected:
  void on_all_ranks(const std::function<void(const Group&)>& body) {
    run_ranks(GetParam().size, body, test_options(GetParam().engine));
  }
  int size() const { return GetParam().size; }
};

INSTANTIATE_TEST_SUITE_P(Engines, Regions,
                         ::testing::Values(World{Engine::kShm, 1}, World{Engine::kShm, 2},
                                           World{Engine::kShm, 3}, World{Engine::kShm, 4},
                                           World{Engine::kGloo, 1}, World{Engine::kGloo, 2},
                                           World{Engine::kGloo, 3}, World{Engine::kGloo, 4}),
                         [](const auto& info) {
                           return (info.param.engine == Engine::kShm ? "shm" : "gloo") +
                                  std::to_string(info.param.size);
                         });

// Uneven sizes; the last rank of a larger world owns nothing.
Sizes uneven_sizes(int size) {
  switch (size) {
    case 1:
      return {3};
    case 2:
      return {1, 3};
    case 3:
      return {3, 1, 0};
    default:
      return {2, 1, 3, 0};
  }
}

std::int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

std::int64_t offset_of(const Sizes& sizes, int rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, std::int64_t{0});
}

// One operator with everything a test needs to know about it.
struct Subject {
  const char* name;
  Placement from;
  Placement to;
  std::function<at::Tensor(const at::Tensor&, const Group&, std::int64_t dim, const Sizes&)> apply;
  std::function<at::Tensor(const at::Tensor&, const Group&, std::int64_t dim, const Sizes&)>
      partner;
};

const std::vector<Subject>& subjects() {
  static const auto on_whole = [](auto f) {
    return [f](const at::Tensor& x, const Group& group, std::int64_t, const Sizes&) {
      return f(x, group);
    };
  };
  static const auto on_slices = [](auto f) {
    return [f](const at::Tensor& x, const Group& group, std::int64_t dim, const Sizes& sizes) {
      return f(x, group, dim, sizes);
    };
  };
  using enum Placement;
  static const std::vector<Subject> all{
      {"copy", kReplicated, kShared, on_whole(copy), on_whole(reduce)},
      {"reduce", kPartial, kReplicated, on_whole(reduce), on_whole(copy)},
      {"all_reduce", kPartial, kShared, on_whole(regions::all_reduce),
       on_whole(regions::all_reduce)},
      {"gather", kShard, kReplicated, on_slices(gather), on_slices(scatter)},
      {"scatter", kReplicated, kShard, on_slices(scatter), on_slices(gather)},
      {"gather_shared", kShard, kShared, on_slices(gather_shared), on_slices(reduce_scatter)},
      {"reduce_scatter", kPartial, kShard, on_slices(reduce_scatter), on_slices(gather_shared)},
  };
  return all;
}

// A tensor placed as asked: equal on all ranks if replicated, a slice if a shard.
at::Tensor sample(Placement placement, const Group& group, std::int64_t dim, const Sizes& sizes,
                  std::uint64_t seed) {
  std::vector<std::int64_t> shape{2, 2};
  shape[dim] = placement == Placement::kShard ? sizes[group.rank()] : sum_of(sizes);
  return random_tensor(shape,
                       placement == Placement::kReplicated ? seed : seed * 10 + 1 + group.rank());
}

TEST_P(Regions, ValuesAreExact) {
  const Sizes sizes = uneven_sizes(size());
  on_all_ranks([&](const Group& group) {
    for (const std::int64_t dim : {0, 1, -1, -2}) {
      const std::int64_t place = dim < 0 ? dim + 2 : dim;
      std::vector<at::Tensor> slices, addends;
      for (int r = 0; r < size(); ++r) {
        std::vector<std::int64_t> shape{2, 2};
        shape[place] = sizes[r];
        slices.push_back(random_tensor(shape, 10 + r));
        shape[place] = sum_of(sizes);
        addends.push_back(random_tensor(shape, 20 + r));
      }
      const at::Tensor whole = at::cat(slices, place);
      at::Tensor total = addends[0].clone();
      for (int r = 1; r < size(); ++r) total += addends[r];
      const at::Tensor mine = slices[group.rank()];
      const at::Tensor slice_of_total =
          total.narrow(place, offset_of(sizes, group.rank()), sizes[group.rank()]);
      EXPECT_TRUE(at::equal(gather(mine, group, dim), whole));
      EXPECT_TRUE(at::equal(gather(mine, group, dim, sizes), whole));
      EXPECT_TRUE(at::equal(gather_shared(mine, group, dim), whole));
      EXPECT_TRUE(at::equal(scatter(whole, group, dim, sizes), mine));
      EXPECT_TRUE(at::allclose(regions::reduce_scatter(addends[group.rank()], group, dim, sizes),
                               slice_of_total, 1e-12, 1e-12));
      EXPECT_TRUE(at::allclose(reduce(addends[group.rank()], group), total, 1e-12, 1e-12));
      EXPECT_TRUE(
          at::allclose(regions::all_reduce(addends[group.rank()], group), total, 1e-12, 1e-12));
      EXPECT_TRUE(at::equal(copy(whole, group), whole));
    }
  });
}

TEST_P(Regions, WithoutSizesTheFirstRanksGetOneMore) {
  on_all_ranks([&](const Group& group) {
    for (const std::int64_t extent : {0, 1, size() - 1, size(), size() + 1, 7}) {
      const at::Tensor whole = at::arange(extent, at::kDouble);
      const Sizes sizes = even_sizes(extent, size());
      const at::Tensor mine = scatter(whole, group);
      ASSERT_EQ(mine.size(0), sizes[group.rank()]);
      EXPECT_TRUE(at::equal(gather(mine, group), whole));
      const at::Tensor summed = regions::reduce_scatter(whole, group);
      EXPECT_TRUE(at::equal(summed, mine * size()));
    }
  });
  EXPECT_EQ(even_sizes(10, 4), (Sizes{3, 3, 2, 2}));
}

TEST_P(Regions, EveryTypeCanBeGathered) {
  on_all_ranks([&](const Group& group) {
    for (const auto dtype : {at::kLong, at::kInt, at::kByte, at::kBool, at::kHalf, at::kBFloat16,
                             at::kFloat, at::kComplexDouble}) {
      const at::Tensor mine = at::full({group.rank() + 1, 2}, group.rank() % 2).to(dtype);
      const at::Tensor whole = gather(mine, group);
      EXPECT_EQ(whole.scalar_type(), dtype);
      EXPECT_EQ(whole.size(0), size() * (size() + 1) / 2);
      EXPECT_FALSE(whole.requires_grad());
    }
  });
}

TEST_P(Regions, PartnersAreTransposes) {
  const Sizes sizes = uneven_sizes(size());
  on_all_ranks([&](const Group& group) {
    for (const Subject& subject : subjects()) {
      for (const std::int64_t dim : {0, 1}) {
        const at::Tensor x = sample(subject.from, group, dim, sizes, 3);
        const at::Tensor y = sample(dual_of(subject.to), group, dim, sizes, 4);
        const at::Tensor forward = subject.apply(x, group, dim, sizes);
        const at::Tensor back = subject.partner(y, group, dim, sizes);
        EXPECT_NEAR(inner(forward, y, group, subject.to), inner(x, back, group, subject.from),
                    1e-11)
            << subject.name << " along " << dim;
      }
    }
  });
}

TEST_P(Regions, DerivativesOfThreeOrders) {
  const Sizes sizes = uneven_sizes(size());
  on_all_ranks([&](const Group& group) {
    for (const Subject& subject : subjects()) {
      for (const std::int64_t dim : {0, 1}) {
        const bool has_replicated_output = subject.to == Placement::kReplicated;
        const at::Tensor x = sample(subject.from, group, dim, sizes, 5);
        const Objective objective{[&](const at::Tensor& input) {
                                    const at::Tensor y =
                                        subject.apply(input.sin(), group, dim, sizes);
                                    const at::Tensor weights = random_tensor(
                                        y.sizes(), has_replicated_output ? 8 : 8 + group.rank());
                                    return (weights * y.sin() * y).sum();
                                  },
                                  has_replicated_output};
        // The engines differ in data movement only, so one of them goes to the third order.
        const int order = GetParam().engine == Engine::kShm && dim == 0 ? 3 : 2;
        check_derivatives(objective, x, group, subject.from == Placement::kReplicated, order);
        ASSERT_FALSE(::testing::Test::HasFailure()) << subject.name << " along " << dim;
      }
    }
  });
}

TEST_P(Regions, NothingIsModified) {
  const Sizes sizes = uneven_sizes(size());
  on_all_ranks([&](const Group& group) {
    for (const Subject& subject : subjects()) {
      const at::Tensor x = sample(subject.from, group, 0, sizes, 6).requires_grad_(true);
      const at::Tensor before = x.detach().clone();
      const at::Tensor y = subject.apply(x, group, 0, sizes);
      EXPECT_TRUE(at::equal(x.detach(), before)) << subject.name;
      const at::Tensor seed = random_tensor(y.sizes(), 9);
      const at::Tensor seed_before = seed.clone();
      torch::autograd::grad({y}, {x}, {seed});
      EXPECT_TRUE(at::equal(seed, seed_before)) << subject.name;
    }
  });
}

// The gradient that reaches copy is the one its sibling in the sum gets.
TEST_P(Regions, CopyLeavesTheGradientOfASiblingAlone) {
  on_all_ranks([&](const Group& group) {
    const at::Tensor w = at::ones({3}, at::kDouble).requires_grad_(true);
    const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_(true);
    torch::autograd::backward({(w * 1 + copy(x, group)).sum()});
    EXPECT_TRUE(at::equal(w.grad(), at::ones({3}, at::kDouble)));
    EXPECT_TRUE(at::equal(x.grad(), at::full({3}, double(size()), at::kDouble)));
  });
}

TEST_P(Regions, ReduceTakesALeafAndAStridedTensor) {
  on_all_ranks([&](const Group& group) {
    const at::Tensor leaf = at::arange(6, at::kDouble).view({2, 3}).requires_grad_(true);
    const at::Tensor sum = reduce(leaf.t(), group);
    EXPECT_TRUE(at::equal(sum, leaf.t() * size()));
    torch::autograd::backward({sum.sum()});
    EXPECT_TRUE(at::equal(leaf.grad(), at::ones({2, 3}, at::kDouble)));
  });
}

TEST_P(Regions, AScatteredSliceMayBeWrittenInPlace) {
  on_all_ranks([&](const Group& group) {
    const at::Tensor whole = at::ones({size() + 1, 2}, at::kDouble).requires_grad_(true);
    at::Tensor mine = scatter(whole, group);
    mine.mul_(2);
    torch::autograd::backward({mine.sum()});
    EXPECT_TRUE(at::equal(whole.grad(), at::full({size() + 1, 2}, 2.0, at::kDouble)));
  });
}

TEST_P(Regions, GatherSlicesTheGradientBySizesItSaw) {
  const Sizes sizes = uneven_sizes(size());
  on_all_ranks([&](const Group& group) {
    const at::Tensor mine = at::ones({sizes[group.rank()]}, at::kDouble).requires_grad_(true);
    const at::Tensor whole = gather(mine, group);
    const at::Tensor weights = at::arange(whole.size(0), at::kDouble);
    const at::Tensor grad = torch::autograd::grad({(whole * weights).sum()}, {mine})[0];
    EXPECT_TRUE(
        at::equal(grad, weights.narrow(0, offset_of(sizes, group.rank()), sizes[group.rank()])));
  });
}

// A rank that skipped its work holds a constant; it must still answer in the backward pass.
TEST_P(Regions, ARankWithAConstantTakesPart) {
  on_all_ranks([&](const Group& group) {
    const bool is_constant = size() > 1 && group.rank() == size() - 1;
    const at::Tensor x = at::full({is_constant ? 0 : 2, 2}, 3.0, at::kDouble);
    if (!is_constant) x.requires_grad_(true);
    const at::Tensor whole = gather_shared(x, group);
    EXPECT_TRUE(whole.requires_grad());
    torch::autograd::backward({(whole * whole).sum()});
    if (!is_constant) {
      EXPECT_TRUE(at::equal(x.grad(), at::full({2, 2}, 6.0 * size(), at::kDouble)));
    }
  });
}

TEST_P(Regions, WithoutGradientsThereIsNoGraph) {
  on_all_ranks([&](const Group& group) {
    const at::Tensor x = at::ones({2, 2}).requires_grad_(true);
    const at::NoGradGuard guard;
    EXPECT_FALSE(reduce(x, group).requires_grad());
    EXPECT_FALSE(gather_shared(x, group).requires_grad());
  });
}

// A non-linear function of a reduced energy, differentiated twice: 2 (sum)^2 has the second
// derivative 4 along every pair of addends.
TEST_P(Regions, ReduceKeepsTheCrossTermAtSecondOrder) {
  on_all_ranks([&](const Group& group) {
    const at::Tensor position = at::full({1}, 2.0, at::kDouble).requires_grad_(true);
    const at::Tensor inside = copy(position, group);
    const at::Tensor energy = reduce(inside * inside * (group.rank() + 1), group);
    const double factor = size() * (size() + 1) / 2;  // energy = factor x^2
    const at::Tensor objective = energy * energy;     // factor^2 x^4
    const at::Tensor first =
        torch::autograd::grad({objective}, {position}, {}, std::nullopt, true)[0];
    const at::Tensor second = torch::autograd::grad({first}, {position}, {}, std::nullopt, true)[0];
    const at::Tensor third = torch::autograd::grad({second}, {position})[0];
    EXPECT_NEAR(first.item<double>(), factor * factor * 4 * 8, 1e-9);
    EXPECT_NEAR(second.item<double>(), factor * factor * 12 * 4, 1e-9);
    EXPECT_NEAR(third.item<double>(), factor * factor * 24 * 2, 1e-9);
  });
}

}  // namespace
}  // namespace tessera::regions
