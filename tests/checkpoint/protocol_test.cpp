// The protocol: whatever happens during a save, the newest complete checkpoint is there afterwards.

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <map>
#include <optional>

#include "checkpoint/samples.h"
#include "tessera/checkpoint/checksum.h"

namespace tessera::checkpoint::testing {
namespace {

// Counts the calls that change something and lets `before` look at each; short writes make many.
class CountingDisk : public Disk {
 public:
  /// Called before each call; a number other than 0 becomes its errno and the call is not made.
  std::function<int(std::int64_t call, int fd, const void* data, std::size_t num_bytes)> before;
  std::size_t max_write = SIZE_MAX;
  std::int64_t num_calls = 0;

  int make_folder(const std::string& path) override {
    return refused() ? -1 : Disk::make_folder(path);
  }
  int create(const std::string& path) override { return refused() ? -1 : Disk::create(path); }
  ssize_t write(int fd, const void* data, std::size_t num_bytes) override {
    const std::size_t count = std::min(num_bytes, max_write);
    return refused(fd, data, count) ? -1 : Disk::write(fd, data, count);
  }
  int sync(int fd) override { return refused() ? -1 : Disk::sync(fd); }
  int sync_folder(const std::string& path) override {
    return refused() ? -1 : Disk::sync_folder(path);
  }
  int rename(const std::string& from, const std::string& to) override {
    return refused() ? -1 : Disk::rename(from, to);
  }
  int exchange(const std::string& a, const std::string& b) override {
    return refused() ? -1 : Disk::exchange(a, b);
  }
  int remove(const std::string& path) override { return refused() ? -1 : Disk::remove(path); }
  int remove_folder(const std::string& path) override {
    return refused() ? -1 : Disk::remove_folder(path);
  }

 private:
  bool refused(int fd = -1, const void* data = nullptr, std::size_t num_bytes = 0) {
    const int number = before ? before(++num_calls, fd, data, num_bytes) : 0;
    errno = number;
    return number != 0;
  }
};

TEST(Protocol, NamesOfFolders) {
  EXPECT_EQ(folder_name(123), "step-000000000123");
  EXPECT_EQ(step_of("step-000000000123"), 123);
  EXPECT_EQ(step_of(folder_name(INT64_MAX)), INT64_MAX);
  for (const char* name :
       {"step-123", "step-00000000012x", "step-000000000123.tmp-1", "step-", "x",
        "step-0000000000123", "step--00000000001", "step-99999999999999999999"}) {
    EXPECT_EQ(step_of(name), -1) << name;
  }
}

TEST(Protocol, SavesAndMovesLatest) {
  const TemporaryFolder root;
  EXPECT_TRUE(list_steps(root / "none").empty());
  for (const int step : {3, 20, 100}) save_sample(root / "a/b", step);
  EXPECT_EQ(list_steps(root / "a/b"), (std::vector<std::int64_t>{100, 20, 3}));
  EXPECT_EQ(latest_folder(root / "a/b"), "step-000000000100");
  for (const int step : {3, 20, 100}) expect_sample(Reader(root / "a/b", step));
  EXPECT_EQ(std::get<std::int64_t>(Reader(root / "a/b", 3).manifest().values.at("seed")), 7);
  spill(root / "a/b/LATEST", "../../etc\n");
  EXPECT_EQ(latest_folder(root / "a/b"), "");
  EXPECT_EQ(find_newest(root / "a/b").reader->manifest().step, 100);
  EXPECT_EQ(error_of([&] { save_sample(root.path(), -1); }),
            "checkpoint.save: the step is -1. Count from 0.");
  EXPECT_EQ(error_of([&] { save_sample("", 1); }),
            "checkpoint.save: the folder to save into has no name.");
}

TEST(Protocol, KeepsTheLastThatAreGood) {
  const TemporaryFolder root;
  for (int step = 1; step <= 5; ++step) save_sample(root.path(), step, 2);
  EXPECT_EQ(list_steps(root.path()), (std::vector<std::int64_t>{5, 4}));
  std::filesystem::remove(root / "step-000000000005/MANIFEST.json");
  save_sample(root.path(), 6, 2);  // 5 does not count
  EXPECT_EQ(list_steps(root.path()), (std::vector<std::int64_t>{6, 5, 4}));
}

// A load of an older step, and training from there: lower steps come after higher ones.
TEST(Protocol, KeepCountsByCommitsAndNeverRemovesTheLast) {
  const TemporaryFolder root;
  for (const int step : {300, 400, 500}) save_sample(root.path(), step);
  save_sample(root.path(), 310, 2);
  EXPECT_EQ(list_steps(root.path()), (std::vector<std::int64_t>{500, 310}));
  EXPECT_EQ(list_commits(root.path()), (std::vector<std::int64_t>{310, 500}));
  EXPECT_EQ(latest_folder(root.path()), folder_name(310));
  EXPECT_EQ(find_newest(root.path()).reader->manifest().step, 310);
  save_sample(root.path(), 305, 1);
  EXPECT_EQ(list_steps(root.path()), (std::vector<std::int64_t>{305}));
  expect_sample(Reader(root.path(), 305));
  EXPECT_EQ(Reader(root.path(), 305).manifest().commit, 5);
}

// The order is in the manifests: neither times of files nor clocks matter.
TEST(Protocol, OrderOfCommitsSurvivesCopying) {
  const TemporaryFolder root;
  for (const int step : {20, 30, 10}) save_sample(root / "a", step);
  std::filesystem::create_directory(root / "b");
  for (const int step : {10, 30, 20}) {  // written anew in another order
    std::filesystem::copy(root / ("a/" + folder_name(step)), root / ("b/" + folder_name(step)));
  }
  EXPECT_EQ(list_commits(root / "b"), (std::vector<std::int64_t>{10, 30, 20}));
  save_sample(root / "b", 15, 3);
  EXPECT_EQ(list_commits(root / "b"), (std::vector<std::int64_t>{15, 10, 30}));
}

// What version 1 wrote has no number: it is older than all that have one, and goes by step.
TEST(Protocol, ManifestsWithoutCommitsAreOlder) {
  const TemporaryFolder root;
  for (const int step : {1, 2, 3}) save_sample(root.path(), step);
  for (const int step : {2, 3}) {
    const std::string path = root / (folder_name(step) + "/MANIFEST.json");
    std::string text = slurp(path);
    text = "{" + text.substr(text.find('\n') + 1);
    const auto version = text.find("\"version\":2");
    ASSERT_NE(version, std::string::npos);
    text.replace(version, 11, "\"version\":1");
    const auto trailer = text.rfind("\"sha256\":\"");
    spill(path,
          text.substr(0, trailer) + "\"sha256\":\"" + sha256(text.substr(0, trailer)) + "\"}\n");
    expect_sample(Reader(root.path(), step));
  }
  EXPECT_EQ(list_commits(root.path()), (std::vector<std::int64_t>{1, 3, 2}));
  save_sample(root.path(), 0, 2);
  EXPECT_EQ(list_commits(root.path()), (std::vector<std::int64_t>{0, 1}));
}

TEST(Protocol, ANumberThatWasChangedCountsForNothing) {
  const TemporaryFolder root;
  for (const int step : {1, 2}) save_sample(root.path(), step);
  const std::string path = root / (folder_name(1) + "/MANIFEST.json");
  std::string text = slurp(path);
  ASSERT_TRUE(text.starts_with("{\"commit\":1,"));
  spill(path, "{\"commit\":9223372036854775807," + text.substr(text.find("\"saved\"")));
  EXPECT_EQ(save_sample(root.path(), 3).commit, 3);
}

TEST(Protocol, SameStepIsReplacedWhole) {
  const TemporaryFolder root;
  save_sample(root.path(), 5);
  spill(root / "step-000000000005/extra", "x");
  save_sample(root.path(), 5);
  EXPECT_FALSE(std::filesystem::exists(root / "step-000000000005/extra"));
  expect_sample(Reader(root.path(), 5));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(root.path()), {}), 3);  // and .lock
}

// Somebody has moved a step to another disk, or wants to have removed what they cannot.
TEST(Protocol, WhatALinkLeadsToStays) {
  namespace fs = std::filesystem;
  const TemporaryFolder root;
  const TemporaryFolder other;
  spill(other / "precious", "x");
  save_sample(root.path(), 1);
  fs::create_directory_symlink(other.path(), root / "step-000000000002");
  fs::create_directory_symlink(other.path(), root / "step-000000000003.tmp-0123");
  fs::create_directory(root / "step-000000000004.tmp-0123");
  fs::create_directory_symlink(other.path(), root / "step-000000000004.tmp-0123/inner");
  spill(root / "step-000000000005", "a file");
  for (const std::int64_t step : {2, 5}) {
    save_sample(root.path(), step, /*keep=*/1);
    EXPECT_EQ(slurp(other / "precious"), "x");
    EXPECT_TRUE(fs::is_directory(fs::symlink_status(root / folder_name(step))));
  }
  EXPECT_EQ(list_steps(root.path()), std::vector<std::int64_t>{5});
  EXPECT_EQ(std::distance(fs::directory_iterator(root.path()), {}), 3);  // LATEST and .lock
}

TEST(Protocol, OneJobPerFolderAndLeftoversGo) {
  const TemporaryFolder root;
  std::filesystem::create_directory(root / "step-000000000001.tmp-0123");
  spill(root / "step-000000000001.tmp-0123/x", "x");
  spill(root / "LATEST.tmp-99", "x");
  spill(root / "mine.tmp-1", "x");
  {
    const PendingFolder first(root.path(), 1);
    EXPECT_FALSE(std::filesystem::exists(root / "step-000000000001.tmp-0123"));
    EXPECT_FALSE(std::filesystem::exists(root / "LATEST.tmp-99"));
    EXPECT_TRUE(std::filesystem::exists(root / "mine.tmp-1"));
    EXPECT_EQ(error_of([&] { PendingFolder second(root.path(), 2); }),
              "checkpoint.save: another process is saving into " + root.path() +
                  ". Give every job a folder of its own.");
  }
  EXPECT_TRUE(list_steps(root.path()).empty());
}

// Makes a checkpoint look as if another job had saved it, as the last commit.
void give_away(const std::string& root, std::int64_t step) {
  const std::string path = root + "/" + folder_name(step) + "/MANIFEST.json";
  Manifest manifest = decode_manifest(slurp(path), path);
  manifest.job = "0123456789abcdef";
  manifest.saved = "2026-01-02T03:04:05Z";
  manifest.commit = last_commit(root) + 1;
  spill(path, encode_manifest(manifest));
}

TEST(Protocol, StepsOfOtherJobsStay) {
  const TemporaryFolder root;
  const std::string job = save_sample(root.path(), 5).job;
  EXPECT_EQ(job.size(), 16U);
  EXPECT_EQ(save_sample(root.path(), 5).job, job);  // its own it replaces
  const auto again = [&](bool replaces) {
    return error_of(
        [&] { save_parts(root.path(), 5, two_ranks(5000).parts, {}, 0, Disk::real(), replaces); });
  };
  give_away(root.path(), 5);
  const std::string refused =
      "checkpoint.save: " + root.path() +
      "/step-000000000005 was saved by job 0123456789abcdef at 2026-01-02T03:04:05Z; this is job " +
      job +
      ", which has not loaded from there since. Load first, save into another folder, or ask for "
      "it to be replaced.";
  EXPECT_EQ(again(false), refused);
  EXPECT_EQ(Reader(root.path(), 5).manifest().job, "0123456789abcdef");
  EXPECT_EQ(again(true), "");
  // Who has read it goes on with it, but not with what came later.
  give_away(root.path(), 5);
  note_read(root.path());
  EXPECT_EQ(again(false), "");
  give_away(root.path(), 5);
  EXPECT_EQ(again(false), refused);
  // What is damaged may go.
  spill(root / "step-000000000005/MANIFEST.json", "x");
  EXPECT_EQ(again(false), "");
}

// A worker that reads data, say: forked in the middle of a save, alive long after.
struct Sleeper {
  pid_t child = ::fork();
  Sleeper() {
    if (child == 0) {
      for (;;) ::pause();
    }
  }
  ~Sleeper() {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
};

TEST(Protocol, AForkedChildHoldsNoLock) {
  const TemporaryFolder root;
  std::optional<PendingFolder> save(std::in_place, root.path(), 1);
  const Sleeper sleeper;
  EXPECT_NE(error_of([&] { PendingFolder second(root.path(), 2); }), "");  // not the fork's doing
  save.reset();
  save_sample(root.path(), 2);
  expect_sample(Reader(root.path(), 2));
}

// The lock goes with the process that has it, even if that has children.
TEST(Protocol, AChildOfADeadProcessHoldsNoLock) {
  const TemporaryFolder root;
  int pipes[2];
  ASSERT_EQ(::pipe(pipes), 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    const PendingFolder save(root.path(), 1);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(pipes[1]);
      for (;;) ::pause();
    }
    (void)!::write(pipes[1], &child, sizeof(child));
    ::close(pipes[1]);
    for (;;) ::pause();
  }
  ::close(pipes[1]);
  pid_t child = 0;
  ASSERT_EQ(::read(pipes[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  EXPECT_NE(error_of([&] { save_sample(root.path(), 2); }), "");
  ::kill(owner, SIGKILL);
  ::waitpid(owner, nullptr, 0);
  // The child has closed its copy as soon as it runs.
  std::string text;
  for (int i = 0; i < 1000; ++i) {
    text = error_of([&] { save_sample(root.path(), 2); });
    if (text.empty()) break;
    ::usleep(1000);
  }
  EXPECT_EQ(text, "");
  ::kill(child, SIGKILL);
  ::close(pipes[0]);
}

TEST(Protocol, AForkedChildRemovesNothing) {
  const TemporaryFolder root;
  std::optional<PendingFolder> save(std::in_place, root.path(), 1);
  const pid_t child = ::fork();
  if (child == 0) {
    save.reset();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(std::filesystem::exists(save->path()));
  EXPECT_NE(error_of([&] { PendingFolder second(root.path(), 2); }), "");
}

// Who can open the file can lock it, and so hold up every save.
TEST(Protocol, NobodyElseOpensTheLock) {
  const TemporaryFolder root;
  const auto mode = [&] {
    struct stat facts{};
    EXPECT_EQ(::stat((root / ".lock").c_str(), &facts), 0);
    return facts.st_mode & 0777;
  };
  save_sample(root.path(), 1);
  EXPECT_EQ(mode(), 0600U);
  ::chmod((root / ".lock").c_str(), 0644);  // as it was once
  save_sample(root.path(), 2);
  EXPECT_EQ(mode(), 0600U);
}

TEST(Protocol, UncoveredTensorsAreRefused) {
  const TemporaryFolder root;
  Sample sample;
  sample.add(0, "t", {4}, {{0}, {3}}, 0);
  EXPECT_EQ(error_of([&] { save_parts(root.path(), 1, sample.parts, {}); }),
            "checkpoint.save, tensor 't': of shape [4] is covered only in part: 3 of 4 elements.");
  sample.parts[0].push_back(sample.parts[0][0]);
  EXPECT_EQ(error_of([&] { save_parts(root.path(), 1, sample.parts, {}); }),
            "checkpoint.save, tensor 't': has regions that overlap.");
  sample.parts[0][0].name = "a\nb";
  EXPECT_NE(error_of([&] { save_parts(root.path(), 1, sample.parts, {}); }), "");
  EXPECT_TRUE(list_steps(root.path()).empty());
}

TEST(Protocol, NewestThatOpensIsTakenAndTheOthersNamed) {
  const TemporaryFolder root;
  for (int step = 1; step <= 3; ++step) save_sample(root.path(), step);
  const std::string shard = root / "step-000000000003/shard-00001-model-00001-of-00001.safetensors";
  std::filesystem::resize_file(shard, 100);
  std::filesystem::remove(root / "step-000000000002/MANIFEST.json");
  const Found found = find_newest(root.path());
  ASSERT_NE(found.reader, nullptr);
  EXPECT_EQ(found.reader->manifest().step, 1);
  ASSERT_EQ(found.warnings.size(), 2U);
  EXPECT_TRUE(found.warnings[0].starts_with(shard + ": has 100 bytes, the manifest says "));
  EXPECT_EQ(found.warnings[1], root / "step-000000000002/MANIFEST.json: is missing.");
  EXPECT_EQ(find_newest(root.path(), 0).reader, nullptr);
}

// Row 11: a process is killed by the system at each of 500 and more moments of a save, before a
// call or in the middle of a write. Whatever is left, the newest complete checkpoint loads.
TEST(Faults, KillAtFiveHundredPointsLosesNothing) {
  const TemporaryFolder root;
  save_sample(root.path(), 1);
  CountingDisk counting;
  counting.max_write = 8;
  std::vector<bool> is_write;
  counting.before = [&](auto, auto, const void* data, auto) {
    is_write.push_back(data != nullptr);
    return 0;
  };
  save_sample(root.path(), 2, 1, counting);
  const std::int64_t num_calls = counting.num_calls;
  ASSERT_GE(num_calls, 250);

  int num_points = 0;
  int num_old = 0;
  for (std::int64_t call = 1; call <= num_calls; ++call) {
    for (const bool is_torn : {false, true}) {
      if (is_torn && !is_write[call - 1]) continue;
      std::filesystem::remove_all(root / "step-000000000002");
      std::filesystem::remove_all(root / "step-000000000001");
      save_sample(root.path(), 1);
      const pid_t child = ::fork();
      if (child == 0) {
        CountingDisk disk;
        disk.max_write = 8;
        disk.before = [&](std::int64_t now, int fd, const void* data, std::size_t num_bytes) {
          if (now < call) return 0;
          if (is_torn && data != nullptr) (void)!::write(fd, data, num_bytes / 2 + 1);
          ::kill(::getpid(), SIGKILL);
          return EIO;
        };
        try {
          save_sample(root.path(), 2, 1, disk);
        } catch (...) {
        }
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << call;
      const Found found = find_newest(root.path());
      ASSERT_NE(found.reader, nullptr) << "lost at call " << call;
      ASSERT_TRUE(found.warnings.empty()) << found.warnings[0];
      found.reader->verify();
      expect_sample(*found.reader);
      num_old += found.reader->manifest().step == 1 ? 1 : 0;
      ++num_points;
    }
  }
  EXPECT_GE(num_points, 500);
  RecordProperty("points", num_points);
  EXPECT_GT(num_old, num_points / 2);  // most of a save is before its name
  EXPECT_LT(num_old, num_points);      // and its end is after
  save_sample(root.path(), 3);         // and what was left behind goes
  for (const auto& entry : std::filesystem::directory_iterator(root.path())) {
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
  }
}

// The old folder of a step and the new one change places: one of them is always there.
TEST(Faults, KillWhileAStepIsReplacedLosesNothing) {
  const TemporaryFolder root;
  save_sample(root.path(), 1);
  bool is_killed = true;
  int num_points = 0;
  for (std::int64_t call = 1; is_killed; ++call, ++num_points) {
    const pid_t child = ::fork();
    if (child == 0) {
      CountingDisk disk;
      disk.before = [&](std::int64_t now, auto, auto, auto) {
        if (now >= call) ::kill(::getpid(), SIGKILL);
        return 0;
      };
      save_sample(root.path(), 1, 0, disk);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    is_killed = WIFSIGNALED(status);
    const Found found = find_newest(root.path());
    ASSERT_NE(found.reader, nullptr) << "lost at call " << call;
    ASSERT_TRUE(found.warnings.empty()) << found.warnings[0];
    expect_sample(*found.reader);
  }
  EXPECT_GT(num_points, 20);
}

// Row 12: the n-th call fails, for every n until a save passes without a failure.
TEST(Faults, FailureOfEveryCallLeavesTheOldOne) {
  for (const int number : {ENOSPC, EIO, EROFS, EDQUOT}) {
    const TemporaryFolder root;
    save_sample(root.path(), 1);
    int num_errors = 0;
    bool is_clean = false;
    for (std::int64_t fail_at = 1; !is_clean; ++fail_at) {
      ASSERT_LT(fail_at, 10'000);
      CountingDisk disk;
      disk.max_write = 64;
      is_clean = true;
      disk.before = [&](std::int64_t call, int fd, const void* data, std::size_t num_bytes) {
        if (call != fail_at) return 0;
        is_clean = false;
        // A write that fails may have written something.
        if (data != nullptr && fail_at % 2 == 0) (void)!::write(fd, data, num_bytes / 2);
        return number;
      };
      const std::string text = error_of([&] { save_sample(root.path(), 2, 0, disk); });
      if (!text.empty()) {
        ++num_errors;
        EXPECT_TRUE(text.starts_with("checkpoint: cannot ")) << text;
        EXPECT_NE(text.find(root.path()), std::string::npos) << text;
        EXPECT_NE(text.find(std::strerror(number)), std::string::npos) << text;
      }
      const Found found = find_newest(root.path());
      ASSERT_NE(found.reader, nullptr);
      ASSERT_TRUE(found.warnings.empty());
      expect_sample(*found.reader);
      EXPECT_TRUE(!text.empty() || found.reader->manifest().step == 2);
      std::filesystem::remove_all(root / "step-000000000002");
    }
    EXPECT_GT(num_errors, 50);
  }
}

TEST(Faults, FullDiskIsNamedAndTheOldOneStays) {
  const TemporaryFolder root;
  int pipes[2];
  ASSERT_EQ(::pipe(pipes), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string answer = "skip";
    if (::unshare(CLONE_NEWNS) == 0 &&
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
        ::mount("tmpfs", root.path().c_str(), "tmpfs", 0, "size=1m") == 0) {
      try {
        save_sample(root.path(), 1);
        Sample large;
        large.add(0, "large", {400'000}, {{0}, {400'000}}, 0);
        answer = error_of([&] { save_parts(root.path(), 2, large.parts, {}); });
        expect_sample(*find_newest(root.path()).reader);
        save_sample(root.path(), 3);  // there is room again: what was half written is gone
        if (find_newest(root.path()).reader->manifest().step != 3) answer = "nothing fits";
      } catch (const std::exception& error) {
        answer = std::string("unexpected: ") + error.what();
      }
    }
    (void)!::write(pipes[1], answer.data(), answer.size());
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  ::close(pipes[1]);
  std::string answer(1000, '\0');
  answer.resize(
      static_cast<std::size_t>(std::max<ssize_t>(0, ::read(pipes[0], answer.data(), 1000))));
  ::close(pipes[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (answer == "skip") GTEST_SKIP() << "this process may not mount a file system";
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(answer.starts_with("checkpoint: cannot write " + root.path())) << answer;
  EXPECT_TRUE(
      answer.ends_with("No space left on device. Free some space, or keep fewer checkpoints; "
                       "earlier ones are untouched."))
      << answer;
}

// Row 14. Remembers what has certainly reached the disk: contents of a file as of its last sync,
// names in a folder as of its last sync.
class PowerDisk final : public Disk {
 public:
  struct Node {
    bool is_folder = false;
    std::string content;
    std::string synced;
    std::map<std::string, std::shared_ptr<Node>> names;
    std::map<std::string, std::shared_ptr<Node>> synced_names;
  };

  explicit PowerDisk(std::string root) : root_(std::move(root)) { tree_->is_folder = true; }
  std::function<void()> after;

  /// Writes what a power cut would leave: names as synced or as they are, contents as synced.
  void write_survivors(const std::string& target, bool names_survive) const {
    survive(*tree_, target, names_survive);
  }

  int make_folder(const std::string& path) override {
    const int result = Disk::make_folder(path);
    if (result == 0) put(path, true);
    return done(result);
  }
  int create(const std::string& path) override {
    const int fd = Disk::create(path);
    if (fd >= 0) open_[fd] = put(path, false);
    return done(fd);
  }
  ssize_t write(int fd, const void* data, std::size_t num_bytes) override {
    const ssize_t count = Disk::write(fd, data, std::min<std::size_t>(num_bytes, 100));
    if (count > 0) open_[fd]->content.append(static_cast<const char*>(data), count);
    return done(count);
  }
  int sync(int fd) override {
    open_[fd]->synced = open_[fd]->content;
    return done(0);
  }
  int close(int fd) override {
    open_.erase(fd);
    return Disk::close(fd);
  }
  int sync_folder(const std::string& path) override {
    Node* folder = find(path);
    if (folder != nullptr) folder->synced_names = folder->names;
    return done(0);
  }
  int rename(const std::string& from, const std::string& to) override {
    const int result = Disk::rename(from, to);
    if (result == 0) {
      auto& source = find(parent(from))->names;
      find(parent(to))->names[leaf(to)] = source[leaf(from)];
      source.erase(leaf(from));
    }
    return done(result);
  }
  int exchange(const std::string& a, const std::string& b) override {
    const int result = Disk::exchange(a, b);
    if (result == 0) std::swap(find(parent(a))->names[leaf(a)], find(parent(b))->names[leaf(b)]);
    return done(result);
  }
  int remove(const std::string& path) override {
    const int result = Disk::remove(path);
    if (result == 0) find(parent(path))->names.erase(leaf(path));
    return done(result);
  }
  int remove_folder(const std::string& path) override {
    const int result = Disk::remove_folder(path);
    if (result == 0) find(parent(path))->names.erase(leaf(path));
    return done(result);
  }

 private:
  template <typename T>
  T done(T result) {
    const int number = errno;
    if (after) after();
    errno = number;
    return result;
  }
  static std::string parent(const std::string& path) { return path.substr(0, path.rfind('/')); }
  static std::string leaf(const std::string& path) { return path.substr(path.rfind('/') + 1); }
  std::shared_ptr<Node> put(const std::string& path, bool is_folder) {
    auto node = std::make_shared<Node>();
    node->is_folder = is_folder;
    find(parent(path))->names[leaf(path)] = node;
    return node;
  }
  Node* find(std::string path) {
    while (path.ends_with('/')) path.pop_back();
    if (path == root_) return tree_.get();
    if (!path.starts_with(root_ + "/")) return nullptr;
    Node* above = find(parent(path));
    return above == nullptr ? nullptr : above->names[leaf(path)].get();
  }
  static void survive(const Node& node, const std::string& target, bool names_survive) {
    if (!node.is_folder) {
      spill(target, node.synced);
      return;
    }
    std::filesystem::create_directory(target);
    for (const auto& [name, inner] : names_survive ? node.names : node.synced_names) {
      survive(*inner, target + "/" + name, names_survive);
    }
  }

  std::string root_;
  std::shared_ptr<Node> tree_ = std::make_shared<Node>();
  std::map<int, std::shared_ptr<Node>> open_;
};

TEST(Faults, PowerLossAfterAnyCallLosesNothing) {
  const TemporaryFolder root;
  const TemporaryFolder after;
  PowerDisk disk(root.path());
  save_sample(root.path(), 1, 0, disk);
  int num_points = 0;
  int num_new = 0;
  disk.after = [&] {
    for (const bool names_survive : {false, true}) {
      const std::string target = after / std::to_string(num_points++);
      disk.write_survivors(target, names_survive);
      const Found found = find_newest(target);
      ASSERT_NE(found.reader, nullptr) << "lost after call " << num_points / 2;
      found.reader->verify();
      expect_sample(*found.reader);
      num_new += found.reader->manifest().step == 2 ? 1 : 0;
      std::filesystem::remove_all(target);
    }
  };
  save_sample(root.path(), 2, 1, disk);
  EXPECT_GT(num_points, 60);
  EXPECT_GT(num_new, 0);
  EXPECT_LT(num_new, num_points);
}

}  // namespace
}  // namespace tessera::checkpoint::testing
