#include "tessera/graph_parallel/halo.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "graph_parallel/graphs.h"
#include "support/derivatives.h"
#include "support/ranks.h"
#include "support/wrapped_group.h"
#include "tessera/regions/regions.h"

namespace tessera::graph_parallel {
namespace {

using comm::Engine;
using comm::Group;
using regions::Placement;
using tessera::testing::check_derivatives;
using tessera::testing::inner;
using tessera::testing::Objective;
using tessera::testing::random_edges;
using tessera::testing::random_tensor;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;

constexpr std::int64_t kNodes = 7;

struct World {
  Engine engine;
  int size;
};

class Halo : public ::testing::TestWithParam<World> {
 protected:
  void on_all_ranks(const std::function<void(const Group&)>& body) {
    run_ranks(GetParam().size, body, test_options(GetParam().engine));
  }
  int size() const { return GetParam().size; }

  // Scattered owners; the last rank of three and more owns nothing.
  Partition partition() const {
    const int num_owners = size() > 2 ? size() - 1 : size();
    return Partition::from_owners((at::arange(kNodes) * 5).remainder(num_owners), size());
  }
  HaloPlan plan(const Group& group, const HaloOptions& options = {}) const {
    const auto parts = partition();
    return {parts, edges().index_select(1, edges_of_part(edges(), parts, group.rank())), group,
            options};
  }
  static at::Tensor edges() { return random_edges(kNodes, 16, 11); }
};

INSTANTIATE_TEST_SUITE_P(Engines, Halo,
                         ::testing::Values(World{Engine::kShm, 1}, World{Engine::kShm, 2},
                                           World{Engine::kShm, 3}, World{Engine::kShm, 4},
                                           World{Engine::kGloo, 2}, World{Engine::kGloo, 3}),
                         [](const auto& info) {
                           return (info.param.engine == Engine::kShm ? "shm" : "gloo") +
                                  std::to_string(info.param.size);
                         });

using Operator = std::function<at::Tensor(const at::Tensor&, const HaloPlan&)>;
at::Tensor exchange_in_phases(const at::Tensor& owned, const HaloPlan& plan) {
  return halo_exchange_async(owned, plan).finish();
}
at::Tensor accumulate_in_phases(const at::Tensor& halo, const HaloPlan& plan) {
  return halo_accumulate_async(halo, plan).finish();
}

TEST_P(Halo, ExchangeBringsTheRowsOfOthers) {
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group);
    const at::Tensor all = random_tensor({kNodes, 2, 3}, 1);
    const at::Tensor owned = all.index_select(0, mine.partition().nodes_of(group.rank()));
    const at::Tensor expected = all.index_select(0, mine.halo_nodes());
    EXPECT_TRUE(at::equal(halo_exchange(owned, mine), expected));
    EXPECT_TRUE(at::equal(exchange_in_phases(owned, mine), expected));
    EXPECT_TRUE(at::equal(halo_extend(owned.select(1, 0).select(1, 0), mine),
                          all.select(1, 0).select(1, 0).index_select(0, mine.nodes())));
    const at::Tensor ids = mine.partition().nodes_of(group.rank());
    EXPECT_TRUE(at::equal(halo_exchange(ids, mine), mine.halo_nodes()));
  });
}

TEST_P(Halo, PartnersAreTransposes) {
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group);
    const at::Tensor x = random_tensor({mine.num_owned(), 3}, 20 + group.rank());
    const at::Tensor y = random_tensor({mine.num_halo(), 3}, 30 + group.rank());
    const at::Tensor forward = halo_exchange(x, mine);
    const at::Tensor back = halo_accumulate(y, mine);
    EXPECT_NEAR(inner(forward, y, group, Placement::kShared),
                inner(x, back, group, Placement::kShard), 1e-12);
    EXPECT_TRUE(at::equal(accumulate_in_phases(y, mine), back));
  });
}

TEST_P(Halo, DerivativesOfThreeOrders) {
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group);
    const std::vector<std::tuple<const char*, Operator, std::int64_t>> operators = {
        {"exchange", halo_exchange, mine.num_owned()},
        {"accumulate", halo_accumulate, mine.num_halo()},
        {"exchange in phases", exchange_in_phases, mine.num_owned()},
        {"accumulate in phases", accumulate_in_phases, mine.num_halo()}};
    for (const auto& [name, apply, num_rows] : operators) {
      const Objective objective{[&, apply = apply](const at::Tensor& x) {
        const at::Tensor y = apply(x.sin(), mine);
        return (random_tensor(y.sizes(), 40 + group.rank()) * y.sin() * y).sum();
      }};
      const int order = GetParam().engine == Engine::kShm ? 3 : 2;
      check_derivatives(objective, random_tensor({num_rows, 2}, 50 + group.rank()), group, false,
                        order);
      ASSERT_FALSE(::testing::Test::HasFailure()) << name;
    }
  });
}

// Two layers of message passing on one process and on the ranks: energy, forces and a force loss.
struct Answers {
  at::Tensor energy;
  at::Tensor forces;
  at::Tensor loss_gradient;
  at::Tensor third;
};

Answers differentiate(const at::Tensor& positions, const at::Tensor& energy) {
  Answers answers;
  answers.energy = energy;
  answers.forces = torch::autograd::grad({energy}, {positions}, {}, std::nullopt, true)[0];
  answers.loss_gradient =
      torch::autograd::grad({answers.forces.pow(2).sum()}, {positions}, {}, std::nullopt, true)[0];
  answers.third = torch::autograd::grad({answers.loss_gradient.pow(3).sum()}, {positions})[0];
  return answers;
}

at::Tensor messages(const at::Tensor& h, const at::Tensor& p, const at::Tensor& edges,
                    std::int64_t num_targets) {
  const at::Tensor d = p.index_select(0, edges[0]) - p.index_select(0, edges[1]);
  const at::Tensor m = (h.index_select(0, edges[0]) * 0.3 + d.pow(2).sum(1, true) * 0.1).sin();
  return at::zeros({num_targets, h.size(1)}, h.options()).index_add(0, edges[1], m);
}

Answers alone(const at::Tensor& edges) {
  const at::Tensor positions = random_tensor({kNodes, 3}, 60).requires_grad_(true);
  at::Tensor h = positions.sin();
  for (int layer = 0; layer < 2; ++layer) h = h + messages(h, positions, edges, kNodes);
  return differentiate(positions, (h * h).sum());
}

void expect_same(const Answers& a, const Answers& b) {
  const auto close = [](const at::Tensor& x, const at::Tensor& y) {
    const double scale = y.abs().max().item<double>();
    return (x - y).abs().max().item<double>() <= 1e-12 * scale;
  };
  EXPECT_TRUE(close(a.energy, b.energy)) << a.energy << b.energy;
  EXPECT_TRUE(close(a.forces, b.forces)) << a.forces << b.forces;
  EXPECT_TRUE(close(a.loss_gradient, b.loss_gradient));
  EXPECT_TRUE(close(a.third, b.third)) << a.third << b.third;
}

TEST_P(Halo, MessagePassingEqualsOneProcess) {
  const Answers expected = alone(edges());
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group);
    const at::Tensor positions = random_tensor({kNodes, 3}, 60).requires_grad_(true);
    const at::Tensor p = regions::copy(positions, group).index_select(0, mine.nodes());
    at::Tensor h = p.narrow(0, 0, mine.num_owned()).sin();
    for (int layer = 0; layer < 2; ++layer) {
      h = h + messages(halo_extend(h, mine), p, mine.local_edges(), mine.num_owned());
    }
    expect_same(differentiate(positions, regions::reduce((h * h).sum(), group)), expected);
  });
}

TEST_P(Halo, MessagePassingInPhasesEqualsOneProcess) {
  const Answers expected = alone(edges());
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group);
    const at::Tensor interior = mine.local_edges().index_select(1, mine.interior());
    const at::Tensor boundary = mine.local_edges().index_select(1, mine.boundary());
    const at::Tensor positions = random_tensor({kNodes, 3}, 60).requires_grad_(true);
    const at::Tensor p = regions::copy(positions, group).index_select(0, mine.nodes());
    at::Tensor h = p.narrow(0, 0, mine.num_owned()).sin();
    for (int layer = 0; layer < 2; ++layer) {
      PendingRows pending = halo_exchange_async(h, mine);
      const at::Tensor inside = messages(h, p, interior, mine.num_owned());
      const at::Tensor local = at::cat({h, pending.finish()});
      h = h + inside + messages(local, p, boundary, mine.num_owned());
    }
    expect_same(differentiate(positions, regions::reduce((h * h).sum(), group)), expected);
  });
}

TEST_P(Halo, GatheringEqualsOneProcess) {
  const Answers expected = alone(edges());
  on_all_ranks([&](const Group& group) {
    const auto parts = Partition::contiguous(kNodes, size());
    const at::Tensor mine = edges().index_select(1, edges_of_part(edges(), parts, group.rank()));
    const std::int64_t first = parts.offsets()[group.rank()];
    const std::int64_t num_owned = parts.sizes()[group.rank()];
    const at::Tensor positions = random_tensor({kNodes, 3}, 60).requires_grad_(true);
    const at::Tensor p = regions::copy(positions, group);
    at::Tensor h = p.narrow(0, first, num_owned).sin();
    for (int layer = 0; layer < 2; ++layer) {
      const at::Tensor all = regions::gather_shared(h, group, 0, parts.sizes());
      const at::Tensor partial = messages(all, p, mine, kNodes);
      h = h + regions::reduce_scatter(partial, group, 0, parts.sizes());
    }
    expect_same(differentiate(positions, regions::reduce((h * h).sum(), group)), expected);
  });
}

TEST_P(Halo, TrafficIsTheRowsAndNothingElse) {
  on_all_ranks([&](const Group& group) {
    const auto traffic = std::make_shared<tessera::testing::Traffic>();
    const Group counted = tessera::testing::wrapped_group(group, traffic);
    const HaloPlan mine = plan(counted, {.check = false});
    const at::Tensor owned =
        random_tensor({mine.num_owned(), 5}, 2).to(at::kFloat).requires_grad_(true);
    traffic->reset();
    const at::Tensor halo = halo_exchange(owned, mine);
    EXPECT_EQ(traffic->num_calls, 1);
    EXPECT_EQ(traffic->sent_bytes, mine.num_sent() * 5 * 4);
    EXPECT_EQ(traffic->received_bytes, mine.num_halo() * 5 * 4);
    traffic->reset();
    torch::autograd::backward({halo.sum()});
    EXPECT_EQ(traffic->num_calls, 1);
    EXPECT_EQ(traffic->sent_bytes, mine.num_halo() * 5 * 4);
    EXPECT_EQ(traffic->received_bytes, mine.num_sent() * 5 * 4);
  });
}

TEST_P(Halo, AReducedPayloadHalvesTheBytesAndSumsInFull) {
  on_all_ranks([&](const Group& group) {
    const auto traffic = std::make_shared<tessera::testing::Traffic>();
    const Group counted = tessera::testing::wrapped_group(group, traffic);
    const HaloPlan mine = plan(counted, {.payload = at::kBFloat16});
    const at::Tensor all = random_tensor({kNodes, 4}, 3).to(at::kFloat);
    const at::Tensor owned =
        all.index_select(0, mine.partition().nodes_of(group.rank())).requires_grad_(true);
    traffic->reset();
    const at::Tensor halo = halo_exchange(owned, mine);
    EXPECT_EQ(traffic->sent_bytes, mine.num_sent() * 4 * 2);
    EXPECT_EQ(halo.scalar_type(), at::kFloat);
    const at::Tensor exact = all.index_select(0, mine.halo_nodes());
    EXPECT_TRUE(at::equal(halo, exact.to(at::kBFloat16).to(at::kFloat)));
    const at::Tensor grad = torch::autograd::grad({halo.sum()}, {owned})[0];
    const at::Tensor counts = at::bincount(mine.send_index(), {}, mine.num_owned());
    EXPECT_TRUE(at::equal(grad, counts.to(at::kFloat).unsqueeze(1).expand({-1, 4})));
  });
}

TEST_P(Halo, AccumulationIsTheSameBitsEveryTime) {
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group, {.deterministic = true});
    const at::Tensor halo = random_tensor({mine.num_halo(), 9}, 4 + group.rank()).to(at::kFloat);
    const at::Tensor first = halo_accumulate(halo, mine);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(at::equal(halo_accumulate(halo, mine), first));
  });
}

TEST_P(Halo, NothingIsModified) {
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group);
    const at::Tensor owned = random_tensor({mine.num_owned(), 2}, 5).requires_grad_(true);
    const at::Tensor before = owned.detach().clone();
    const at::Tensor halo = halo_exchange(owned, mine);
    const at::Tensor seed = random_tensor(halo.sizes(), 6);
    const at::Tensor seed_before = seed.clone();
    torch::autograd::grad({halo}, {owned}, {seed});
    EXPECT_TRUE(at::equal(owned.detach(), before));
    EXPECT_TRUE(at::equal(seed, seed_before));
  });
}

TEST_P(Halo, AGraphMayBeDifferentiatedTwice) {
  on_all_ranks([&](const Group& group) {
    const HaloPlan mine = plan(group);
    const at::Tensor owned = random_tensor({mine.num_owned(), 2}, 7).requires_grad_(true);
    const at::Tensor value = exchange_in_phases(owned * owned, mine).sum();
    const at::Tensor first = torch::autograd::grad({value}, {owned}, {}, /*retain_graph=*/true)[0];
    const at::Tensor second = torch::autograd::grad({value}, {owned})[0];
    EXPECT_TRUE(at::equal(first, second));
  });
}

TEST_P(Halo, WrongRowsAreNamed) {
  const auto errors = run_ranks_collecting(size(), [&](const Group& group) {
    const HaloPlan mine = plan(group);
    halo_exchange(at::ones({mine.num_owned() + 1, 2}), mine);
  });
  for (int r = 0; r < size(); ++r) {
    const std::int64_t owned = partition().sizes()[r];
    EXPECT_EQ(text_of(errors[r]), "graph.halo_exchange: rank " + std::to_string(r) + " brings " +
                                      std::to_string(owned + 1) + " rows, the plan has " +
                                      std::to_string(owned) + ".");
  }
}

TEST(HaloErrors, PendingRowsAreFinishedOnce) {
  run_ranks(2, [](const Group& group) {
    const HaloPlan plan(Partition::contiguous(2, 2), at::zeros({2, 0}, at::kLong), group);
    PendingRows pending = halo_exchange_async(at::ones({1, 2}), plan);
    (void)pending.finish();
    EXPECT_THROW((void)pending.finish(), c10::ValueError);
  });
}

}  // namespace
}  // namespace tessera::graph_parallel
