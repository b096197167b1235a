// Saves in the background: what they write, and when their errors are told.

#include <gtest/gtest.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "checkpoint/quiet.h"
#include "checkpoint/samples.h"
#include "support/ranks.h"
#include "support/refused_threads.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"

namespace tessera::checkpoint::testing {
namespace {

using tessera::testing::RefusedThread;
using tessera::testing::run_ranks;

// Lets a test hold the writer while it looks.
struct SlowDisk final : Disk {
  std::mutex mutex;
  std::condition_variable change;
  bool is_open = false;
  bool fails = false;

  ssize_t write(int fd, const void* data, std::size_t num_bytes) override {
    std::unique_lock lock(mutex);
    change.wait(lock, [&] { return is_open; });
    if (fails) {
      errno = EIO;
      return -1;
    }
    return Disk::write(fd, data, num_bytes);
  }
  void open() {
    const std::lock_guard lock(mutex);
    is_open = true;
    change.notify_all();
  }
};

TEST(AsyncSaver, WritesWhatWasThereWhenItWasAsked) {
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    SlowDisk disk;
    SaveOptions options = quiet();
    options.disk = &disk;
    AsyncSaver saver(root.path(), group, options);
    EXPECT_FALSE(saver.wait().has_value());
    State state;
    const at::Tensor mine = at::full({2}, group.rank(), at::kFloat);
    state.add_shard("t", {4}, {2 * group.rank()}, mine);
    state.add_replicated("r", mine * 0);
    saver.save(1, state);
    EXPECT_TRUE(saver.is_saving());
    mine.fill_(99);  // training goes on
    saver.check();
    disk.open();
    const auto report = saver.wait();
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->step, 1);
    saver.save(2, state);
    saver.save(3, state);  // waits for the one before
    saver.wait();
    AsyncSaver second(root.path(), group, options);  // a group of its own again
    second.save(4, state);
    second.wait();
  });
  EXPECT_EQ(list_steps(root.path()), (std::vector<std::int64_t>{4, 3, 2, 1}));
  const Reader first(root.path(), 1);
  EXPECT_TRUE(at::equal(read_tensor(first, *first.find("t")),
                        at::tensor(std::vector<float>{0, 0, 1, 1}, at::kFloat)));
  const Reader third(root.path(), 3);
  EXPECT_TRUE(at::equal(read_tensor(third, *third.find("t")), at::full({4}, 99.F)));
}

// The device copies while the host goes on; what comes later on the same stream is not saved.
TEST(AsyncSaver, WritesWhatWasOnTheDevice) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const TemporaryFolder root;
  AsyncSaver saver(root.path(), std::nullopt, quiet());
  const at::Tensor tensor = at::arange(1 << 20, at::TensorOptions(at::kCUDA).dtype(at::kFloat));
  for (const int step : {1, 2}) {
    State state;
    state.add_replicated("t", tensor);
    saver.save(step, state);
    tensor.add_(1);
  }
  saver.wait();
  for (const int step : {1, 2}) {
    State loaded;
    const at::Tensor into = at::zeros({1 << 20}, tensor.options());
    loaded.add_replicated("t", into);
    LoadOptions options = quiet_load();
    options.step = step;
    load(root.path(), loaded, std::nullopt, options);
    EXPECT_TRUE(at::equal(into.cpu(), at::arange(1 << 20, at::kFloat) + (step - 1)));
  }
}

// It writes before it returns instead, so that the others' writers do not wait for it.
TEST(AsyncSaver, WithoutAThreadItSavesAllTheSame) {
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    SaveOptions options = quiet();
    std::string told;
    options.log = [&](const std::string& line) { told += line + "\n"; };
    AsyncSaver saver(root.path(), group, options);
    State state;
    const at::Tensor mine = at::full({2}, group.rank(), at::kFloat);
    state.add_shard("t", {4}, {2 * group.rank()}, mine);
    std::optional<RefusedThread> refused;
    if (group.rank() == 0) refused.emplace(1, /*of_this_thread=*/true);
    saver.save(1, state);
    if (refused) {
      EXPECT_TRUE(refused->was_refused());
      EXPECT_FALSE(saver.is_saving());
      EXPECT_TRUE(told.starts_with(
          "checkpoint step 1: training waits for it, as there is no thread to write it beside "
          "(Resource temporarily unavailable)\n"))
          << told;
    }
    refused.reset();
    saver.check();
    const auto report = saver.wait();
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->step, 1);
    saver.save(2, state);  // in the background again
    EXPECT_EQ(saver.wait()->step, 2);
  });
  EXPECT_EQ(list_steps(root.path()), (std::vector<std::int64_t>{2, 1}));
  const Reader first(root.path(), 1);
  EXPECT_TRUE(at::equal(read_tensor(first, *first.find("t")),
                        at::tensor(std::vector<float>{0, 0, 1, 1}, at::kFloat)));
}

// Of all that a save and its load start, in any rank.
TEST(AsyncSaver, EveryThreadMayBeRefused) {
  for (std::int64_t n = 1;; ++n) {
    ASSERT_LT(n, 100);
    const TemporaryFolder root;
    AsyncSaver saver(root.path(), std::nullopt, quiet());
    State state;
    state.add_replicated("t", at::arange(1 << 16, at::kFloat));
    const RefusedThread refused(n);
    saver.save(1, state);
    EXPECT_EQ(saver.wait()->step, 1);
    State loaded;
    const at::Tensor into = at::zeros({1 << 16}, at::kFloat);
    loaded.add_replicated("t", into);
    load(root.path(), loaded, std::nullopt, quiet_load());
    EXPECT_TRUE(at::equal(into, at::arange(1 << 16, at::kFloat)));
    if (refused.was_refused()) continue;
    EXPECT_GT(n, 1);  // there was one to refuse
    break;
  }
}

TEST(AsyncSaver, ErrorsOfTheWriterSurfaceAtTheNextCall) {
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    SlowDisk disk;
    disk.fails = group.rank() == 1;
    SaveOptions options = quiet();
    options.disk = &disk;
    AsyncSaver saver(root.path(), group, options);
    State state;
    state.add_shard("t", {2}, {group.rank()}, at::ones({1}));
    saver.save(1, state);
    saver.check();  // not known yet
    disk.open();
    const std::string text = error_of([&] { saver.wait(); });
    EXPECT_TRUE(text.starts_with("checkpoint.save: rank 1: checkpoint: cannot write ")) << text;
    saver.check();  // told once
    disk.fails = false;
    saver.save(2, state);
    saver.wait();

    // A copy that fails is told at once, and the writers of the others learn it.
    State bad;
    bad.add_shard("t", {2}, {group.rank() == 0 ? 5 : 1}, at::ones({1}));
    if (group.rank() == 0) {
      EXPECT_THROW(saver.save(3, bad), c10::ValueError);
      saver.check();
    } else {
      saver.save(3, bad);
      EXPECT_TRUE(error_of([&] { saver.wait(); }).starts_with("checkpoint.save: rank 0: "));
    }
  });
  EXPECT_EQ(list_steps(root.path()), std::vector<std::int64_t>{2});
}

}  // namespace
}  // namespace tessera::checkpoint::testing
