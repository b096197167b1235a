#include "tessera/comm/awaitable.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace tessera::comm {
namespace {

TEST(Awaitable, WaitsOnce) {
  int waits = 0;
  const Awaitable<int> result([&] {
    ++waits;
    return 7;
  });
  EXPECT_FALSE(result.has_value());
  EXPECT_EQ(waits, 0);
  EXPECT_EQ(result.wait(), 7);
  EXPECT_EQ(result.wait(), 7);
  EXPECT_EQ(waits, 1);
  EXPECT_TRUE(result.has_value());
}

TEST(Awaitable, CopiesShareTheResult) {
  int waits = 0;
  const Awaitable<int> first([&] { return ++waits; });
  const Awaitable<int> second = first;
  EXPECT_EQ(second.wait(), 1);
  EXPECT_EQ(first.wait(), 1);
}

TEST(Awaitable, TellsWhetherTheResultIsHere) {
  bool is_here = false;
  const Awaitable<int> asked([] { return 7; }, [&] { return is_here; });
  EXPECT_FALSE(asked.is_ready());
  is_here = true;
  EXPECT_TRUE(asked.is_ready());
  EXPECT_FALSE(asked.has_value());
  EXPECT_EQ(asked.wait(), 7);
  is_here = false;  // it was; nobody asks again
  EXPECT_TRUE(asked.is_ready());

  const Awaitable<int> unknown([] { return 7; });
  EXPECT_FALSE(unknown.is_ready());
  EXPECT_EQ(unknown.wait(), 7);
  EXPECT_TRUE(unknown.is_ready());

  const Awaitable<int> failing([]() -> int { throw std::runtime_error("gone"); });
  EXPECT_THROW(failing.wait(), std::runtime_error);
  EXPECT_TRUE(failing.is_ready());
}

TEST(Awaitable, CallbacksRunInOrderWhenWaitedFor) {
  Awaitable<std::string> result([] { return std::string("a"); });
  result.add_callback([](std::string text) { return text + "b"; });
  result.add_callback([](std::string text) { return text + "c"; });
  EXPECT_EQ(result.wait(), "abc");
  result.add_callback([](std::string text) { return text + "d"; });
  EXPECT_EQ(result.wait(), "abcd");
}

TEST(Awaitable, ErrorIsThrownByEveryWait) {
  int waits = 0;
  Awaitable<int> result([&]() -> int {
    ++waits;
    throw std::runtime_error("gone");
  });
  bool called = false;
  result.add_callback([&](int value) {
    called = true;
    return value;
  });
  EXPECT_THROW(result.wait(), std::runtime_error);
  EXPECT_THROW(result.wait(), std::runtime_error);
  EXPECT_EQ(waits, 1);
  EXPECT_FALSE(called);
  EXPECT_FALSE(result.has_value());
}

TEST(Awaitable, ErrorOfACallbackIsThrownByEveryWait) {
  Awaitable<int> result([] { return 1; });
  result.add_callback([](int) -> int { throw std::invalid_argument("no"); });
  EXPECT_THROW(result.wait(), std::invalid_argument);
  EXPECT_THROW(result.wait(), std::invalid_argument);
}

TEST(Awaitable, LetsGoOfWhatTheWaitHeld) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  const Awaitable<int> result([held = std::move(held)] { return *held; });
  EXPECT_EQ(result.wait(), 1);
  EXPECT_TRUE(watch.expired());
}

TEST(Awaitable, NoWaitHasItsValue) {
  NoWait<std::string> result(std::string("here"));
  result.add_callback([](std::string text) { return text + "!"; });
  EXPECT_EQ(result.wait(), "here!");
}

TEST(Awaitable, LazyAwaitableWaitsWhenUsed) {
  int waits = 0;
  const LazyAwaitable<std::string> result([&] {
    ++waits;
    return std::string("later");
  });
  EXPECT_EQ(waits, 0);
  EXPECT_EQ(result->size(), 5U);
  const std::string& text = result;
  EXPECT_EQ(text, "later");
  EXPECT_EQ(*result, "later");
  EXPECT_EQ(waits, 1);
}

TEST(Awaitable, LazyNoWaitStandsForItsValue) {
  const LazyNoWait<int> result(3);
  const int value = result;
  EXPECT_EQ(value + 1, 4);
}

}  // namespace
}  // namespace tessera::comm
