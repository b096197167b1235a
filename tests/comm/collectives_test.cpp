#include "tessera/comm/collectives.h"

#include <atomic>
#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;

using Rows = std::vector<std::int64_t>;

struct World {
  Engine engine;
  int size;
};

class Collectives : public ::testing::TestWithParam<World> {
 protected:
  void on_all_ranks(const std::function<void(const Group&)>& body) {
    run_ranks(GetParam().size, body, test_options(GetParam().engine));
  }
  int size() const { return GetParam().size; }
};

std::string world_name(const ::testing::TestParamInfo<World>& info) {
  return (info.param.engine == Engine::kShm ? "shm" : "gloo") + std::to_string(info.param.size);
}

INSTANTIATE_TEST_SUITE_P(Engines, Collectives,
                         ::testing::Values(World{Engine::kShm, 1}, World{Engine::kShm, 2},
                                           World{Engine::kShm, 3}, World{Engine::kShm, 4},
                                           World{Engine::kGloo, 1}, World{Engine::kGloo, 2},
                                           World{Engine::kGloo, 3}, World{Engine::kGloo, 4}),
                         world_name);

const std::vector<at::ScalarType> kAllTypes = {at::kFloat, at::kDouble, at::kHalf,  at::kBFloat16,
                                               at::kChar,  at::kByte,   at::kShort, at::kInt,
                                               at::kLong,  at::kBool};

// Small whole numbers, exact in every type, different on every rank.
at::Tensor values_of(int rank, at::IntArrayRef shape, at::ScalarType dtype) {
  std::int64_t count = 1;
  for (const auto extent : shape) count *= extent;
  return (at::arange(count).remainder(3) + rank % 2).to(dtype).view(shape);
}

// The same reduction by plain tensor arithmetic.
at::Tensor expected_reduction(const std::vector<at::Tensor>& inputs, Reduction reduction) {
  const bool is_bool = inputs[0].scalar_type() == at::kBool;
  at::Tensor total = inputs[0].clone();
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor& next = inputs[i];
    switch (reduction) {
      case Reduction::kSum:
      case Reduction::kAvg:
        total = is_bool ? at::logical_or(total, next) : (total + next).to(next.scalar_type());
        break;
      case Reduction::kMin:
        total = is_bool ? at::logical_and(total, next) : at::minimum(total, next);
        break;
      case Reduction::kMax:
        total = is_bool ? at::logical_or(total, next) : at::maximum(total, next);
        break;
      case Reduction::kProduct:
        total = is_bool ? at::logical_and(total, next) : (total * next).to(next.scalar_type());
        break;
      case Reduction::kBand:
        total = at::bitwise_and(total, next);
        break;
      case Reduction::kBor:
        total = at::bitwise_or(total, next);
        break;
      case Reduction::kBxor:
        total = at::bitwise_xor(total, next);
        break;
    }
  }
  return reduction == Reduction::kAvg ? total / static_cast<double>(inputs.size()) : total;
}

std::vector<at::Tensor> inputs_of_all(int size, at::IntArrayRef shape, at::ScalarType dtype) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(values_of(rank, shape, dtype));
  return inputs;
}

bool makes_sense(Reduction reduction, at::ScalarType dtype) {
  const bool is_bitwise = reduction == Reduction::kBand || reduction == Reduction::kBor ||
                          reduction == Reduction::kBxor;
  if (reduction == Reduction::kAvg) return at::isFloatingType(dtype);
  return !(is_bitwise && at::isFloatingType(dtype));
}

TEST_P(Collectives, AllReduceOfEveryTypeAndReduction) {
  on_all_ranks([&](const Group& group) {
    for (const auto dtype : kAllTypes) {
      for (const auto reduction :
           {Reduction::kSum, Reduction::kAvg, Reduction::kMin, Reduction::kMax, Reduction::kProduct,
            Reduction::kBand, Reduction::kBor, Reduction::kBxor}) {
        if (!makes_sense(reduction, dtype)) continue;
        const auto inputs = inputs_of_all(size(), {3, 5}, dtype);
        const at::Tensor result = all_reduce(inputs[group.rank()], group, reduction);
        const at::Tensor expected = expected_reduction(inputs, reduction);
        ASSERT_TRUE(at::allclose(result.to(at::kDouble), expected.to(at::kDouble), 1e-2))
            << dtype << " reduction " << static_cast<int>(reduction) << "\n"
            << result << "\n"
            << expected;
        ASSERT_EQ(result.scalar_type(), dtype);
      }
    }
  });
}

TEST_P(Collectives, AllReduceLeavesItsInputAlone) {
  on_all_ranks([&](const Group& group) {
    const at::Tensor input = values_of(group.rank(), {7}, at::kFloat);
    const at::Tensor before = input.clone();
    all_reduce(input, group);
    EXPECT_TRUE(at::equal(input, before));
  });
}

TEST_P(Collectives, SizesThatHurt) {
  on_all_ranks([&](const Group& group) {
    for (const std::int64_t count : {0, 1, 2, 3, 4, 5, 17, 16383, 16384, 16385, 300001}) {
      const auto inputs = inputs_of_all(size(), {count}, at::kFloat);
      at::Tensor tensor = inputs[group.rank()].clone();
      all_reduce_(tensor, group);
      ASSERT_TRUE(at::equal(tensor, expected_reduction(inputs, Reduction::kSum))) << count;
      const at::Tensor gathered = all_gather(inputs[group.rank()], group);
      ASSERT_TRUE(at::equal(gathered, at::cat(inputs))) << count;
    }
  });
}

TEST_P(Collectives, NonContiguousTensors) {
  on_all_ranks([&](const Group& group) {
    const auto inputs = inputs_of_all(size(), {4, 6}, at::kFloat);
    std::vector<at::Tensor> transposed;
    for (const auto& input : inputs) transposed.push_back(input.t());
    at::Tensor view = inputs[group.rank()].clone().t();
    ASSERT_FALSE(view.is_contiguous());
    all_reduce_(view, group);
    EXPECT_TRUE(at::equal(view, expected_reduction(transposed, Reduction::kSum)));

    at::Tensor column = inputs[group.rank()].clone().select(1, 2);
    broadcast_(column, size() - 1, group);
    EXPECT_TRUE(at::equal(column, inputs.back().select(1, 2)));

    const at::Tensor gathered = all_gather(transposed[group.rank()], group);
    EXPECT_TRUE(at::equal(gathered, at::cat(transposed)));
  });
}

TEST_P(Collectives, ComplexSumsAndMoves) {
  on_all_ranks([&](const Group& group) {
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size(); ++r) {
      inputs.push_back(
          at::complex(values_of(r, {5}, at::kFloat), values_of(r + 1, {5}, at::kFloat)));
    }
    EXPECT_TRUE(at::equal(all_reduce(inputs[group.rank()], group),
                          expected_reduction(inputs, Reduction::kSum)));
    EXPECT_TRUE(at::equal(all_gather(inputs[group.rank()], group), at::cat(inputs)));
  });
}

TEST_P(Collectives, ReduceGivesTheRootTheResult) {
  on_all_ranks([&](const Group& group) {
    const int root = size() - 1;
    const auto inputs = inputs_of_all(size(), {9}, at::kInt);
    const at::Tensor result = reduce(inputs[group.rank()], root, group, Reduction::kMax);
    const at::Tensor expected =
        group.rank() == root ? expected_reduction(inputs, Reduction::kMax) : inputs[group.rank()];
    EXPECT_TRUE(at::equal(result, expected));
  });
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  on_all_ranks([&](const Group& group) {
    for (int root = 0; root < size(); ++root) {
      for (const auto dtype : kAllTypes) {
        at::Tensor tensor = values_of(group.rank(), {2, 3}, dtype);
        broadcast_(tensor, root, group);
        ASSERT_TRUE(at::equal(tensor, values_of(root, {2, 3}, dtype)));
      }
    }
  });
}

// Rank r has r rows, so rank 0 has none.
at::Tensor uneven_rows(int rank) { return values_of(rank, {rank, 3}, at::kLong) + 10 * rank; }

TEST_P(Collectives, UnevenAllGatherWithAndWithoutSizes) {
  on_all_ranks([&](const Group& group) {
    std::vector<at::Tensor> inputs;
    Rows rows;
    for (int r = 0; r < size(); ++r) {
      inputs.push_back(uneven_rows(r));
      rows.push_back(r);
    }
    EXPECT_TRUE(at::equal(all_gather_v(inputs[group.rank()], group), at::cat(inputs)));
    EXPECT_TRUE(at::equal(all_gather_v(inputs[group.rank()], group, rows), at::cat(inputs)));
  });
}

TEST_P(Collectives, GatherAndScatterUneven) {
  on_all_ranks([&](const Group& group) {
    const int root = size() / 2;
    std::vector<at::Tensor> inputs;
    Rows rows;
    for (int r = 0; r < size(); ++r) {
      inputs.push_back(uneven_rows(r));
      rows.push_back(r);
    }
    const at::Tensor gathered = gather(inputs[group.rank()], root, group);
    if (group.rank() == root) {
      EXPECT_TRUE(at::equal(gathered, at::cat(inputs)));
    } else {
      EXPECT_EQ(gathered.numel(), 0);
    }
    const at::Tensor whole = group.rank() == root ? at::cat(inputs) : at::empty({0, 3}, at::kLong);
    EXPECT_TRUE(at::equal(scatter(whole, rows, root, group), inputs[group.rank()]));
  });
}

TEST_P(Collectives, ReduceScatterEvenAndUneven) {
  on_all_ranks([&](const Group& group) {
    const auto inputs = inputs_of_all(size(), {2 * size(), 3}, at::kFloat);
    const at::Tensor sum = expected_reduction(inputs, Reduction::kSum);
    EXPECT_TRUE(
        at::equal(reduce_scatter(inputs[group.rank()], group), sum.narrow(0, 2 * group.rank(), 2)));
    Rows rows;
    std::int64_t total = 0;
    std::int64_t first = 0;
    for (int r = 0; r < size(); ++r) {
      rows.push_back(r);
      if (r == group.rank()) first = total;
      total += r;
    }
    const auto uneven = inputs_of_all(size(), {total, 3}, at::kHalf);
    EXPECT_TRUE(
        at::equal(reduce_scatter_v(uneven[group.rank()], rows, group),
                  expected_reduction(uneven, Reduction::kSum).narrow(0, first, group.rank())));
  });
}

TEST_P(Collectives, AllToAllEvenAndUneven) {
  on_all_ranks([&](const Group& group) {
    const int rank = group.rank();
    // Rank r sends to rank d the number 100 r + d.
    at::Tensor even = at::empty({size(), 2}, at::kInt);
    at::Tensor expected = at::empty({size(), 2}, at::kInt);
    for (int peer = 0; peer < size(); ++peer) {
      even[peer].fill_(100 * rank + peer);
      expected[peer].fill_(100 * peer + rank);
    }
    EXPECT_TRUE(at::equal(all_to_all(even, group), expected));
    // And (r + d) rows of it.
    std::vector<at::Tensor> sent;
    std::vector<at::Tensor> arriving;
    Rows send_rows;
    Rows recv_rows;
    for (int peer = 0; peer < size(); ++peer) {
      send_rows.push_back((rank + 2 * peer) % 3);
      recv_rows.push_back((peer + 2 * rank) % 3);
      sent.push_back(at::full({send_rows.back(), 2}, 100 * rank + peer, at::kDouble));
      arriving.push_back(at::full({recv_rows.back(), 2}, 100 * peer + rank, at::kDouble));
    }
    EXPECT_TRUE(at::equal(all_to_all_v(at::cat(sent), send_rows, group), at::cat(arriving)));
    EXPECT_TRUE(
        at::equal(all_to_all_v(at::cat(sent), send_rows, group, recv_rows), at::cat(arriving)));
  });
}

TEST_P(Collectives, AllToAllOfPiecesAnywhere) {
  on_all_ranks([&](const Group& group) {
    const int rank = group.rank();
    for (const std::int64_t scale : {1, 5000}) {
      // Nothing for itself, and (r + d) numbers for others, from the middle of tensors of their
      // own.
      const auto count = [&](int from, int to) {
        return from == to ? 0 : scale * ((from + 2 * to) % 3);
      };
      std::vector<at::Tensor> inputs;
      std::vector<at::Tensor> outputs;
      for (int peer = 0; peer < size(); ++peer) {
        inputs.push_back(at::full({count(rank, peer) + 2}, 100.0F * static_cast<float>(rank) + peer)
                             .narrow(0, 1, count(rank, peer)));
        outputs.push_back(at::full({count(peer, rank) + 2}, -1.0F).narrow(0, 1, count(peer, rank)));
      }
      const auto pending = all_to_all_pieces_async(outputs, inputs, group);
      const std::vector<at::Tensor>& arrived = pending.wait();
      EXPECT_TRUE(pending.is_ready());
      for (int peer = 0; peer < size(); ++peer) {
        const auto p = static_cast<std::size_t>(peer);
        EXPECT_EQ(arrived[p].data_ptr(), outputs[p].data_ptr());
        EXPECT_TRUE(at::equal(
            outputs[p], at::full({count(peer, rank)}, 100.0F * static_cast<float>(peer) + rank)));
      }
    }
  });
}

// It is ready when it has been done, or when the others have come and it could be.
TEST_P(Collectives, AnOperationIsNotReadyBeforeTheLastRankHasCome) {
  if (size() == 1) return;
  std::atomic<bool> has_come = false;
  on_all_ranks([&](const Group& group) {
    barrier(group);
    if (group.rank() == size() - 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      has_come = true;
      EXPECT_EQ(all_reduce(at::ones({1}), group).item<float>(), static_cast<float>(size()));
      return;
    }
    const auto pending = all_reduce_async(at::ones({1}), group);
    for (;;) {
      if (!pending.is_ready()) {
        std::this_thread::yield();
        continue;
      }
      EXPECT_TRUE(has_come);
      break;
    }
    EXPECT_EQ(pending.wait().item<float>(), static_cast<float>(size()));
  });
}

TEST_P(Collectives, ManyPendingOperationsFinishInOrder) {
  on_all_ranks([&](const Group& group) {
    std::vector<at::Tensor> tensors;
    std::vector<Awaitable<at::Tensor>> pending;
    tensors.reserve(20);
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(at::full({1000 * i + 1}, static_cast<double>(group.rank() + i)));
      pending.push_back(all_reduce_async_(tensors.back(), group));
    }
    // A blocking call in between queues behind them.
    const at::Tensor blocking = all_reduce(at::ones({3}), group);
    EXPECT_EQ(blocking[0].item<double>(), size());
    for (int i = 19; i >= 0; --i) {
      const double expected = size() * i + size() * (size() - 1) / 2.0;
      EXPECT_EQ(pending[i].wait()[0].item<double>(), expected);
    }
  });
}

TEST_P(Collectives, PendingOperationsOfAllKindsKeepTheirOrder) {
  on_all_ranks([&](const Group& group) {
    at::Tensor value = at::ones({5000});
    at::Tensor table = at::zeros({40, 2}).t();  // not contiguous
    for (int turn = 0; turn < 10; ++turn) {
      if (turn % size() == group.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      value.fill_(group.rank() + turn);
      table.fill_(1);
      auto sum = all_reduce_async_(value, group);      // n turn + n (n - 1) / 2, everywhere
      auto again = all_reduce_async_(value, group);    // n times that
      auto moved = broadcast_async_(value, 0, group);  // the same
      auto wide = all_reduce_async_(table, group);     // n
      auto all = all_gather_async(at::full({3}, group.rank()), group);
      auto last = all_reduce_async(at::ones({7}), group);
      const double total = size() * (size() * turn + size() * (size() - 1) / 2.0);
      EXPECT_EQ(last.wait()[6].item<double>(), size());
      EXPECT_EQ(all.wait()[-1].item<double>(), size() - 1);
      EXPECT_TRUE(at::equal(wide.wait(), at::full({2, 40}, static_cast<double>(size()))));
      EXPECT_TRUE(at::equal(moved.wait(), at::full({5000}, total)));
      again.wait();
      sum.wait();
    }
  });
}

TEST_P(Collectives, CallbacksOfFuturesMayCallCollectives) {
  on_all_ranks([&](const Group& group) {
    const double sum = size() * (size() - 1) / 2.0;
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    std::vector<Awaitable<at::Tensor>> behind;
    for (int turn = 0; turn < 10; ++turn) {
      if (turn % size() == group.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      std::vector<at::Tensor> first{at::full({1 + turn}, static_cast<double>(group.rank()))};
      c10d::AllreduceOptions options;
      options.asyncOp = true;
      const auto future = group.process_group()->allreduce(first, options)->getFuture();
      futures.push_back(future->then(
          [group, options](c10::ivalue::Future& done) -> c10::IValue {
            std::vector<at::Tensor> second{done.value().toTensorVector()[0].repeat({2})};
            const auto inner = group.process_group()->allreduce(second, options)->getFuture();
            const auto innermost = inner->then(
                [group](c10::ivalue::Future& ended) -> c10::IValue {
                  return all_reduce(ended.value().toTensorVector()[0].repeat({2}), group);
                },
                c10::TensorType::get());
            innermost->waitAndThrow();
            return innermost->value();
          },
          c10::TensorType::get()));
      // Another size: out of order it would be refused.
      behind.push_back(all_reduce_async(at::ones({1000 + turn}), group));
    }
    for (int turn = 0; turn < 10; ++turn) {
      futures[turn]->waitAndThrow();
      const at::Tensor result = futures[turn]->value().toTensor();
      EXPECT_TRUE(at::equal(result, at::full({4 * (1 + turn)}, sum * size() * size())));
      EXPECT_EQ(behind[turn].wait()[0].item<double>(), size());
    }
  });
}

TEST_P(Collectives, SendAndRecvAroundARing) {
  if (size() == 1) return;
  on_all_ranks([&](const Group& group) {
    const int next = (group.rank() + 1) % size();
    const int previous = (group.rank() + size() - 1) % size();
    for (const std::int64_t count : {0, 1, 1000, 700001}) {
      const at::Tensor mine = at::full({count}, group.rank(), at::kFloat);
      at::Tensor theirs = at::empty({count});
      auto sending = send_async(mine, next, group, 3);
      recv_(theirs, previous, group, 3);
      sending.wait();
      ASSERT_TRUE(at::equal(theirs, at::full({count}, previous, at::kFloat)));
    }
  });
}

TEST_P(Collectives, ARankMaySendToItself) {
  on_all_ranks([&](const Group& group) {
    at::Tensor first = at::zeros({3});
    at::Tensor second = at::zeros({2, 2}, at::kLong);
    auto pending = recv_async_(second, group.rank(), group, 7);  // before it is sent
    send(at::full({3}, group.rank() + 1.0), group.rank(), group);
    send(at::full({4}, group.rank(), at::kLong), group.rank(), group, 7);
    recv_(first, group.rank(), group);
    pending.wait();
    EXPECT_TRUE(at::equal(first, at::full({3}, group.rank() + 1.0)));
    EXPECT_TRUE(at::equal(second, at::full({2, 2}, group.rank(), at::kLong)));
    send(at::ones({2}), group.rank(), group);
    EXPECT_THROW(recv_(first, group.rank(), group), c10::ValueError);
  });
}

TEST_P(Collectives, BarrierWaitsForTheLast) {
  std::atomic<int> arrived{0};
  on_all_ranks([&](const Group& group) {
    if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ++arrived;
    barrier(group);
    EXPECT_EQ(arrived.load(), size());
  });
}

TEST_P(Collectives, SparseAllReduceSumsEntries) {
  on_all_ranks([&](const Group& group) {
    const at::Tensor indices = at::tensor({0, 2, group.rank() + 3}, at::kLong).view({1, 3});
    at::Tensor sparse = at::sparse_coo_tensor(indices, at::ones({3, 2}), {10, 2});
    std::vector<at::Tensor> tensors{sparse};
    group.process_group()->getBackend(at::kCPU)->allreduce(tensors, {})->wait();
    at::Tensor expected = at::zeros({10, 2});
    for (int r = 0; r < size(); ++r) {
      for (const int row : {0, 2, r + 3}) expected[row] += 1;
    }
    EXPECT_TRUE(at::equal(sparse.to_dense(), expected));
  });
}

struct BadCall {
  const char* name;
  std::function<void(const Group&)> call;
  const char* text;
};

TEST_P(Collectives, BadArgumentsAreNamedBeforeAnythingIsSent) {
  const std::vector<BadCall> calls = {
      {"undefined", [](const Group& group) { all_reduce(at::Tensor(), group); },
       "comm.all_reduce: the tensor is undefined."},
      {"integer average",
       [](const Group& group) { all_reduce(at::ones({2}, at::kLong), group, Reduction::kAvg); },
       "comm.all_reduce: the average of Long tensors is not defined."},
      {"bits of floats",
       [](const Group& group) { all_reduce(at::ones({2}), group, Reduction::kBor); },
       "comm.all_reduce: the bitwise or of Float tensors is not defined."},
      {"root",
       [](const Group& group) {
         auto t = at::ones({2});
         broadcast_(t, 7, group);
       },
       "comm.broadcast: root 7 is not a rank of a group of"},
      {"row counts", [](const Group& group) { reduce_scatter_v(at::ones({4}), Rows{1}, group); },
       "row counts"},
      {"negative rows",
       [](const Group& group) {
         Rows rows(group.size(), 0);
         rows[0] = -1;
         all_to_all_v(at::ones({0}), rows, group);
       },
       "comm.all_to_all_v: rank 0 cannot have -1 rows."},
      {"pieces",
       [](const Group& group) { (void)all_to_all_pieces_async({}, {at::ones({1})}, group).wait(); },
       "comm.all_to_all_pieces: 1 inputs and 0 outputs for "},
  };
  for (const BadCall& bad : calls) {
    if (size() == 1 && std::string(bad.name) == "row counts") continue;
    const auto errors = run_ranks_collecting(size(), bad.call, test_options(GetParam().engine));
    for (const auto& error : errors) {
      EXPECT_NE(text_of(error).find(bad.text), std::string::npos)
          << bad.name << ": " << text_of(error);
    }
  }
}

TEST_P(Collectives, UnevenInputWhereEqualPartsAreRequired) {
  if (size() == 1) return;
  const auto errors = run_ranks_collecting(
      size(), [](const Group& group) { reduce_scatter(at::ones({group.size() + 1}), group); },
      test_options(GetParam().engine));
  for (const auto& error : errors) {
    EXPECT_NE(text_of(error).find("rows cannot be cut evenly for"), std::string::npos);
  }
}

struct Mismatch {
  const char* name;
  std::function<void(const Group&)> call;
  std::vector<std::string> words;
};

// Rank 1 does something else than the others; all ranks must say so, in the same words, at once.
TEST_P(Collectives, RanksThatDisagreeAllRaiseTheSameText) {
  if (size() == 1) return;
  const auto odd = [](const Group& group) { return group.rank() == 1; };
  const std::vector<Mismatch> cases = {
      {"operator",
       [&](const Group& group) {
         auto tensor = at::ones({25});
         if (odd(group)) {
           broadcast_(tensor, 0, group);
         } else {
           all_reduce_(tensor, group);
         }
       },
       {"rank 1 called broadcast of float32 [25] from root 0", "called all_reduce sum"}},
      {"size",
       [&](const Group& group) { all_reduce(at::ones({odd(group) ? 9 : 8}), group); },
       {"rank 1 called all_reduce sum of float32 [9]", "float32 [8]"}},
      {"size across the small-message limit",
       [&](const Group& group) { all_reduce(at::ones({odd(group) ? 400000 : 8}), group); },
       {"float32 [400000]", "float32 [8]"}},
      {"dtype",
       [&](const Group& group) {
         all_reduce(at::ones({8}, odd(group) ? at::kInt : at::kFloat), group);
       },
       {"int32 [8]", "float32 [8]"}},
      {"reduction",
       [&](const Group& group) {
         all_reduce(at::ones({8}), group, odd(group) ? Reduction::kMax : Reduction::kSum);
       },
       {"all_reduce max", "all_reduce sum"}},
      {"root",
       [&](const Group& group) {
         auto tensor = at::ones({8});
         broadcast_(tensor, odd(group) ? 1 : 0, group);
       },
       {"from root 1", "from root 0"}},
      {"size of one that is queued",
       [&](const Group& group) {
         auto first = all_reduce_async(at::ones({8}), group);
         auto second = all_reduce_async(at::ones({odd(group) ? 9 : 8}), group);
         auto third = all_reduce_async(at::ones({8}), group);
         first.wait();
         second.wait();
       },
       {"rank 1 called all_reduce sum of float32 [9]", "float32 [8]"}},
      {"splits",
       [&](const Group& group) {
         Rows send_rows(group.size(), 1);
         Rows recv_rows(group.size(), odd(group) ? 2 : 1);
         all_to_all_v(at::ones({group.size()}), send_rows, group, recv_rows);
       },
       {"for rank 1, which expects 2"}},
  };
  for (const Mismatch& mismatch : cases) {
    const auto begin = std::chrono::steady_clock::now();
    const auto errors =
        run_ranks_collecting(size(), mismatch.call, test_options(GetParam().engine));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5)) << mismatch.name;
    for (const auto& error : errors) {
      EXPECT_EQ(text_of(error), text_of(errors[0])) << mismatch.name;
      for (const auto& word : mismatch.words) {
        EXPECT_NE(text_of(error).find(word), std::string::npos)
            << mismatch.name << ": " << text_of(error);
      }
      try {
        if (error) std::rethrow_exception(error);
        ADD_FAILURE() << mismatch.name << " went unnoticed";
      } catch (const Error& caught) {
        EXPECT_EQ(caught.kind(), ErrorKind::kMismatch) << mismatch.name;
      } catch (const std::exception& caught) {
        ADD_FAILURE() << mismatch.name << ": " << caught.what();
      }
    }
  }
}

TEST_P(Collectives, AnAbortedGroupStaysAborted) {
  on_all_ranks([&](const Group& group) {
    barrier(group);
    if (group.rank() == 0) group.abort("the test says so");
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        for (int i = 0; i < 1000; ++i) {
          barrier(group);
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        ADD_FAILURE() << "the group went on";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kAborted);
        EXPECT_STREQ(error.what(), "comm: group 'world' was aborted by rank 0: the test says so");
      }
    }
  });
}

TEST_P(Collectives, TimeoutNamesTheLateRank) {
  if (size() == 1) return;
  auto options = test_options(GetParam().engine);
  options.timeout = std::chrono::milliseconds(300);
  std::atomic<bool> is_over{false};
  const auto errors = run_ranks_collecting(
      size(),
      [&](const Group& group) {
        barrier(group);
        if (group.rank() == 1) {
          while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        try {
          all_reduce(at::ones({4096}), group);
        } catch (...) {
          is_over = true;
          throw;
        }
      },
      options);
  const std::string text = text_of(errors[0]);
  EXPECT_NE(text.find("comm.all_reduce #1: no answer from "), std::string::npos) << text;
  EXPECT_NE(text.find("float32 [4096], group 'world'"), std::string::npos) << text;
  if (GetParam().engine == Engine::kShm) {
    EXPECT_NE(text.find("no answer from rank 1 in 0.3"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace tessera::comm
