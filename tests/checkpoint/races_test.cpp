// Readers beside a process that saves: what is read is one checkpoint, and the newest.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "checkpoint/samples.h"

namespace tessera::checkpoint::testing {
namespace {

// Many more in a longer run.
int num_races() {
  const char* wish = std::getenv("TESSERA_RACES");
  return wish == nullptr ? 300 : std::atoi(wish);
}

// So many saves at least are seen meanwhile: there must be a race at all.
constexpr int kMinChanges = 10;

// Runs `body` in a process of its own again and again, until the end.
class Beside {
 public:
  explicit Beside(const std::function<void(int round)>& body) : child_(::fork()) {
    if (child_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int round = 1;; ++round) {
      try {
        body(round);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        ::_exit(1);
      }
    }
  }
  ~Beside() {
    ::kill(child_, SIGKILL);
    int status = 0;
    ::waitpid(child_, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << "the process that saves has failed";
  }

 private:
  pid_t child_;
};

void save_generation(const std::string& root, std::int64_t step, int generation, int keep) {
  save_parts(root, step, two_ranks(static_cast<float>(generation)).parts,
             {{"generation", std::int64_t{generation}}}, keep);
}

// Every tensor is of the generation that the manifest names.
void expect_generation(const Reader& reader) {
  const auto seed =
      static_cast<float>(std::get<std::int64_t>(reader.manifest().values.at("generation")));
  for (const TensorInfo& tensor : reader.tensors()) {
    const Region whole{std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape};
    const std::vector<float> expected = Sample::values(tensor.shape, whole, seed);
    std::vector<float> got(expected.size());
    reader.read(tensor.name, whole, reinterpret_cast<std::byte*>(got.data()));
    EXPECT_EQ(got, expected) << tensor.name;
  }
}

TEST(Races, AStepThatIsReplacedIsReadWholeAndNotPassedOver) {
  const TemporaryFolder root;
  save_generation(root.path(), 1, 0, 0);
  save_generation(root.path(), 2, 0, 0);
  const Beside saver([&](int round) { save_generation(root.path(), 2, round, 0); });
  std::int64_t last = 0;
  int num_changes = 0;
  for (int i = 0; i < num_races() || num_changes <= kMinChanges; ++i) {
    const Found found = find_newest(root.path());
    ASSERT_NE(found.reader, nullptr);
    ASSERT_TRUE(found.warnings.empty()) << found.warnings[0];
    ASSERT_EQ(found.reader->manifest().step, 2);
    expect_generation(*found.reader);
    const std::int64_t commit = found.reader->manifest().commit;
    ASSERT_GE(commit, last);  // never back in time
    num_changes += commit != last ? 1 : 0;
    last = commit;
    const Reader by_step(root.path(), 2);
    by_step.verify();
    expect_generation(by_step);
  }
}

TEST(Races, StepsThatKeepRemovesAreNotMissed) {
  const TemporaryFolder root;
  save_generation(root.path(), 1, 1, 1);
  const Beside saver([&](int round) { save_generation(root.path(), 1 + round, 1 + round, 1); });
  std::int64_t last = 0;
  int num_changes = 0;
  for (int i = 0; i < num_races() || num_changes <= kMinChanges; ++i) {
    const Found found = find_newest(root.path());
    ASSERT_NE(found.reader, nullptr) << "after step " << last;
    ASSERT_TRUE(found.warnings.empty()) << found.warnings[0];
    expect_generation(*found.reader);
    const std::int64_t step = found.reader->manifest().step;
    ASSERT_GE(step, last);
    num_changes += step != last ? 1 : 0;
    last = step;
  }
}

}  // namespace
}  // namespace tessera::checkpoint::testing
