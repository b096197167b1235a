// A forked child reads what its parent has in the segment, and changes nothing of it.

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "group_fixture.h"

namespace tessera::comm::shm::testing {
namespace {

/// The exit code of a child that runs `body`.
template <typename Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Fork, AChildReadsTensorsAndWritesACopy) {
  run_threads(1, small_options(), [](ShmTransport& transport) {
    const auto block = transport.allocate(10000);
    auto* bytes = static_cast<unsigned char*>(block.get());
    std::memset(bytes, 7, 10000);
    EXPECT_EQ(in_child([&] {
                const bool reads = bytes[0] == 7 && bytes[9999] == 7;
                std::memset(bytes, 9, 10000);
                return reads && bytes[9999] == 9 ? 0 : 1;
              }),
              0);
    EXPECT_EQ(bytes[0], 7);
    EXPECT_EQ(bytes[9999], 7);
  });
}

TEST(Fork, AChildThatLetsGoLeavesTheParentsMemory) {
  run_threads(1, small_options(), [](ShmTransport& transport) {
    auto block = transport.allocate(10000);
    std::memset(block.get(), 7, 10000);
    EXPECT_EQ(in_child([&] {
                block.reset();
                return 0;
              }),
              0);
    EXPECT_EQ(static_cast<unsigned char*>(block.get())[9999], 7);
    EXPECT_NE(transport.allocate(1 << 20), nullptr);
  });
}

TEST(Fork, AChildCannotTakeItsParentsPlace) {
  const auto outcomes = run_processes(2, {}, [](ShmTransport& transport) {
    const Call sum = call_of(Operator::kAllReduce, DataType::kFloat32, ReduceOp::kSum);
    if (transport.rank() == 0) {
      // Comes first, with a value that must not count.
      in_child([&] {
        float wrong = 100;
        Call call = sum;
        call.deadline = Clock::now() + std::chrono::milliseconds(100);
        try {
          transport.all_reduce(call, {&wrong, 1});
        } catch (const Failure&) {
        }
        return 0;
      });
    }
    float value = static_cast<float>(transport.rank() + 1);
    transport.all_reduce(sum, {&value, 1});
    if (value != 3) throw std::runtime_error("got " + std::to_string(value));
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
}

}  // namespace
}  // namespace tessera::comm::shm::testing
