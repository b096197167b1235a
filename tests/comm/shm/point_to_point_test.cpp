// send and recv: order, tags, sizes, threads, and what happens when the two sides differ.

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "group_fixture.h"
#include "sample_data.h"

namespace tessera::comm::shm::testing {
namespace {

Call send_call(DataType dtype = DataType::kFloat32) { return call_of(Operator::kSend, dtype); }
Call recv_call(DataType dtype = DataType::kFloat32) { return call_of(Operator::kRecv, dtype); }

void send_sample(ShmTransport& transport, DataType dtype, std::int64_t count, int to, int tag) {
  Bytes data = sample(dtype, count, static_cast<std::uint64_t>(tag) + 1);
  transport.send(send_call(dtype), {data.data(), count}, to, tag);
}

void expect_sample(ShmTransport& transport, DataType dtype, std::int64_t count, int from, int tag) {
  Bytes data(static_cast<std::size_t>(count) * size_of(dtype));
  transport.recv(recv_call(dtype), {data.data(), count}, from, tag);
  EXPECT_EQ(data, sample(dtype, count, static_cast<std::uint64_t>(tag) + 1))
      << "[" << count << "] tag " << tag;
}

TEST(PointToPoint, CarriesMessagesOfEverySizeAndType) {
  run_threads(2, small_options(), [](ShmTransport& transport) {
    int tag = 0;
    // Around the mailbox (1 KiB) and its quarters, with and without padding.
    for (const std::int64_t count :
         {0, 1, 7, 8, 31, 63, 64, 65, 247, 248, 249, 255, 256, 257, 5000}) {
      for (const DataType dtype : kAllTypes) {
        ++tag;
        if (transport.rank() == 0) send_sample(transport, dtype, count, 1, tag);
        if (transport.rank() == 1) expect_sample(transport, dtype, count, 0, tag);
      }
    }
  });
}

TEST(PointToPoint, LargeMessagesPassThroughTheDefaultMailbox) {
  run_threads(2, {}, [](ShmTransport& transport) {
    if (transport.rank() == 0) send_sample(transport, DataType::kInt8, 50000001, 1, 5);
    if (transport.rank() == 1) expect_sample(transport, DataType::kInt8, 50000001, 0, 5);
  });
}

TEST(PointToPoint, TagsMayBeReceivedInAnyOrder) {
  run_threads(2, small_options(), [](ShmTransport& transport) {
    const DataType dtype = DataType::kInt32;
    if (transport.rank() == 0) {
      for (const int tag : {1, 2, 3}) send_sample(transport, dtype, 2000, 1, tag);
    } else {
      for (const int tag : {3, 1, 2}) expect_sample(transport, dtype, 2000, 0, tag);
    }
  });
}

TEST(PointToPoint, MessagesOfOneTagKeepTheirOrder) {
  run_threads(2, small_options(), [](ShmTransport& transport) {
    for (std::int32_t i = 0; i < 500; ++i) {
      std::int32_t value = i;
      if (transport.rank() == 0) transport.send(send_call(DataType::kInt32), {&value, 1}, 1, 4);
      if (transport.rank() == 1) {
        value = -1;
        transport.recv(recv_call(DataType::kInt32), {&value, 1}, 0, 4);
        ASSERT_EQ(value, i);
      }
    }
  });
}

TEST(PointToPoint, AnySourceTellsWhoSent) {
  run_threads(4, small_options(), [](ShmTransport& transport) {
    std::int32_t value = transport.rank() * 11;
    if (transport.rank() != 2) {
      transport.send(send_call(DataType::kInt32), {&value, 1}, 2, 0);
      return;
    }
    std::vector<bool> seen(4, false);
    for (int i = 0; i < 3; ++i) {
      const int source = transport.recv(recv_call(DataType::kInt32), {&value, 1}, -1, 0);
      EXPECT_EQ(value, source * 11);
      EXPECT_FALSE(seen[static_cast<std::size_t>(source)]);
      seen[static_cast<std::size_t>(source)] = true;
    }
  });
}

TEST(PointToPoint, ToItself) {
  run_threads(2, small_options(), [](ShmTransport& transport) {
    std::thread sender(
        [&] { send_sample(transport, DataType::kInt16, 4000, transport.rank(), 8); });
    expect_sample(transport, DataType::kInt16, 4000, transport.rank(), 8);
    sender.join();
  });
}

TEST(PointToPoint, ManyThreadsSendAndReceiveBesideCollectives) {
  run_threads(3, small_options(), [](ShmTransport& transport) {
    const int rank = transport.rank();
    const DataType dtype = DataType::kInt64;
    std::vector<std::thread> threads;
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      for (int lane = 0; lane < 2; ++lane) {
        const auto tag_of = [lane](int from, int i) { return from * 1000 + lane * 500 + i; };
        threads.emplace_back([&transport, peer, rank, dtype, tag_of] {
          for (int i = 0; i < 40; ++i) send_sample(transport, dtype, i * 9, peer, tag_of(rank, i));
        });
        threads.emplace_back([&transport, peer, dtype, tag_of] {
          for (int i = 0; i < 40; ++i)
            expect_sample(transport, dtype, i * 9, peer, tag_of(peer, i));
        });
      }
    }
    for (int i = 0; i < 100; ++i) {
      std::int64_t value = rank;
      transport.all_reduce(call_of(Operator::kAllReduce, DataType::kInt64, ReduceOp::kSum),
                           {&value, 1});
      EXPECT_EQ(value, 3);
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(PointToPoint, BetweenProcesses) {
  const auto outcomes = run_processes(2, {}, [](ShmTransport& transport) {
    const int peer = 1 - transport.rank();
    std::thread sender([&] { send_sample(transport, DataType::kFloat32, 1000003, peer, 1); });
    expect_sample(transport, DataType::kFloat32, 1000003, peer, 1);
    sender.join();
    if (::testing::Test::HasFailure()) throw std::runtime_error("wrong values");
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
}

void check_mismatch(Piece sent, DataType sent_type, Piece received, DataType received_type,
                    bool arrives_early, const std::string& expected) {
  const auto texts = texts_of_threads(2, {}, [&](ShmTransport& transport) {
    if (transport.rank() == 0) {
      transport.send(send_call(sent_type), sent, 1, 3);
      if (arrives_early) transport.send(send_call(sent_type), {nullptr, 0}, 1, 4);
      transport.barrier(call_of(Operator::kBarrier));
    } else {
      // Taking tag 4 first makes the message with tag 3 wait in private memory.
      if (arrives_early) transport.recv(recv_call(sent_type), {nullptr, 0}, 0, 4);
      transport.recv(recv_call(received_type), received, 0, 3);
    }
  });
  EXPECT_EQ(texts[0], expected);
  EXPECT_EQ(texts[1], expected);
}

TEST(PointToPoint, DifferentSizesAreAnErrorOnBothSides) {
  std::vector<float> from(30);
  std::vector<float> to(30);
  for (const bool arrives_early : {false, true}) {
    check_mismatch({from.data(), 25}, DataType::kFloat32, {to.data(), 24}, DataType::kFloat32,
                   arrives_early,
                   "comm.recv #1: rank 0 sent float32 [25] with tag 3, but rank 1 receives float32 "
                   "[24]. Give both sides the same type and size.");
    check_mismatch({from.data(), 25}, DataType::kFloat32, {to.data(), 25}, DataType::kInt32,
                   arrives_early,
                   "comm.recv #1: rank 0 sent float32 [25] with tag 3, but rank 1 receives int32 "
                   "[25]. Give both sides the same type and size.");
  }
}

}  // namespace
}  // namespace tessera::comm::shm::testing
