#include "comm/executor.h"

#include <gtest/gtest.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/short_slice.h"
#include "support/ranks.h"
#include "support/refused_threads.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using tessera::testing::RefusedThread;
using tessera::testing::text_of;
using namespace std::chrono_literals;

class ExecutorTest : public ::testing::Test {
 protected:
  c10::intrusive_ptr<EngineWork> work(EngineWork::Run run) {
    return c10::make_intrusive<EngineWork>(executor_, 0, c10d::OpType::ALLREDUCE, "test",
                                           sequence_++, std::vector<at::Tensor>{at::ones({1})},
                                           std::move(run));
  }
  // A work that ends when `gate` is opened.
  c10::intrusive_ptr<EngineWork> blocked(std::shared_future<void> gate) {
    return work([gate](EngineWork&) { gate.wait(); });
  }
  static std::string error_of(EngineWork& work) {
    try {
      work.wait();
    } catch (...) {
      return text_of(std::current_exception());
    }
    return "";
  }

  std::shared_ptr<Executor> executor_ = std::make_shared<Executor>();
  std::uint64_t sequence_ = 0;
};

TEST_F(ExecutorTest, BlockingCallRunsInItsCaller) {
  std::thread::id ran;
  const auto one = work([&](EngineWork&) { ran = std::this_thread::get_id(); });
  executor_->run_now(one);
  EXPECT_EQ(ran, std::this_thread::get_id());
  EXPECT_TRUE(one->isCompleted());
  EXPECT_TRUE(one->isSuccess());
}

TEST_F(ExecutorTest, OperationsRunInTheOrderOfTheirCalls) {
  std::vector<int> order;
  std::vector<c10::intrusive_ptr<EngineWork>> works;
  for (int i = 0; i < 100; ++i) {
    works.push_back(work([&order, i](EngineWork&) { order.push_back(i); }));
    executor_->run_later(works.back());
  }
  const auto last = work([&order](EngineWork&) { order.push_back(100); });
  executor_->run_now(last);
  ASSERT_EQ(order.size(), 101U);
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(order[i], i);
  for (const auto& one : works) EXPECT_TRUE(one->wait());
}

TEST_F(ExecutorTest, NeverTwoOperationsAtOnce) {
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  std::vector<c10::intrusive_ptr<EngineWork>> works;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        c10::intrusive_ptr<EngineWork> one;
        {
          std::lock_guard lock(mutex);
          one = work([&](EngineWork&) {
            most = std::max(most.load(), ++inside);
            std::this_thread::yield();
            --inside;
          });
        }
        if ((i + t) % 2 == 0) {
          executor_->run_now(one);
        } else {
          executor_->run_later(one);
          one->wait();
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(most, 1);
}

TEST_F(ExecutorTest, AWaiterRunsWhatIsQueued) {
  // The thread is inside the first one; whoever waits for the third runs second and third as soon
  // as the first is done, or the thread does. Nobody waits for the other.
  std::promise<void> gate;
  executor_->run_later(blocked(gate.get_future().share()));
  const auto second = work([](EngineWork&) {});
  const auto third = work([](EngineWork&) {});
  executor_->run_later(second);
  executor_->run_later(third);
  EXPECT_FALSE(second->isCompleted());
  std::thread opener([&] {
    std::this_thread::sleep_for(20ms);
    gate.set_value();
  });
  EXPECT_TRUE(third->wait());
  EXPECT_TRUE(second->isCompleted());
  opener.join();
}

TEST_F(ExecutorTest, OperationsAreAnnouncedWhenQueuedBehindAnnouncedOnes) {
  std::vector<int> announced;
  std::promise<void> gate;
  const auto gate_opens = gate.get_future().share();
  std::vector<c10::intrusive_ptr<EngineWork>> works;
  const auto queue = [&](bool is_announced) {
    works.push_back(blocked(gate_opens));
    const int index = static_cast<int>(works.size()) - 1;
    if (is_announced) {
      works.back()->set_announcement([&announced, index] { announced.push_back(index); });
    }
    executor_->run_later(works.back());
  };
  queue(true);
  queue(true);
  EXPECT_EQ(announced, (std::vector<int>{0, 1}));
  queue(false);
  queue(true);  // would overtake the one before it
  EXPECT_EQ(announced, (std::vector<int>{0, 1}));
  gate.set_value();
  works.back()->wait();
  // All are done, but whoever ran the last one may still be about to say so.
  for (int i = 0; i < 1000 && announced.size() < 3; ++i) {
    queue(true);
    works.back()->wait();
  }
  EXPECT_EQ(announced.size(), 3U);
}

TEST_F(ExecutorTest, ABlockingOperationIsNotAnnouncedAndNobodyOvertakesIt) {
  bool is_announced = false;
  const auto later = work([](EngineWork&) {});
  later->set_announcement([&] { is_announced = true; });
  const auto now = work([&](EngineWork&) { executor_->run_later(later); });
  now->set_announcement([] { ADD_FAILURE() << "it runs at once"; });
  executor_->run_now(now);
  EXPECT_TRUE(later->wait());
  EXPECT_FALSE(is_announced);
}

TEST_F(ExecutorTest, ARelayRunsItsThreadInShortSlices) {
  const auto slice_here = [] {
    std::uint64_t attributes[6] = {};  // the slice is the fourth
    return ::syscall(SYS_sched_getattr, 0, attributes, sizeof(attributes), 0) == 0 ? attributes[3]
                                                                                   : 0;
  };
  const std::uint64_t before = slice_here();
  std::uint64_t within = 0;
  std::uint64_t started = 0;
  {
    const ShortSliceGuard guard;
    within = slice_here();
    std::thread([&] { started = slice_here(); }).join();
  }
  EXPECT_EQ(slice_here(), before);
  if (within == before) GTEST_SKIP() << "slices cannot be chosen here";
  EXPECT_LT(within, before);
  EXPECT_EQ(started, within);
  for (const bool is_relay : {false, true}) {
    executor_ = std::make_shared<Executor>(Executor::Options{.is_relay = is_relay});
    std::uint64_t found = 0;
    const auto one = work([&](EngineWork&) { found = slice_here(); });
    const auto future = one->getFuture();  // waited for by somebody who does not help
    executor_->run_later(one);
    future->wait();
    EXPECT_EQ(found, is_relay ? within : before);
  }
}

TEST_F(ExecutorTest, WaitWithALimitThrowsAndTheOperationGoesOn) {
  std::promise<void> gate;
  const auto one = blocked(gate.get_future().share());
  executor_->run_later(one);
  try {
    one->wait(10ms);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_STREQ(error.what(), "comm.wait #0: Timed out: not done after 10 ms.");
  }
  gate.set_value();
  EXPECT_TRUE(one->wait());
}

TEST_F(ExecutorTest, ExceptionsComeOutOfWaitAndFuture) {
  const auto one = work([](EngineWork&) { throw std::runtime_error("broken"); });
  const auto before = one->getFuture();
  executor_->run_now(one);
  EXPECT_EQ(error_of(*one), "broken");
  EXPECT_EQ(error_of(*one), "broken");
  EXPECT_FALSE(one->isSuccess());
  EXPECT_TRUE(before->hasError());
  EXPECT_TRUE(one->getFuture()->hasError());
  // The next one is not concerned.
  const auto two = work([](EngineWork&) {});
  executor_->run_now(two);
  EXPECT_TRUE(two->wait());
}

TEST_F(ExecutorTest, FutureHoldsTheOutputs) {
  std::promise<void> gate;
  const auto one = blocked(gate.get_future().share());
  executor_->run_later(one);
  const auto future = one->getFuture();
  EXPECT_FALSE(future->completed());
  gate.set_value();
  future->wait();
  EXPECT_EQ(future->value().toTensorVector().size(), 1U);
}

TEST_F(ExecutorTest, ACallbackMayUseTheExecutor) {
  const auto one = work([](EngineWork&) {});
  const auto two = work([](EngineWork&) {});
  one->getFuture()->addCallback([&](c10::ivalue::Future&) { executor_->run_later(two); });
  executor_->run_later(one);
  EXPECT_TRUE(one->wait());
  for (int i = 0; i < 1000 && !two->isCompleted(); ++i) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(two->isCompleted());
}

TEST_F(ExecutorTest, WhatACallbackStartsComesBeforeWhatIsQueued) {
  // Nested twice, blocking and not, waited for by work and by future.
  std::vector<std::string> order;
  const auto named = [&](const std::string& name) {
    return work([&order, name](EngineWork&) { order.push_back(name); });
  };
  std::promise<void> gate;
  const auto first = blocked(gate.get_future().share());
  const auto done = first->getFuture()->then(
      [&](c10::ivalue::Future&) -> c10::IValue {
        const auto second = named("second");
        second->getFuture()->addCallback([&](c10::ivalue::Future&) {
          executor_->run_now(named("third"));
          order.push_back("callback of second");
        });
        executor_->run_later(second);
        second->getFuture()->wait();
        const auto fourth = named("fourth");
        executor_->run_later(fourth);
        fourth->wait();
        return true;
      },
      c10::BoolType::get());
  executor_->run_later(first);
  const auto last = named("last");
  executor_->run_later(last);
  gate.set_value();
  done->waitAndThrow();
  last->wait();
  EXPECT_EQ(order,
            (std::vector<std::string>{"second", "third", "callback of second", "fourth", "last"}));
}

TEST_F(ExecutorTest, NumbersFollowTheOrderInWhichOperationsRun) {
  std::vector<std::uint64_t> numbers;
  const auto numbered = [&] {
    return work([&](EngineWork& self) { numbers.push_back(self.position()); });
  };
  std::promise<void> gate;
  const auto first = blocked(gate.get_future().share());
  first->set_num_steps(3);
  first->getFuture()->addCallback([&](c10::ivalue::Future&) { executor_->run_now(numbered()); });
  executor_->run_later(first);
  const auto last = numbered();
  executor_->run_later(last);  // before the nested one is made
  gate.set_value();
  last->wait();
  EXPECT_EQ(numbers, (std::vector<std::uint64_t>{3, 4}));
}

TEST_F(ExecutorTest, NothingIsAnnouncedBehindAnOperationWithCallbacks) {
  std::promise<void> gate;
  const auto gate_opens = gate.get_future().share();
  for (const bool is_quiet : {true, false}) {
    executor_ = std::make_shared<Executor>();
    const auto first = blocked(gate_opens);
    first->set_announcement([] {});
    executor_->run_later(first);
    const auto future = is_quiet ? quiet_future(*first) : first->getFuture();
    bool is_announced = false;
    const auto second = work([](EngineWork&) {});
    second->set_announcement([&] { is_announced = true; });
    executor_->run_later(second);
    EXPECT_EQ(is_announced, is_quiet);
    if (is_quiet) gate.set_value();
    second->wait();
  }
}

TEST_F(ExecutorTest, ACallbackMayWaitForWhatWasQueuedBefore) {
  std::promise<void> gate;
  const auto first = blocked(gate.get_future().share());
  const auto second = work([](EngineWork&) {});
  const auto done = first->getFuture()->then(
      [&](c10::ivalue::Future&) -> c10::IValue { return second->wait(); }, c10::BoolType::get());
  executor_->run_later(first);
  executor_->run_later(second);
  gate.set_value();
  done->waitAndThrow();
  EXPECT_TRUE(second->isSuccess());
}

TEST_F(ExecutorTest, TwoExecutorsCallEachOther) {
  const auto other = std::make_shared<Executor>();
  const auto first = work([](EngineWork&) {});
  std::vector<int> order;
  const auto done = first->getFuture()->then(
      [&](c10::ivalue::Future&) -> c10::IValue {
        const auto there = c10::make_intrusive<EngineWork>(
            other, 0, c10d::OpType::ALLREDUCE, "test", 0, std::vector<at::Tensor>{},
            [&](EngineWork&) { order.push_back(1); });
        there->getFuture()->addCallback([&](c10::ivalue::Future&) {
          // On the thread of `first` if that came to run it.
          order.push_back(2);
        });
        other->run_now(there);
        executor_->run_now(work([&](EngineWork&) { order.push_back(3); }));
        return true;
      },
      c10::BoolType::get());
  executor_->run_later(first);
  done->waitAndThrow();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST_F(ExecutorTest, WhatACallbackKeepsWaitingForEverFailsAtItsLimit) {
  std::string told;
  executor_ = std::make_shared<Executor>(
      Executor::Options{.on_given_up = [&](ErrorKind, const std::string& text) { told = text; }});
  std::promise<void> gate;
  const auto first = blocked(gate.get_future().share());
  const auto second = work([](EngineWork&) { ADD_FAILURE() << "its turn never came"; });
  second->set_limit(200ms);
  std::string seen;
  const auto done = first->getFuture()->then(
      [&](c10::ivalue::Future&) -> c10::IValue {
        // Unlike the work, the future cannot know that it is waited for in a callback.
        const auto future = second->getFuture();
        future->wait();
        seen = text_of(future->exception_ptr());
        return true;
      },
      c10::BoolType::get());
  executor_->run_later(first);
  executor_->run_later(second);
  gate.set_value();
  done->waitAndThrow();
  EXPECT_EQ(seen,
            "comm.all_reduce #1: Timed out after 200 ms behind a callback of all_reduce that does "
            "not return. Wait in a callback only for operations that it started itself, or raise "
            "the time limit.");
  EXPECT_EQ(told, seen);
  EXPECT_EQ(error_of(*second), seen);
}

TEST_F(ExecutorTest, WithoutAThreadNothingIsAnnouncedOrQueued) {
  std::string told;
  executor_ = std::make_shared<Executor>(
      Executor::Options{.on_given_up = [&](ErrorKind kind, const std::string& text) {
        told = name_of(kind) + (": " + text);
      }});
  const auto refused_work = work([](EngineWork&) { ADD_FAILURE() << "it was refused"; });
  refused_work->set_announcement([] { ADD_FAILURE() << "it was refused"; });
  std::string seen;
  {
    const RefusedThread refused(1);
    try {
      executor_->run_later(refused_work);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
      seen = error.what();
    }
    EXPECT_TRUE(refused.was_refused());
  }
  EXPECT_TRUE(
      seen.starts_with("comm.all_reduce: process " + std::to_string(::getpid()) + " on host "))
      << seen;
  EXPECT_NE(seen.find(" is given no further thread: Resource temporarily unavailable. It has "),
            std::string::npos)
      << seen;
  EXPECT_TRUE(seen.ends_with("tart fewer processes on that host.") ||
              seen.ends_with("look at its memory."))
      << seen;
  EXPECT_EQ(told, "unavailable: " + seen);
  EXPECT_FALSE(refused_work->isCompleted());
  // Once there are threads again.
  const auto next = work([](EngineWork&) {});
  executor_->run_later(next);
  const auto future = next->getFuture();  // waited for by somebody who does not help
  future->wait();
  EXPECT_TRUE(next->isSuccess());
}

TEST_F(ExecutorTest, WithoutAThreadToWatchThemCallbacksAndWhatFollowsRun) {
  std::promise<void> gate;
  const auto first = blocked(gate.get_future().share());
  const auto second = work([](EngineWork&) {});
  const auto third = work([](EngineWork&) {});
  const auto done = first->getFuture()->then(
      [&](c10::ivalue::Future&) -> c10::IValue {
        executor_->run_now(third);
        return true;
      },
      c10::BoolType::get());
  executor_->run_later(first);
  executor_->run_later(second);
  const RefusedThread refused(1);
  gate.set_value();
  done->waitAndThrow();
  EXPECT_TRUE(second->wait());
  EXPECT_TRUE(third->isSuccess());
  EXPECT_TRUE(refused.was_refused());
}

TEST_F(ExecutorTest, StopFailsWhatIsQueued) {
  std::promise<void> begun;
  std::promise<void> gate;
  const auto running = work([&](EngineWork&) {
    begun.set_value();
    gate.get_future().wait();
  });
  const auto queued = work([](EngineWork&) { ADD_FAILURE() << "ran after the stop"; });
  executor_->run_later(running);
  begun.get_future().wait();  // what has not begun is queued, too
  executor_->run_later(queued);
  std::thread stopper([&] { executor_->stop("the test is over"); });
  for (int i = 0; i < 1000 && !queued->isCompleted(); ++i) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(error_of(*queued), "comm: the test is over with operations still queued.");
  EXPECT_FALSE(running->isCompleted());
  gate.set_value();
  stopper.join();
  EXPECT_TRUE(running->wait());
}

TEST_F(ExecutorTest, AfterStopEverythingFailsAtOnce) {
  executor_->stop("the test is over");
  const auto later = work([](EngineWork&) {});
  executor_->run_later(later);
  EXPECT_EQ(error_of(*later), "comm: the group is closed. Make a new one.");
  const auto now = work([](EngineWork&) {});
  executor_->run_now(now);
  EXPECT_EQ(error_of(*now), "comm: the group is closed. Make a new one.");
  executor_->stop("again");  // harmless
}

TEST_F(ExecutorTest, MayEndOnItsOwnThreadWithItsLastOperation) {
  for (int i = 0; i < 20; ++i) {
    std::promise<void> gate;
    auto last = blocked(gate.get_future().share());
    executor_->run_later(last);
    const std::weak_ptr<Executor> watch = executor_;
    executor_ = std::make_shared<Executor>();
    last.reset();  // from here on only the executor's queue knows both
    gate.set_value();
    for (int k = 0; k < 1000 && !watch.expired(); ++k) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(watch.expired());
  }
}

TEST_F(ExecutorTest, LetsGoOfTensorsWhenDone) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  const auto one = work([held = std::move(held)](EngineWork&) {});
  executor_->run_now(one);
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace tessera::comm
