#include "tessera/comm/group.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/comm/failure.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;

std::string text_of_throwing(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    return text_of(std::current_exception());
  }
  return "";
}

TEST(Group, MissingRanksAreNamed) {
  GroupOptions options = test_options();
  options.timeout = 300ms;
  options.name = "graph";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  try {
    make_group(store, 1, 4, options);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kRendezvous);
    EXPECT_EQ(error.ranks(), (std::vector<int>{0, 2, 3}));
    EXPECT_STREQ(
        error.what(),
        "comm.init: ranks 0, 2 and 3 of 4 did not join group 'graph' within 0.300 s. Check "
        "that all ranks were started with the same WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT.");
  }
}

TEST(Group, WrongRankOrSizeIsRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(text_of_throwing([&] { make_group(store, 2, 2, test_options()); }),
            "comm.init: rank 2 is outside a group of 2 (0 to 1).");
  EXPECT_EQ(text_of_throwing([&] { make_group(store, 0, 0, test_options()); }),
            "comm.init: a group has at least one rank, not 0.");
  GroupOptions options = test_options();
  options.world_ranks = {1, 2, 3};
  EXPECT_EQ(text_of_throwing([&] { make_group(store, 0, 2, options); }),
            "comm.init: 3 world ranks were given for a group of 2.");
}

TEST(Group, DisagreeingSizesAreRaisedOnAllRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      texts[rank] =
          text_of_throwing([&] { make_group(store, rank, rank == 0 ? 2 : 3, test_options()); });
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
  EXPECT_NE(texts[0].find("Give every process the same WORLD_SIZE."), std::string::npos);
}

TEST(Group, MemoryIsGivenWhereItIsAskedFor) {
  // Gradient buckets of a model on another device must not come from the segment.
  run_ranks(2, [](const Group& group) {
    const auto engine = group.process_group()->getBackend(at::kCPU);
    EXPECT_TRUE(engine->allocateTensor(100, at::TensorOptions(at::kFloat)).is_cpu());
    EXPECT_TRUE(engine->allocateTensor(100, at::TensorOptions(at::kMeta)).is_meta());
  });
}

TEST(Group, SameStoreMayBeUsedAgain) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const Group group = make_group(store, rank, 2, test_options());
        at::Tensor ones = at::ones({1});
        all_reduce_(ones, group);
        EXPECT_EQ(ones.item<float>(), 2);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(Group, SubgroupsKnowTheirWorldRanks) {
  run_ranks(4, [](const Group& world) {
    const auto odd = world.subgroup({1, 3}, "odd");
    EXPECT_EQ(odd != nullptr, world.rank() % 2 == 1);
    if (!odd) return;
    EXPECT_EQ(odd->size(), 2);
    EXPECT_EQ(odd->world_rank(0), 1);
    EXPECT_EQ(odd->world_rank(1), 3);
    const auto last = odd->subgroup({1}, "last");
    if (world.rank() == 3) {
      EXPECT_EQ(last->world_rank(0), 3);
    }
  });
}

TEST(Group, WrongSubgroupsAreRefused) {
  run_ranks(2, [](const Group& world) {
    EXPECT_EQ(text_of_throwing([&] { world.subgroup({}, "a"); }),
              "comm.subgroup: a group needs at least one rank.");
    EXPECT_EQ(text_of_throwing([&] { world.subgroup({0, 2}, "a"); }),
              "comm.subgroup: 2 is not a rank of a group of 2.");
    EXPECT_EQ(text_of_throwing([&] { world.subgroup({1, 0}, "a"); }),
              "comm.subgroup: the ranks must ascend, but 1 comes before 0.");
  });
}

TEST(Group, AbortEndsWaitsOfAllRanksAndStays) {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto errors = run_ranks_collecting(
        3,
        [](const Group& group) {
          at::Tensor tensor = at::ones({10});
          all_reduce_(tensor, group);
          if (group.rank() == 2) {
            std::this_thread::sleep_for(50ms);
            group.abort("enough");
          }
          EXPECT_EQ(text_of_throwing([&] { all_reduce_(tensor, group); }),
                    "comm: group 'world' was aborted by rank 2: enough");
          all_reduce_(tensor, group);
        },
        test_options(engine));
    for (const auto& error : errors) {
      EXPECT_EQ(text_of(error), "comm: group 'world' was aborted by rank 2: enough");
    }
  }
}

TEST(Group, TimeoutIsTheSameOnAllRanksAndStays) {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    GroupOptions options = test_options(engine);
    options.timeout = 400ms;
    std::atomic<int> num_done{0};
    const auto errors = run_ranks_collecting(
        3,
        [&](const Group& group) {
          barrier(group);
          if (group.rank() == 1) {
            while (num_done < 2) std::this_thread::sleep_for(5ms);
          }
          try {
            barrier(group);
          } catch (...) {
            ++num_done;
            throw;
          }
        },
        options);
    EXPECT_EQ(text_of(errors[0]), text_of(errors[2]));
    EXPECT_NE(text_of(errors[0]).find("comm.barrier #1: no answer from rank"), std::string::npos);
    // The late rank finds the group ended.
    EXPECT_EQ(text_of(errors[1]), text_of(errors[0]));
  }
}

TEST(Group, DestroyedWithOperationsUnderWay) {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    run_ranks(
        2,
        [](const Group& world) {
          std::vector<Awaitable<at::Tensor>> pending;
          {
            const auto group = world.subgroup({0, 1}, "short");
            if (world.rank() == 0) {
              for (int i = 0; i < 3; ++i) {
                pending.push_back(all_reduce_async(at::ones({1000}), *group));
              }
            }
          }
          // Rank 1 never came; rank 0's group is gone without waiting for the limit.
          for (auto& one : pending) EXPECT_THROW(one.wait(), Error);
          barrier(world);
        },
        test_options(engine));
  }
}

TEST(Group, ReportedFailureReachesEveryGroupOfTheProcess) {
  // All ranks are threads of one process here, so every rank is told of every rank's failure.
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto errors = run_ranks_collecting(
        2,
        [](const Group& world) {
          const auto group = world.subgroup({0, 1}, "inner");
          barrier(*group);
          if (world.rank() == 0) {
            guarded([] { throw std::runtime_error("no more data"); });
          }
          barrier(*group);
        },
        test_options(engine));
    EXPECT_EQ(text_of(errors[0]), "no more data");
    EXPECT_NE(text_of(errors[1]).find("failed: no more data"), std::string::npos)
        << text_of(errors[1]);
  }
}

TEST(Group, OptionsComeFromTheEnvironment) {
  ::setenv("TESSERA_TIMEOUT", "1.5", 1);
  ::setenv("TESSERA_ENGINE", "gloo", 1);
  ::setenv("TESSERA_CHECK_COLLECTIVES", "0", 1);
  const GroupOptions options = default_group_options();
  EXPECT_EQ(options.timeout, 1500ms);
  EXPECT_EQ(options.engine, Engine::kGloo);
  EXPECT_FALSE(options.check_gloo_calls);
  ::setenv("TESSERA_TIMEOUT", "-1", 1);
  EXPECT_EQ(text_of_throwing([] { default_group_options(); }),
            "comm.init: TESSERA_TIMEOUT is '-1', not a positive number of seconds.");
  ::setenv("TESSERA_TIMEOUT", "1", 1);
  ::setenv("TESSERA_ENGINE", "mpi", 1);
  EXPECT_EQ(text_of_throwing([] { default_group_options(); }),
            "comm.init: TESSERA_ENGINE is 'mpi'. It may be auto, shm or gloo.");
  for (const char* name : {"TESSERA_TIMEOUT", "TESSERA_ENGINE", "TESSERA_CHECK_COLLECTIVES"}) {
    ::unsetenv(name);
  }
  EXPECT_EQ(default_group_options().timeout, 10min);
}

TEST(Group, InitWithoutALauncherIsAWorldOfOne) {
  const Group world = init();
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(all_reduce(at::ones({2}), world).sum().item<float>(), 2);
}

}  // namespace
}  // namespace tessera::comm
