// Ranks that call different things get the same text everywhere, and nothing hangs.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "group_fixture.h"

namespace tessera::comm::shm::testing {
namespace {

/// Memory enough for every case; what it holds does not matter.
struct Scratch {
  std::vector<std::byte> input = std::vector<std::byte>(1 << 20);
  std::vector<std::byte> output = std::vector<std::byte>(1 << 20);
  std::vector<Piece> pieces(const std::vector<std::int64_t>& counts, bool is_output = false) {
    std::vector<Piece> list;
    std::byte* next = (is_output ? output : input).data();
    for (const std::int64_t count : counts) {
      list.push_back({next, count});
      next += count * 8;
    }
    return list;
  }
};

using Action = std::function<void(ShmTransport&, Scratch&)>;

Action all_reduce(std::int64_t count, DataType dtype = DataType::kFloat32,
                  ReduceOp op = ReduceOp::kSum, std::uint64_t sequence = 941) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    transport.all_reduce(call_of(Operator::kAllReduce, dtype, op, -1, sequence),
                         {scratch.input.data(), count});
  };
}
Action reduce(std::int64_t count, int root) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    transport.reduce(call_of(Operator::kReduce, DataType::kFloat32, ReduceOp::kSum, root, 941),
                     {scratch.input.data(), count});
  };
}
Action broadcast(std::int64_t count, int root) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    transport.broadcast(call_of(Operator::kBroadcast, DataType::kFloat32, std::nullopt, root, 941),
                        {scratch.input.data(), count});
  };
}
Action barrier() {
  return [](ShmTransport& transport, Scratch&) {
    transport.barrier(call_of(Operator::kBarrier, DataType::kUInt8, std::nullopt, -1, 941));
  };
}
Action all_gather(std::int64_t count, std::vector<std::int64_t> outputs) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    transport.all_gather(call_of(Operator::kAllGather, DataType::kFloat32, std::nullopt, -1, 941),
                         {scratch.input.data(), count}, scratch.pieces(outputs, true));
  };
}
Action gather(std::int64_t count, int root, std::vector<std::int64_t> outputs) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    const auto pieces = scratch.pieces(outputs, true);
    transport.gather(call_of(Operator::kGather, DataType::kFloat32, std::nullopt, root, 941),
                     {scratch.input.data(), count}, pieces);
  };
}
Action scatter(std::vector<std::int64_t> inputs, int root, std::int64_t count) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    transport.scatter(call_of(Operator::kScatter, DataType::kFloat32, std::nullopt, root, 941),
                      scratch.pieces(inputs), {scratch.output.data(), count});
  };
}
Action reduce_scatter(std::vector<std::int64_t> inputs, std::int64_t count) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    transport.reduce_scatter(
        call_of(Operator::kReduceScatter, DataType::kFloat32, ReduceOp::kSum, -1, 941),
        scratch.pieces(inputs), {scratch.output.data(), count});
  };
}
Action all_to_all(std::vector<std::int64_t> inputs, std::vector<std::int64_t> outputs) {
  return [=](ShmTransport& transport, Scratch& scratch) {
    transport.all_to_all(call_of(Operator::kAllToAll, DataType::kFloat32, std::nullopt, -1, 941),
                         scratch.pieces(inputs), scratch.pieces(outputs, true));
  };
}

constexpr const char* kSameOrder = " Make every rank issue the same collectives in the same order.";
constexpr const char* kSameSizes = " Give every rank the same table of sizes.";

struct Case {
  const char* name;
  std::vector<Action> actions;  // one per rank
  std::string text;
};

std::vector<Case> cases() {
  const std::int64_t large = 100000;
  return {
      {"Operator",
       {all_reduce(25), broadcast(25, 0), all_reduce(25)},
       std::string("comm.all_reduce #941: rank 1 called broadcast of float32 [25] from root 0, "
                   "ranks 0, 2 called all_reduce sum of float32 [25].") +
           kSameOrder},
      {"OperatorOfLargeMessages",
       {all_reduce(large), broadcast(large, 0), all_reduce(large)},
       std::string("comm.all_reduce #941: rank 1 called broadcast of float32 [100000] from root "
                   "0, ranks 0, 2 called all_reduce sum of float32 [100000].") +
           kSameOrder},
      {"SizeSmallAgainstLarge",
       {all_reduce(25), all_reduce(large)},
       std::string("comm.all_reduce #941: rank 1 called all_reduce sum of float32 [100000], "
                   "rank 0 called all_reduce sum of float32 [25].") +
           kSameOrder},
      {"SizeByOne",
       {all_reduce(25), all_reduce(25), all_reduce(25), all_reduce(24)},
       std::string("comm.all_reduce #941: rank 3 called all_reduce sum of float32 [24], ranks 0, "
                   "1, 2 called all_reduce sum of float32 [25].") +
           kSameOrder},
      {"TypeOfEqualWidth",
       {all_reduce(25), all_reduce(25, DataType::kInt32)},
       std::string("comm.all_reduce #941: rank 1 called all_reduce sum of int32 [25], rank 0 "
                   "called all_reduce sum of float32 [25].") +
           kSameOrder},
      {"Reduction",
       {all_reduce(25), all_reduce(25, DataType::kFloat32, ReduceOp::kMax)},
       std::string("comm.all_reduce #941: rank 1 called all_reduce max of float32 [25], rank 0 "
                   "called all_reduce sum of float32 [25].") +
           kSameOrder},
      {"Sequence",
       {all_reduce(25), all_reduce(25, DataType::kFloat32, ReduceOp::kSum, 942)},
       std::string("comm.all_reduce #941: rank 1 called all_reduce #942 sum of float32 [25], rank "
                   "0 called all_reduce #941 sum of float32 [25].") +
           kSameOrder},
      {"RootOfBroadcast",
       {broadcast(25, 0), broadcast(25, 1), broadcast(25, 0)},
       std::string("comm.broadcast #941: rank 1 called broadcast of float32 [25] from root 1, "
                   "ranks 0, 2 called broadcast of float32 [25] from root 0.") +
           kSameOrder},
      {"RootOfReduce",
       {reduce(large, 0), reduce(large, 1)},
       std::string("comm.reduce #941: rank 1 called reduce sum of float32 [100000] to root 1, "
                   "rank 0 called reduce sum of float32 [100000] to root 0.") +
           kSameOrder},
      {"BarrierAgainstData",
       {barrier(), all_reduce(large), barrier()},
       std::string("comm.barrier #941: rank 1 called all_reduce sum of float32 [100000], ranks 0, "
                   "2 called barrier.") +
           kSameOrder},
      {"ThreeDifferentCalls",
       {barrier(), all_reduce(3), broadcast(3, 0)},
       std::string("comm.barrier #941: rank 1 called all_reduce sum of float32 [3], rank 2 called "
                   "broadcast of float32 [3] from root 0, rank 0 called barrier.") +
           kSameOrder},
      {"AllGatherCounts",
       {all_gather(5, {5, 5, 5}), all_gather(6, {5, 6, 5}), all_gather(5, {5, 5, 5})},
       std::string("comm.all_gather #941: rank 1 gives 6 elements of float32 for rank 0, which "
                   "expects 5 (and 1 more pairs).") +
           kSameSizes},
      {"AllGatherCountsAllWrongAlike",
       {all_gather(5, {5, 7}), all_gather(6, {5, 7})},
       std::string("comm.all_gather #941: rank 1 gives 6 elements of float32 for rank 0, which "
                   "expects 7 (and 1 more pairs).") +
           kSameSizes},
      {"AllGatherCountsOfLargeMessages",
       {all_gather(large, {large, large}), all_gather(large, {large, large - 1})},
       std::string("comm.all_gather #941: rank 1 gives 100000 elements of float32 for rank 1, "
                   "which expects 99999.") +
           kSameSizes},
      {"GatherCounts",
       {gather(5, 0, {5, 5, 4}), gather(5, 0, {}), gather(5, 0, {})},
       std::string("comm.gather #941: rank 2 gives 5 elements of float32 for rank 0, which "
                   "expects 4.") +
           kSameSizes},
      {"ScatterCounts",
       {scatter({}, 1, 5), scatter({4, 5, 5}, 1, 5), scatter({}, 1, 5)},
       std::string("comm.scatter #941: rank 1 gives 4 elements of float32 for rank 0, which "
                   "expects 5.") +
           kSameSizes},
      {"ReduceScatterCounts",
       {reduce_scatter({5, 6}, 5), reduce_scatter({5, 5}, 5)},
       std::string("comm.reduce_scatter #941: rank 0 gives 6 elements of float32 for rank 1, "
                   "which expects 5.") +
           kSameSizes},
      {"AllToAllCounts",
       {all_to_all({1, 2, 3}, {1, 1, 1}), all_to_all({1, 1, 1}, {2, 1, 1}),
        all_to_all({1, 1, 1}, {4, 1, 1})},
       std::string("comm.all_to_all #941: rank 0 gives 3 elements of float32 for rank 2, which "
                   "expects 4.") +
           kSameSizes},
      {"AllToAllUniformAgainstUneven",
       {all_to_all({large, large}, {large, large}), all_to_all({3, 3}, {3, 3})},
       std::string("comm.all_to_all #941: rank 0 gives 100000 elements of float32 for rank 1, "
                   "which expects 3 (and 1 more pairs).") +
           kSameSizes},
      {"AllToAllAgainstAllGather",
       {all_to_all({3, 3}, {3, 3}), all_gather(3, {3, 3})},
       std::string("comm.all_to_all #941: rank 1 called all_gather of float32, rank 0 called "
                   "all_to_all of float32.") +
           kSameOrder},
  };
}

class Mismatch : public ::testing::TestWithParam<Case> {};

TEST_P(Mismatch, IsTheSameTextOnEveryRank) {
  const Case& param = GetParam();
  const int size = static_cast<int>(param.actions.size());
  const auto texts = texts_of_threads(size, {}, [&](ShmTransport& transport) {
    Scratch scratch;
    // One good call first: the table of the second has the other parity.
    transport.barrier(call_of(Operator::kBarrier, DataType::kUInt8, std::nullopt, -1, 940));
    std::string first;
    try {
      param.actions[static_cast<std::size_t>(transport.rank())](transport, scratch);
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.kind(), FailureKind::kMismatch);
      EXPECT_FALSE(failure.ranks().empty());
      first = failure.what();
    }
    EXPECT_EQ(first, param.text);
    // The group stays broken, with the same text.
    transport.barrier(call_of(Operator::kBarrier));
  });
  for (const std::string& text : texts) EXPECT_EQ(text, param.text);
}

INSTANTIATE_TEST_SUITE_P(Table, Mismatch, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Mismatch, IsFoundBetweenProcessesWithinASecond) {
  const auto outcomes = run_processes(3, {}, [](ShmTransport& transport) {
    Scratch scratch;
    if (transport.rank() == 2) {
      broadcast(25, 0)(transport, scratch);
    } else {
      all_reduce(25)(transport, scratch);
    }
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.text,
              std::string("comm.all_reduce #941: rank 2 called broadcast of float32 [25] from root "
                          "0, ranks 0, 1 called all_reduce sum of float32 [25].") +
                  kSameOrder);
    EXPECT_LT(outcome.seconds, 1.0);
  }
}

TEST(Mismatch, WrongArgumentsAreRefusedBeforeAnyExchange) {
  run_threads(2, {}, [](ShmTransport& transport) {
    Scratch scratch;
    EXPECT_THROW(all_reduce(3, DataType::kInt32, ReduceOp::kAvg)(transport, scratch),
                 std::invalid_argument);
    EXPECT_THROW(all_reduce(3, DataType::kFloat32, ReduceOp::kBxor)(transport, scratch),
                 std::invalid_argument);
    EXPECT_THROW(broadcast(3, 2)(transport, scratch), std::invalid_argument);
    EXPECT_THROW(all_gather(3, {3, 3, 3})(transport, scratch), std::invalid_argument);
    EXPECT_THROW(transport.send(call_of(Operator::kSend), {}, 2, 0), std::invalid_argument);
    EXPECT_THROW(transport.recv(call_of(Operator::kRecv), {}, 5, 0), std::invalid_argument);
    barrier()(transport, scratch);
  });
}

}  // namespace
}  // namespace tessera::comm::shm::testing
