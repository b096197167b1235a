// Every exchange against what one process that sees all ranks' inputs computes, and its gradient
// against autograd on that process.

#include "tessera/sharding/comm_ops.h"

#include <gtest/gtest.h>

#include <functional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"

namespace tessera::sharding {
namespace {

using comm::Codecs;
using comm::Engine;
using comm::Group;
using comm::WireFormat;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;
using Tensors = std::vector<at::Tensor>;

at::Tensor random_tensor(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

struct Case {
  Engine engine;
  int size;
};

class CommOps : public ::testing::TestWithParam<Case> {
 protected:
  int size() const { return GetParam().size; }

  // `whole` maps the inputs of all ranks to the outputs of all ranks, on one process; `mine` is the
  // exchange. `factor` is what gradients are expected to be multiplied by.
  void check(const std::vector<Sizes>& shapes, const std::function<Tensors(const Tensors&)>& whole,
             const std::function<at::Tensor(const at::Tensor&, const Group&)>& mine,
             double factor) {
    run_ranks(
        size(),
        [&](const Group& group) {
          Tensors inputs;
          for (int r = 0; r < size(); ++r) {
            inputs.push_back(random_tensor(shapes[r], r + 1).requires_grad_(true));
          }
          const Tensors expected = whole(inputs);
          at::Tensor loss = at::zeros({}, at::kDouble);
          for (int r = 0; r < size(); ++r) {
            loss = loss + (expected[r] * random_tensor(expected[r].sizes(), 100 + r)).sum();
          }
          loss.backward();

          const int rank = group.rank();
          const at::Tensor input = inputs[rank].detach().clone().requires_grad_(true);
          const at::Tensor output = mine(input, group);
          ASSERT_EQ(output.sizes(), expected[rank].sizes());
          EXPECT_TRUE(at::allclose(output, expected[rank], 1e-12, 1e-12));
          (output * random_tensor(output.sizes(), 100 + rank)).sum().backward();
          EXPECT_TRUE(at::allclose(input.grad(), inputs[rank].grad() * factor, 1e-12, 1e-12));
        },
        test_options(GetParam().engine));
  }

  double divided() const { return 1.0 / size(); }
};

INSTANTIATE_TEST_SUITE_P(Worlds, CommOps,
                         ::testing::Values(Case{Engine::kShm, 1}, Case{Engine::kShm, 2},
                                           Case{Engine::kShm, 3}, Case{Engine::kShm, 4},
                                           Case{Engine::kGloo, 2}, Case{Engine::kGloo, 3}),
                         [](const auto& info) {
                           return std::string(info.param.engine == Engine::kShm ? "shm" : "gloo") +
                                  std::to_string(info.param.size);
                         });

Sizes first(const Sizes& sizes, int count) { return {sizes.begin(), sizes.begin() + count}; }

std::int64_t total(const Sizes& sizes) {
  std::int64_t sum = 0;
  for (const auto size : sizes) sum += size;
  return sum;
}

// Rows of rank r in an input ordered by rank.
at::Tensor rows_of(const at::Tensor& input, const Sizes& rows, int r) {
  return input.split_with_sizes(rows, 0)[r];
}

TEST_P(CommOps, AllToAllPooled) {
  for (const Sizes& batches : {Sizes{3, 3, 3, 3}, Sizes{2, 0, 5, 1}}) {
    for (const Sizes& dims : {Sizes{4, 4, 4, 4}, Sizes{3, 0, 7, 1}}) {
      const Sizes batch = first(batches, size());
      const Sizes dim = first(dims, size());
      std::vector<Sizes> shapes;
      for (int r = 0; r < size(); ++r) shapes.push_back({total(batch), dim[r]});
      check(
          shapes,
          [&](const Tensors& inputs) {
            Tensors outputs;
            for (int r = 0; r < size(); ++r) {
              Tensors columns;
              for (const at::Tensor& input : inputs) columns.push_back(rows_of(input, batch, r));
              outputs.push_back(at::cat(columns, 1));
            }
            return outputs;
          },
          [&](const at::Tensor& input, const Group& group) {
            return alltoall_pooled(input, batch, dim, group).wait();
          },
          divided());
    }
  }
}

TEST_P(CommOps, VariableBatchAllToAllPooled) {
  // Rank r holds r features (rank 0 none) of dims 1, 2, ...; rank s has 1 + (s + f) % 3 samples of
  // feature f, counted over all ranks.
  std::vector<Sizes> dims;
  std::vector<Sizes> global(size());  // global[s][f]
  std::int64_t feature = 0;
  std::vector<std::int64_t> first_feature;
  for (int r = 0; r < size(); ++r) {
    first_feature.push_back(feature);
    dims.emplace_back();
    for (int i = 0; i < (size() == 1 ? 2 : r); ++i, ++feature) {
      dims[r].push_back(1 + feature);
      for (int s = 0; s < size(); ++s) global[s].push_back((s + feature) % 3);
    }
  }
  std::vector<std::vector<Sizes>> batches(size());  // batches[r][s][f of r]
  std::vector<Sizes> shapes;
  for (int r = 0; r < size(); ++r) {
    std::int64_t count = 0;
    for (int s = 0; s < size(); ++s) {
      batches[r].emplace_back();
      for (std::size_t i = 0; i < dims[r].size(); ++i) {
        batches[r][s].push_back(global[s][first_feature[r] + i]);
        count += batches[r][s][i] * dims[r][i];
      }
    }
    shapes.push_back({count});
  }
  check(
      shapes,
      [&](const Tensors& inputs) {
        Tensors outputs;
        for (int s = 0; s < size(); ++s) {
          Tensors parts;
          for (int r = 0; r < size(); ++r) {
            Sizes counts;
            for (int other = 0; other < size(); ++other) {
              std::int64_t count = 0;
              for (std::size_t i = 0; i < dims[r].size(); ++i) {
                count += batches[r][other][i] * dims[r][i];
              }
              counts.push_back(count);
            }
            parts.push_back(rows_of(inputs[r], counts, s));
          }
          outputs.push_back(at::cat(parts));
        }
        return outputs;
      },
      [&](const at::Tensor& input, const Group& group) {
        const int rank = group.rank();
        // A rank without features may leave its batches out.
        const auto mine = dims[rank].empty() ? std::vector<Sizes>{} : batches[rank];
        return variable_batch_alltoall_pooled(input, mine, global[rank], dims, group).wait();
      },
      divided());
}

TEST_P(CommOps, AllToAllSequence) {
  // Every rank holds two features; ids of rank s for feature g of rank r: (r + 2 s + g) % 3 per
  // sample, with 2 samples each.
  constexpr std::int64_t kDim = 3;
  const int world = size();
  const auto length = [](int r, int s, int g, int b) { return (r + 2 * s + g + b) % 3; };
  std::vector<Sizes> shapes;
  std::vector<Sizes> received(world);                     // received[r][s]: ids r got from s
  std::vector<std::vector<std::int64_t>> lengths(world);  // of r: feature, rank, sample
  for (int r = 0; r < world; ++r) {
    received[r].assign(world, 0);
    for (int g = 0; g < 2; ++g) {
      for (int s = 0; s < world; ++s) {
        for (int b = 0; b < 2; ++b) {
          lengths[r].push_back(length(r, s, g, b));
          received[r][s] += lengths[r].back();
        }
      }
    }
    shapes.push_back({total(received[r]), kDim});
  }
  std::vector<std::int64_t> forward;
  std::vector<std::int64_t> backward;
  for (int s = 0; s < world; ++s) {
    for (int g = 0; g < 2; ++g) forward.push_back(g * world + s);
  }
  for (int g = 0; g < 2; ++g) {
    for (int s = 0; s < world; ++s) backward.push_back(s * 2 + g);
  }
  check(
      shapes,
      [&](const Tensors& inputs) {
        Tensors outputs;
        for (int s = 0; s < world; ++s) {
          Tensors parts;
          for (int r = 0; r < world; ++r) {
            const auto segments = inputs[r].split_with_sizes(lengths[r], 0);
            for (int g = 0; g < 2; ++g) {
              for (int b = 0; b < 2; ++b) parts.push_back(segments[(g * world + s) * 2 + b]);
            }
          }
          outputs.push_back(at::cat(parts));
        }
        return outputs;
      },
      [&](const at::Tensor& input, const Group& group) {
        const int rank = group.rank();
        Sizes sent;
        for (int r = 0; r < world; ++r) sent.push_back(received[r][rank]);
        return alltoall_sequence(input, at::tensor(forward), at::tensor(backward),
                                 at::tensor(lengths[rank]).to(at::kInt), sent, received[rank],
                                 group)
            .wait();
      },
      divided());
}

// Segments of no samples: there are no lengths at all, and nothing to send.
TEST_P(CommOps, SequenceOfNoSamples) {
  const int world = size();
  tessera::testing::run_ranks(world, [&](const Group& group) {
    const at::Tensor order = at::arange(2 * world, at::kInt);
    const at::Tensor input = at::empty({0, 3}).requires_grad_(true);
    const Sizes none(world, 0);
    const at::Tensor output =
        alltoall_sequence(input, order, order, at::empty({0}, at::kInt), none, none, group).wait();
    EXPECT_EQ(output.sizes(), at::IntArrayRef({0, 3}));
    output.sum().backward();
    EXPECT_EQ(input.grad().sizes(), at::IntArrayRef({0, 3}));
  });
}

TEST_P(CommOps, AllToAllV) {
  // 5 samples, so the first rank gets one more; two inputs on each rank; no division.
  const Sizes dims = first({3, 2, 5, 4}, size());
  std::vector<Sizes> shapes;
  for (const auto dim : dims) shapes.push_back({5, dim});
  Sizes batch(size(), 5 / size());
  for (int r = 0; r < 5 % size(); ++r) ++batch[r];
  check(
      shapes,
      [&](const Tensors& inputs) {
        Tensors outputs;
        for (int r = 0; r < size(); ++r) {
          Tensors columns;
          for (const at::Tensor& input : inputs) columns.push_back(rows_of(input, batch, r));
          outputs.push_back(at::cat(columns, 1));
        }
        return outputs;
      },
      [&](const at::Tensor& input, const Group& group) {
        const Tensors halves{input.narrow(1, 0, 1), input.narrow(1, 1, input.size(1) - 1)};
        const Tensors parts = alltoallv(halves, dims, group).wait();
        EXPECT_EQ(static_cast<int>(parts.size()), size());
        return at::cat(parts, 1);
      },
      1.0);
}

Tensors summed_rows(const Tensors& inputs, const Sizes& rows) {
  const at::Tensor sum = at::stack(inputs).sum(0);
  return sum.split_with_sizes(rows, 0);
}

TEST_P(CommOps, ReduceScatters) {
  const Sizes rows = first({2, 0, 3, 1}, size());
  const std::vector<Sizes> uneven(size(), {total(rows), 4});
  const auto sum = [&](const Tensors& inputs) { return summed_rows(inputs, rows); };
  check(
      uneven, sum,
      [&](const at::Tensor& input, const Group& group) {
        return reduce_scatter_v_pooled(input, rows, group).wait();
      },
      divided());
  check(
      uneven, sum,
      [&](const at::Tensor& input, const Group& group) {
        return reduce_scatter_pooled(input.split_with_sizes(rows, 0), group).wait();
      },
      divided());
  const Sizes even(size(), 2);
  check(
      std::vector<Sizes>(size(), {2 * size(), 3}),
      [&](const Tensors& inputs) { return summed_rows(inputs, even); },
      [&](const at::Tensor& input, const Group& group) {
        return reduce_scatter_base_pooled(input, group).wait();
      },
      divided());
  // Two features of 3 and 2 values; rank r has r and 2 samples of them.
  std::vector<Sizes> batches;
  Sizes parts;
  for (int r = 0; r < size(); ++r) {
    batches.push_back({r, 2});
    parts.push_back(3 * r + 4);
  }
  check(
      std::vector<Sizes>(size(), {total(parts)}),
      [&](const Tensors& inputs) { return summed_rows(inputs, parts); },
      [&](const at::Tensor& input, const Group& group) {
        return reduce_scatter_v_per_feature_pooled(input, batches, {3, 2}, group).wait();
      },
      divided());
}

TEST_P(CommOps, AllGather) {
  check(
      std::vector<Sizes>(size(), {3, 2}),
      [&](const Tensors& inputs) { return Tensors(size(), at::cat(inputs)); },
      [&](const at::Tensor& input, const Group& group) {
        return all_gather_base_pooled(input, group).wait();
      },
      divided());
}

TEST_P(CommOps, DivisionCanBeTurnedOff) {
  set_gradient_division(false);
  const Sizes even(size(), 2);
  check(
      std::vector<Sizes>(size(), {2 * size(), 3}),
      [&](const Tensors& inputs) { return summed_rows(inputs, even); },
      [&](const at::Tensor& input, const Group& group) {
        return reduce_scatter_base_pooled(input, group).wait();
      },
      1.0);
  set_gradient_division(true);
  EXPECT_TRUE(get_gradient_division());
}

TEST_P(CommOps, ARankWhoseInputNeedsNoGradientTakesPart) {
  run_ranks(
      size(),
      [&](const Group& group) {
        const Sizes batch(size(), 2);
        const Sizes dims(size(), 3);
        const bool needs_gradient = group.rank() != 0;
        const at::Tensor input =
            at::ones({2 * size(), 3}, at::kDouble).requires_grad_(needs_gradient);
        const at::Tensor output = alltoall_pooled(input, batch, dims, group).wait();
        if (size() > 1) output.sum().backward();
        if (size() > 1 && needs_gradient) {
          EXPECT_TRUE(at::allclose(input.grad(), at::full_like(input, divided())));
        }
        // Without grad mode there is no backward pass to take part in.
        const at::NoGradGuard guard;
        EXPECT_FALSE(alltoall_pooled(input, batch, dims, group).wait().requires_grad() &&
                     size() > 1);
      },
      test_options(GetParam().engine));
}

TEST_P(CommOps, CodecsCompressBothWays) {
  const struct {
    WireFormat format;
    double tolerance;
  } formats[] = {{WireFormat::kFp16, 2e-3},
                 {WireFormat::kBf16, 2e-2},
                 {WireFormat::kInt8, 2e-2},
                 {WireFormat::kFp8, 0.3}};
  for (const auto& [format, tolerance] : formats) {
    const comm::Codec codec(comm::CodecOptions{.format = format, .row_size = 4});
    run_ranks(
        size(),
        [&, format = format, tolerance = tolerance](const Group& group) {
          const Sizes batch = first({2, 1, 0, 3}, size());
          const Sizes dims = first({3, 5, 1, 2}, size());
          const at::Tensor values =
              random_tensor({total(batch), dims[group.rank()]}, 7 + group.rank());
          const at::Tensor plain = values.clone().requires_grad_(true);
          const at::Tensor packed = values.clone().requires_grad_(true);
          const at::Tensor expected = alltoall_pooled(plain, batch, dims, group).wait();
          const at::Tensor output =
              alltoall_pooled(packed, batch, dims, group, Codecs{codec, codec}).wait();
          EXPECT_TRUE(at::allclose(output, expected, 0, tolerance));
          const at::Tensor weights = random_tensor(expected.sizes(), 50);
          (expected * weights).sum().backward();
          (output * weights).sum().backward();
          EXPECT_TRUE(at::allclose(packed.grad(), plain.grad(), 0, tolerance));
          if (size() > 1 && format != WireFormat::kInt8 && output.numel() > 0) {
            EXPECT_FALSE(at::equal(output, expected));  // it was compressed
          }
        },
        test_options(GetParam().engine));
  }
}

std::string text_on_rank_0(int size, const std::function<void(const Group&)>& body) {
  return text_of(run_ranks_collecting(size, body, test_options(Engine::kShm))[0]);
}

TEST(CommOpsErrors, NameWhatDoesNotFit) {
  const at::Tensor x = at::ones({4, 3});
  EXPECT_EQ(text_on_rank_0(2, [&](const Group& g) { alltoall_pooled(x, {4}, {3, 3}, g).wait(); }),
            "sharding.alltoall_pooled: 1 batch sizes were given for a group of 2 ranks.");
  EXPECT_EQ(
      text_on_rank_0(2, [&](const Group& g) { alltoall_pooled(x, {2, 3}, {3, 3}, g).wait(); }),
      "sharding.alltoall_pooled: rank 0 gives shape [4, 3], but the batches 2 3 and dims 3 3 make "
      "it 5 3.");
  EXPECT_EQ(
      text_on_rank_0(2, [&](const Group& g) { alltoall_pooled(x, {5, -1}, {3, 3}, g).wait(); }),
      "sharding.alltoall_pooled: batch_size_per_rank 5 -1 has a negative entry.");
  EXPECT_EQ(
      text_on_rank_0(2, [&](const Group& g) { reduce_scatter_v_pooled(x, {1, 1}, g).wait(); }),
      "sharding.reduce_scatter_v_pooled: the splits 1 1 add up to 2, the input has shape "
      "[4, 3].");
  EXPECT_EQ(text_on_rank_0(3, [&](const Group& g) { reduce_scatter_base_pooled(x, g).wait(); }),
            "sharding.reduce_scatter_base_pooled: shape [4, 3] has rows that 3 ranks cannot share "
            "evenly.");
  const comm::Codec rows(comm::CodecOptions{.format = WireFormat::kInt8});
  EXPECT_EQ(
      text_on_rank_0(
          2, [&](const Group& g) { reduce_scatter_base_pooled(x, g, Codecs{rows, {}}).wait(); }),
      "sharding.reduce_scatter_base_pooled: sums are made of encoded values, so only fp16 "
      "and bf16 may encode them.");
  EXPECT_EQ(text_on_rank_0(2, [&](const Group& g) { alltoallv({x}, {2, 2}, g).wait(); }),
            "sharding.alltoallv: rank 0 gives 3 columns, its out_split is 2.");
}

TEST(CommOpsErrors, SecondDerivativesAreRefused) {
  const std::string text = text_on_rank_0(2, [](const Group& group) {
    const at::Tensor x = at::ones({2, 3}).requires_grad_(true);
    const at::Tensor y = reduce_scatter_base_pooled(x, group).wait();
    torch::autograd::grad({(y * y).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true);
  });
  EXPECT_EQ(text,
            "sharding.comm_ops: the gradients of an exchange are not differentiable; call backward "
            "without create_graph.");
}

}  // namespace
}  // namespace tessera::sharding
