// Every operator against plain loops: types, reductions, group sizes, message sizes, paths.

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "group_fixture.h"
#include "sample_data.h"

namespace tessera::comm::shm::testing {
namespace {

/// A buffer of one rank: private memory, the heap of the segment, or deliberately unaligned.
enum class Place { kPrivate, kHeap, kUnaligned };

class Buffer {
 public:
  Buffer(ShmTransport& transport, Place place, DataType dtype, const Bytes& content)
      : dtype_(dtype), bytes_(content.size()) {
    const std::size_t shift = place == Place::kUnaligned ? size_of(dtype) : 0;
    if (place == Place::kHeap) {
      heap_ = transport.allocate(bytes_);
      EXPECT_NE(heap_, nullptr);
      data_ = static_cast<std::byte*>(heap_.get());
    } else {
      memory_.resize(bytes_ + shift + 1);
      data_ = memory_.data() + shift;
    }
    if (bytes_ != 0) std::memcpy(data_, content.data(), bytes_);
  }
  Piece piece() { return {data_, static_cast<std::int64_t>(bytes_ / size_of(dtype_))}; }
  Bytes content() const { return {data_, data_ + bytes_}; }

 private:
  DataType dtype_;
  std::size_t bytes_;
  std::shared_ptr<void> heap_;
  Bytes memory_;
  std::byte* data_ = nullptr;
};

Bytes empty_like(DataType dtype, std::int64_t count) {
  return Bytes(static_cast<std::size_t>(count) * size_of(dtype), std::byte{0xA5});
}

std::uint64_t seed_of(int rank, int peer) {
  return static_cast<std::uint64_t>(rank) * 100 + static_cast<std::uint64_t>(peer) + 1;
}

std::vector<Bytes> samples(DataType dtype, std::int64_t count, int size) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(sample(dtype, count, seed_of(rank, 0)));
  return inputs;
}

/// An uneven table of counts: some pairs have nothing, some a little, some many chunks.
std::int64_t uneven(std::int64_t count, int from, int to) {
  switch ((from * 3 + to) % 4) {
    case 0:
      return 0;
    case 1:
      return count;
    case 2:
      return count / 3;
    default:
      return count + 7;
  }
}

void check_all_reduce(ShmTransport& transport, Place place, DataType dtype, ReduceOp op,
                      std::int64_t count) {
  const std::vector<Bytes> inputs = samples(dtype, count, transport.size());
  Buffer data(transport, place, dtype, inputs[static_cast<std::size_t>(transport.rank())]);
  transport.all_reduce(call_of(Operator::kAllReduce, dtype, op), data.piece());
  EXPECT_EQ(data.content(), reduced(dtype, op, inputs))
      << "all_reduce " << name_of(op) << " of " << name_of(dtype) << " [" << count << "], rank "
      << transport.rank() << " of " << transport.size();
}

void check_reduce(ShmTransport& transport, Place place, DataType dtype, ReduceOp op,
                  std::int64_t count) {
  for (int root = 0; root < transport.size(); ++root) {
    const std::vector<Bytes> inputs = samples(dtype, count, transport.size());
    const Bytes& mine = inputs[static_cast<std::size_t>(transport.rank())];
    Buffer data(transport, place, dtype, mine);
    transport.reduce(call_of(Operator::kReduce, dtype, op, root), data.piece());
    const bool is_root = transport.rank() == root;
    EXPECT_EQ(data.content(), is_root ? reduced(dtype, op, inputs) : mine)
        << "reduce [" << count << "]";
  }
}

void check_broadcast(ShmTransport& transport, Place place, DataType dtype, std::int64_t count) {
  for (int root = 0; root < transport.size(); ++root) {
    const Bytes expected = sample(dtype, count, seed_of(root, 0));
    const bool is_root = transport.rank() == root;
    Buffer data(transport, place, dtype, is_root ? expected : empty_like(dtype, count));
    transport.broadcast(call_of(Operator::kBroadcast, dtype, std::nullopt, root), data.piece());
    EXPECT_EQ(data.content(), expected) << "broadcast [" << count << "] from " << root;
  }
}

/// all_gather with one count per rank, and gather to every root.
void check_gathers(ShmTransport& transport, Place place, DataType dtype, std::int64_t count,
                   bool is_uneven) {
  const int size = transport.size();
  const int rank = transport.rank();
  std::vector<Bytes> inputs;
  for (int peer = 0; peer < size; ++peer) {
    inputs.push_back(sample(dtype, is_uneven ? uneven(count, peer, 0) : count, seed_of(peer, 0)));
  }
  for (int root = -1; root < size; ++root) {
    Buffer input(transport, place, dtype, inputs[static_cast<std::size_t>(rank)]);
    std::vector<std::unique_ptr<Buffer>> outputs;
    std::vector<Piece> pieces;
    if (root < 0 || root == rank) {
      for (const Bytes& expected : inputs) {
        outputs.push_back(std::make_unique<Buffer>(transport, place, dtype,
                                                   Bytes(expected.size(), std::byte{0xA5})));
        pieces.push_back(outputs.back()->piece());
      }
    }
    if (root < 0) {
      transport.all_gather(call_of(Operator::kAllGather, dtype), input.piece(), pieces);
    } else {
      transport.gather(call_of(Operator::kGather, dtype, std::nullopt, root), input.piece(),
                       pieces);
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_EQ(outputs[i]->content(), inputs[i]) << "gather [" << count << "] root " << root;
    }
    EXPECT_EQ(input.content(), inputs[static_cast<std::size_t>(rank)]);
  }
}

void check_scatter(ShmTransport& transport, Place place, DataType dtype, std::int64_t count,
                   bool is_uneven) {
  const int size = transport.size();
  const int rank = transport.rank();
  const auto count_for = [&](int root, int to) {
    return is_uneven ? uneven(count, root, to) : count;
  };
  for (int root = 0; root < size; ++root) {
    std::vector<std::unique_ptr<Buffer>> inputs;
    std::vector<Piece> pieces;
    for (int to = 0; to < size && rank == root; ++to) {
      inputs.push_back(std::make_unique<Buffer>(
          transport, place, dtype, sample(dtype, count_for(root, to), seed_of(root, to))));
      pieces.push_back(inputs.back()->piece());
    }
    Buffer output(transport, place, dtype, empty_like(dtype, count_for(root, rank)));
    transport.scatter(call_of(Operator::kScatter, dtype, std::nullopt, root), pieces,
                      output.piece());
    EXPECT_EQ(output.content(), sample(dtype, count_for(root, rank), seed_of(root, rank)))
        << "scatter [" << count << "] root " << root;
  }
}

void check_reduce_scatter(ShmTransport& transport, Place place, DataType dtype, ReduceOp op,
                          std::int64_t count, bool is_uneven) {
  const int size = transport.size();
  const int rank = transport.rank();
  const auto count_for = [&](int to) { return is_uneven ? uneven(count, 0, to) : count; };
  std::vector<std::unique_ptr<Buffer>> inputs;
  std::vector<Piece> pieces;
  for (int to = 0; to < size; ++to) {
    inputs.push_back(std::make_unique<Buffer>(transport, place, dtype,
                                              sample(dtype, count_for(to), seed_of(rank, to))));
    pieces.push_back(inputs.back()->piece());
  }
  std::vector<Bytes> contributions;
  for (int from = 0; from < size; ++from) {
    contributions.push_back(sample(dtype, count_for(rank), seed_of(from, rank)));
  }
  Buffer output(transport, place, dtype, empty_like(dtype, count_for(rank)));
  transport.reduce_scatter(call_of(Operator::kReduceScatter, dtype, op), pieces, output.piece());
  EXPECT_EQ(output.content(), reduced(dtype, op, contributions))
      << "reduce_scatter [" << count << "]";
}

void check_all_to_all(ShmTransport& transport, Place place, DataType dtype, std::int64_t count,
                      bool is_uneven) {
  const int size = transport.size();
  const int rank = transport.rank();
  const auto count_for = [&](int from, int to) {
    return is_uneven ? uneven(count, from, to) : count;
  };
  std::vector<std::unique_ptr<Buffer>> inputs;
  std::vector<std::unique_ptr<Buffer>> outputs;
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  for (int peer = 0; peer < size; ++peer) {
    inputs.push_back(std::make_unique<Buffer>(
        transport, place, dtype, sample(dtype, count_for(rank, peer), seed_of(rank, peer))));
    outputs.push_back(std::make_unique<Buffer>(transport, place, dtype,
                                               empty_like(dtype, count_for(peer, rank))));
    sends.push_back(inputs.back()->piece());
    receives.push_back(outputs.back()->piece());
  }
  transport.all_to_all(call_of(Operator::kAllToAll, dtype), sends, receives);
  for (int peer = 0; peer < size; ++peer) {
    EXPECT_EQ(outputs[static_cast<std::size_t>(peer)]->content(),
              sample(dtype, count_for(peer, rank), seed_of(peer, rank)))
        << "all_to_all [" << count << "] from " << peer << " to " << rank;
  }
}

void check_everything(ShmTransport& transport, Place place, DataType dtype, std::int64_t count) {
  check_all_reduce(transport, place, dtype, ReduceOp::kSum, count);
  check_reduce(transport, place, dtype, ReduceOp::kMax, count);
  check_broadcast(transport, place, dtype, count);
  for (const bool is_uneven : {false, true}) {
    check_gathers(transport, place, dtype, count, is_uneven);
    check_scatter(transport, place, dtype, count, is_uneven);
    check_reduce_scatter(transport, place, dtype, ReduceOp::kSum, count, is_uneven);
    check_all_to_all(transport, place, dtype, count, is_uneven);
  }
  transport.barrier(call_of(Operator::kBarrier));
}

struct Case {
  int size;
  Staging staging;
  Place place;
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  static const char* const stagings[] = {"Measured", "Cached", "Streaming"};
  static const char* const places[] = {"Private", "Heap", "Unaligned"};
  return "World" + std::to_string(info.param.size) +
         stagings[static_cast<int>(info.param.staging)] +
         places[static_cast<int>(info.param.place)];
}

class Collectives : public ::testing::TestWithParam<Case> {};

TEST_P(Collectives, MatchPlainLoopsAtEverySize) {
  const Case& param = GetParam();
  ShmOptions options = small_options();
  options.staging = param.staging;
  run_threads(param.size, options, [&](ShmTransport& transport) {
    // Around the one-shot limit (1 KiB), the chunk (8 KiB) and several chunks.
    for (const std::int64_t count : {0, 1, 3, 4, 5, 255, 256, 257, 2047, 2048, 2049, 9001}) {
      check_everything(transport, param.place, DataType::kFloat32, count);
    }
  });
}

TEST_P(Collectives, MatchPlainLoopsForEveryTypeAndReduction) {
  const Case& param = GetParam();
  ShmOptions options = small_options();
  options.staging = param.staging;
  run_threads(param.size, options, [&](ShmTransport& transport) {
    for (const DataType dtype : kAllTypes) {
      for (const ReduceOp op : kAllReductions) {
        if (!kernels::can_reduce(dtype, op)) continue;
        for (const std::int64_t count : {37, 5003}) {
          check_all_reduce(transport, param.place, dtype, op, count);
          check_reduce_scatter(transport, param.place, dtype, op, count, true);
        }
      }
      check_broadcast(transport, param.place, dtype, 5003);
      check_all_to_all(transport, param.place, dtype, 1201, true);
      check_gathers(transport, param.place, dtype, 1201, true);
    }
  });
}

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const int size : {1, 2, 3, 4}) {
    for (const Staging staging : {Staging::kCached, Staging::kStreaming}) {
      for (const Place place : {Place::kPrivate, Place::kHeap, Place::kUnaligned}) {
        list.push_back({size, staging, place});
      }
    }
  }
  list.push_back({2, Staging::kMeasured, Place::kPrivate});
  list.push_back({8, Staging::kMeasured, Place::kPrivate});
  list.push_back({8, Staging::kCached, Place::kHeap});
  return list;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, ::testing::ValuesIn(cases()), name_of_case);

TEST(CollectivesDefaults, MatchPlainLoopsAroundTheSwitches) {
  run_threads(2, {}, [](ShmTransport& transport) {
    const std::int64_t limit = 64 * 1024 / 4;  // float32 elements of a 64 KiB slot
    const std::int64_t chunk = 1024 * 1024 / 4;
    for (const std::int64_t count :
         {limit - 1, limit, limit + 1, chunk - 1, chunk, chunk + 1, 4 * chunk + 3, 9 * chunk}) {
      check_all_reduce(transport, Place::kPrivate, DataType::kFloat32, ReduceOp::kAvg, count);
      check_all_to_all(transport, Place::kPrivate, DataType::kFloat32, count, false);
      check_gathers(transport, Place::kPrivate, DataType::kFloat32, count, false);
    }
  });
}

TEST(CollectivesDefaults, MixedHeapAndPrivateBuffersAgree) {
  run_threads(3, small_options(), [](ShmTransport& transport) {
    const Place place = transport.rank() == 1 ? Place::kHeap : Place::kPrivate;
    for (const std::int64_t count : {10, 300, 9001}) {
      check_everything(transport, place, DataType::kFloat32, count);
    }
  });
}

TEST(CollectivesDefaults, InPlaceAllGatherAndReduceScatter) {
  run_threads(3, small_options(), [](ShmTransport& transport) {
    for (const std::int64_t count : {5, 3001}) {
      std::vector<float> whole(static_cast<std::size_t>(3 * count), -1.0F);
      std::vector<Piece> pieces;
      for (int peer = 0; peer < 3; ++peer) pieces.push_back({whole.data() + peer * count, count});
      const Piece mine = pieces[static_cast<std::size_t>(transport.rank())];
      std::fill_n(static_cast<float*>(mine.data), count, static_cast<float>(transport.rank()));
      transport.all_gather(call_of(Operator::kAllGather), mine, pieces);
      for (std::int64_t i = 0; i < 3 * count; ++i) {
        ASSERT_EQ(whole[static_cast<std::size_t>(i)], static_cast<float>(i / count));
      }
      transport.reduce_scatter(
          call_of(Operator::kReduceScatter, DataType::kFloat32, ReduceOp::kSum), pieces, mine);
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(static_cast<float*>(mine.data)[i], 3.0F * static_cast<float>(transport.rank()));
      }
    }
  });
}

TEST(CollectivesDefaults, SixtyFourRanks) {
  run_threads(64, {}, [](ShmTransport& transport) {
    for (const std::int64_t count : {1, 100, 20000}) {
      check_all_reduce(transport, Place::kPrivate, DataType::kInt32, ReduceOp::kSum, count);
    }
    check_all_to_all(transport, Place::kPrivate, DataType::kInt16, 5, true);
    check_all_to_all(transport, Place::kPrivate, DataType::kInt16, 700, true);
  });
}

TEST(CollectivesDefaults, ProcessesAsRanks) {
  for (const int size : {2, 3, 4}) {
    const auto outcomes = run_processes(size, {}, [](ShmTransport& transport) {
      for (const std::int64_t count : {1, 1000, 16385, 400000}) {
        check_all_reduce(transport, Place::kPrivate, DataType::kFloat32, ReduceOp::kSum, count);
        check_all_reduce(transport, Place::kHeap, DataType::kFloat32, ReduceOp::kSum, count);
        check_all_to_all(transport, Place::kPrivate, DataType::kFloat32, count / 4, true);
        check_gathers(transport, Place::kPrivate, DataType::kFloat32, count / 4, true);
      }
      if (::testing::Test::HasFailure()) throw std::runtime_error("wrong values");
    });
    for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
  }
}

TEST(CollectivesDefaults, ManyGroupsAtOnce) {
  std::vector<std::thread> groups;
  for (int group = 0; group < 4; ++group) {
    groups.emplace_back([] {
      run_threads(3, small_options(), [](ShmTransport& transport) {
        for (int i = 0; i < 50; ++i) {
          check_all_reduce(transport, Place::kPrivate, DataType::kInt64, ReduceOp::kSum, 10 * i);
        }
      });
    });
  }
  for (std::thread& group : groups) group.join();
}

}  // namespace
}  // namespace tessera::comm::shm::testing
