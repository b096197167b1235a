// Who is taken and who is refused before anything is computed.

#include "serving/batcher.h"

#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <thread>

#include "samples.h"
#include "serving/verification.h"
#include "support/refused_threads.h"

namespace tessera::serving {
namespace {

struct World {
  explicit World(std::int64_t num_samples) : small(), samples(small, num_samples) {
    export_model(small, folder);
    model.emplace(folder / "pkg");
  }
  Job job(Clock::time_point deadline) {
    Job job;
    job.request.num_samples = samples.num_samples;
    job.request.dense = samples.dense;
    for (std::size_t f = 0; f < 3; ++f) {
      job.request.features.push_back({samples.ids[f], samples.lengths[f], {}});
    }
    job.arrived = Clock::now();
    job.deadline = deadline;
    return job;
  }
  // The code of one that must be taken, of so many bytes.
  int send(Batcher& batcher, Clock::time_point deadline, std::uint64_t num_bytes,
           std::shared_ptr<Room> room = nullptr) {
    std::promise<int> code;
    Job sent = job(deadline);
    sent.num_bytes = num_bytes;
    sent.room = std::move(room);
    sent.done = [&](InferRequest, const Outcome& outcome) { code.set_value(outcome.code); };
    batcher.add(std::move(sent));
    return code.get_future().get();
  }
  // Its code, or 429 if it was not taken; and how long it took.
  int ask(Batcher& batcher, Clock::time_point deadline, Clock::duration* time = nullptr) {
    Job asked = job(deadline);
    std::promise<int> code;
    asked.done = [&](InferRequest, Outcome outcome) { code.set_value(outcome.code); };
    const auto begin = Clock::now();
    try {
      batcher.add(std::move(asked));
    } catch (const HttpError& error) {
      return error.code();
    }
    const int found = code.get_future().get();
    if (time != nullptr) *time = Clock::now() - begin;
    return found;
  }

  const Folder folder;
  const SmallModel small;
  const Samples samples;
  std::optional<Model> model;
  ServerOptions options;
  Metrics metrics;
  ProcessGauges gauges;
};

TEST(ServingBatcher, OneThatWaitsForNobodyIsComputedHoweverLongItTookBefore) {
  World world(20'000);
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  Clock::duration time{};
  ASSERT_EQ(world.ask(batcher, Clock::now() + std::chrono::hours(1), &time), 200);
  // Less time than it is known to take: it may come too late, but once the worker is done with the
  // first nobody stands in front of it.
  bool is_taken = false;
  const auto limit = Clock::now() + std::chrono::seconds(20);
  while (!is_taken && Clock::now() < limit) {
    is_taken = world.ask(batcher, Clock::now() + time / 2) != 429;
  }
  EXPECT_TRUE(is_taken);
}

TEST(ServingBatcher, ItWorksWithTheThreadsThatItGets) {
  World world(10);
  world.options.workers = 3;
  const auto later = Clock::now() + std::chrono::hours(1);
  for (std::int64_t n = 2; n <= 4; ++n) {
    const testing::RefusedThread refused(n);
    Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
    EXPECT_EQ(refused.was_refused(), n <= 3);
    EXPECT_EQ(world.ask(batcher, later), 200);
  }
  const testing::RefusedThread refused(1);
  try {
    const Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(),
                 "serving: the system gives no thread to compute answers. Raise its limit of "
                 "processes (ulimit -u, pids.max), or end others.");
  }
}

TEST(ServingVerification, WithoutAThreadItSaysSoAndTheModelAnswers) {
  World world(10);
  std::string told;
  Verification verification(*world.model, world.metrics,
                            [&](const std::string& line) { told += line; });
  {
    const testing::RefusedThread refused(1);
    verification.start(1);
    EXPECT_TRUE(refused.was_refused());
  }
  EXPECT_TRUE(told.starts_with("the package is not compared with its sums: no thread to do it: "))
      << told;
  EXPECT_NE(world.metrics.verified_package, 1);
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  EXPECT_EQ(world.ask(batcher, Clock::now() + std::chrono::hours(1)), 200);
  verification.start(1);  // with the next package there may be one
  const auto limit = Clock::now() + std::chrono::seconds(20);
  while (world.metrics.verified_package != 1 && Clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(world.metrics.verified_package, 1);
}

TEST(ServingBatcher, OneThatCannotBeInTimeBehindOthersIsRefusedAtOnce) {
  World world(20'000);
  world.options.queue_samples = 1'000'000;
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  ASSERT_EQ(world.ask(batcher, Clock::now() + std::chrono::hours(1)), 200);
  std::promise<void> all;
  std::atomic<int> num_open{30};
  for (int i = 0; i < 30; ++i) {
    Job job = world.job(Clock::now() + std::chrono::hours(1));
    job.done = [&](InferRequest, const Outcome&) {
      if (--num_open == 0) all.set_value();
    };
    batcher.add(std::move(job));
  }
  // Thirty times 20,000 samples stand in front of one that has no time.
  EXPECT_EQ(world.ask(batcher, Clock::now() + std::chrono::microseconds(1)), 429);
  EXPECT_THROW(batcher.check_room(100, Clock::now() + std::chrono::microseconds(1)), HttpError);
  EXPECT_EQ(world.metrics.refusals[static_cast<std::size_t>(Refusal::kDeadline)].load(), 2U);
  all.get_future().wait();
}

// While bodies are being read, those who come are measured by all who were let in before.
TEST(ServingBatcher, WhoIsLetInKeepsItsRoomUntilItsBodyIsThere) {
  World world(10);
  world.options.queue_samples = 25;
  world.options.latency_budget = std::chrono::hours(1);
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  const auto later = Clock::now() + std::chrono::hours(1);
  constexpr std::uint64_t kBytes = 1000;
  const auto send = [&](std::shared_ptr<Room> room) {
    return world.send(batcher, later, kBytes, std::move(room));
  };
  ASSERT_EQ(send(nullptr), 200);  // so that it knows how many bytes a sample has
  auto one = batcher.keep_room(kBytes, later);
  auto two = batcher.keep_room(kBytes, later);
  try {
    batcher.keep_room(kBytes, later);
    ADD_FAILURE() << "thirty samples were let in";
  } catch (const HttpError& error) {
    EXPECT_EQ(error.code(), 429);
    EXPECT_STREQ(error.what(), "20 samples wait already");
  }
  EXPECT_THROW(batcher.check_room(kBytes, later), HttpError);
  // Who has been let in comes before those whose bodies are still being read.
  EXPECT_NO_THROW(batcher.check_room(kBytes, later, /*has_room=*/true));
  EXPECT_EQ(send(std::move(two)), 200);
  auto three = batcher.keep_room(kBytes, later);
  EXPECT_THROW(batcher.keep_room(kBytes, later), HttpError);
  one.reset();  // the client is gone
  EXPECT_NO_THROW(batcher.keep_room(kBytes, later));
}

TEST(ServingBatcher, RoomIsNotKeptForWhoSendsTooSlowly) {
  World world(10);
  world.options.queue_samples = 25;
  world.options.latency_budget = std::chrono::milliseconds(0);
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  const auto later = Clock::now() + std::chrono::hours(1);
  ASSERT_EQ(world.send(batcher, later, 1000), 200);
  std::vector<std::shared_ptr<Room>> rooms;
  for (int i = 0; i < 100; ++i) rooms.push_back(batcher.keep_room(1000, later));
  rooms.clear();
  EXPECT_EQ(world.send(batcher, later, 1000), 200);
}

TEST(ServingBatcher, NobodyWaitsForCompanyLongerThanItsDeadlineAllows) {
  World world(4);
  world.options.batch_wait = std::chrono::hours(1);
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  Clock::duration time{};
  EXPECT_EQ(world.ask(batcher, Clock::now() + std::chrono::seconds(2), &time), 200);
  EXPECT_GE(time, std::chrono::milliseconds(500));  // it did wait
  EXPECT_LT(time, std::chrono::seconds(2));
  // One that has less time is not held by one that has more.
  std::promise<int> first;
  Job job = world.job(Clock::now() + std::chrono::hours(1));
  job.done = [&](InferRequest, const Outcome& outcome) { first.set_value(outcome.code); };
  batcher.add(std::move(job));
  EXPECT_EQ(world.ask(batcher, Clock::now() + std::chrono::seconds(2), &time), 200);
  EXPECT_LT(time, std::chrono::seconds(2));
  EXPECT_EQ(first.get_future().get(), 200);
}

TEST(ServingBatcher, AFullBatchWaitsForNobody) {
  World world(4);
  world.options.batch_wait = std::chrono::hours(1);
  world.options.max_batch = 4;
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  Clock::duration time{};
  EXPECT_EQ(world.ask(batcher, Clock::now() + std::chrono::hours(2), &time), 200);
  EXPECT_LT(time, std::chrono::seconds(30));
}

TEST(ServingBatcher, TheQueueHasAnEnd) {
  World world(100);
  world.options.queue_samples = 99;
  world.options.queue_bytes = 1000;
  Batcher batcher(*world.model, world.options, world.metrics, world.gauges);
  const auto later = Clock::now() + std::chrono::hours(1);
  EXPECT_EQ(world.ask(batcher, later), 429);
  EXPECT_NO_THROW(batcher.check_room(1000, later));
  EXPECT_THROW(batcher.check_room(1001, later), HttpError);
  EXPECT_EQ(world.metrics.refusals[static_cast<std::size_t>(Refusal::kQueueFull)].load(), 2U);
}

}  // namespace
}  // namespace tessera::serving
