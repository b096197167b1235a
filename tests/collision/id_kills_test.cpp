// Parts of an id table in processes of their own, killed by SIGKILL at any moment, also while they
// save, and begun again from what was saved last, on another number of processes: at the end no id
// is lost, doubled or counted wrongly, as a plain map tells. TESSERA_ID_OPERATIONS=100000000 makes
// it longer.

#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/collision/id_table.h"

namespace tessera::collision {
namespace {

namespace fs = std::filesystem;

using Ids = std::vector<std::int64_t>;

/// What happens in a step: the same whenever and wherever it is done.
struct Step {
  enum class Kind { kAdmit, kUndone, kErase } kind = Kind::kAdmit;
  Ids ids;
};

Step step_of(std::int64_t number, std::int64_t most_ids) {
  std::mt19937_64 random(static_cast<std::uint64_t>(number) * 7919 + 11);
  Step step;
  const std::uint64_t kind = random() % 20;
  if (kind == 0) step.kind = Step::Kind::kUndone;
  if (kind == 1) step.kind = Step::Kind::kErase;
  step.ids.resize(1 + random() % static_cast<std::uint64_t>(most_ids));
  if (step.kind == Step::Kind::kErase) step.ids.resize(step.ids.size() / 4 + 1);
  constexpr auto kLowest = std::numeric_limits<std::int64_t>::min();
  for (std::int64_t& id : step.ids) {
    const std::uint64_t number_of_id = random();
    // Many ids again and again, some never again, the ends of the range among them.
    const auto spread = std::int64_t{1} << (8 + number_of_id % 7 * 2);
    id = static_cast<std::int64_t>(number_of_id >> 8) % spread;
    if (number_of_id % 3 == 0) id = kLowest + id;
    if (number_of_id % 5 == 0) id = ~id;
  }
  return step;
}

struct Job {
  std::string folder;
  std::int64_t first = 0;  // steps that are done already
  std::int64_t end = 0;
  std::int64_t save_every = 1;
  std::int64_t most_ids = 1;
  int ranks = 1;
};

std::string file_of(const Job& job, std::int64_t step, int rank, int ranks) {
  return job.folder + "/" + std::to_string(step) + "." + std::to_string(rank) + "-of-" +
         std::to_string(ranks);
}

void save(const std::string& path, const IdList& list) {
  {
    std::ofstream file(path + ".part", std::ios::binary);
    const auto put = [&](const Ids& numbers) {
      file.write(reinterpret_cast<const char*>(numbers.data()),
                 static_cast<std::streamsize>(numbers.size() * 8));
    };
    put({static_cast<std::int64_t>(list.ids.size())});
    put(list.ids);
    put(list.counts);
    put(list.last_steps);
    if (!file.flush()) _exit(3);
  }
  fs::rename(path + ".part", path);
}

void load(const std::string& path, IdList& list) {
  std::ifstream file(path, std::ios::binary);
  const auto add = [&](std::size_t count, Ids& numbers) {
    numbers.resize(numbers.size() + count);
    file.read(reinterpret_cast<char*>(numbers.data() + numbers.size() - count),
              static_cast<std::streamsize>(count * 8));
  };
  Ids size;
  add(1, size);
  const auto count = static_cast<std::size_t>(size.at(0));
  add(count, list.ids);
  add(count, list.counts);
  add(count, list.last_steps);
  if (!file) throw std::runtime_error(path + " is cut");
}

/// All that was saved after a step, if all of its parts are there.
std::optional<IdList> saved_after(const Job& job, std::int64_t step) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    std::vector<std::string> files;
    for (int rank = 0; rank < ranks; ++rank) files.push_back(file_of(job, step, rank, ranks));
    const auto is_there = [](const std::string& path) { return fs::exists(path); };
    if (!std::all_of(files.begin(), files.end(), is_there)) continue;
    IdList all;
    for (const std::string& path : files) load(path, all);
    return all;
  }
  return std::nullopt;
}

/// The process of one rank. A byte goes into the pipe after every step.
[[noreturn]] void work(const Job& job, int rank, int pipe) {
  IdTableOptions options;
  options.first_bucket = kNumBuckets * rank / job.ranks;
  options.end_bucket = kNumBuckets * (rank + 1) / job.ranks;
  IdTable part(options);
  const auto own = [&](const Ids& ids) {
    Ids mine;
    for (const std::int64_t id : ids) {
      const int bucket = bucket_of(id);
      if (options.first_bucket <= bucket && bucket < options.end_bucket) mine.push_back(id);
    }
    return mine;
  };
  if (job.first > 0) {
    const IdList all = *saved_after(job, job.first);
    IdList mine;
    for (std::size_t i = 0; i < all.ids.size(); ++i) {
      if (own({all.ids[i]}).empty()) continue;
      mine.ids.push_back(all.ids[i]);
      mine.counts.push_back(all.counts[i]);
      mine.last_steps.push_back(all.last_steps[i]);
    }
    part.load(mine.ids, mine.counts, mine.last_steps);
  }
  for (std::int64_t number = job.first; number < job.end; ++number) {
    const Step step = step_of(number, job.most_ids);
    const Ids ids = own(step.ids);
    if (step.kind == Step::Kind::kErase) {
      part.erase(ids);
    } else {
      Ids rows(ids.size());
      part.plan_admit(ids, {}, number + 1, rows);
      const bool is_kept = step.kind == Step::Kind::kAdmit;
      is_kept ? part.keep_admitted() : part.undo_admitted();
      for (std::size_t i = 0; is_kept && i < rows.size(); ++i) {
        if (part.id_of(rows[i]) != ids[i]) _exit(4);
      }
    }
    const std::int64_t done = number + 1;
    if (done % job.save_every == 0 || done == job.end) {
      save(file_of(job, done, rank, job.ranks), part.export_ids());
    }
    if (write(pipe, "+", 1) != 1) _exit(5);
  }
  _exit(0);
}

struct Process {
  pid_t pid = -1;
  int pipe = -1;
};

Process start(const Job& job, int rank) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    work(job, rank, ends[1]);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

/// Waits until the process has done so many more steps, or has ended.
void watch(const Process& process, std::int64_t num_steps) {
  char byte = 0;
  while (num_steps-- > 0 && read(process.pipe, &byte, 1) == 1) {
  }
}

struct Known {
  std::int64_t count = 0;
  std::int64_t last_step = 0;
};

TEST(IdKills, NothingIsLostOrDoubled) {
  const char* wanted = std::getenv("TESSERA_ID_OPERATIONS");
  const std::int64_t operations = wanted == nullptr ? 1'000'000 : std::atoll(wanted);
  Job job;
  std::string folder = (fs::temp_directory_path() / "id-kills-XXXXXX").string();
  job.folder = mkdtemp(folder.data());
  job.most_ids = operations > 10'000'000 ? 40'000 : 8'000;
  job.end = 2 * operations / job.most_ids;
  job.save_every = std::max<std::int64_t>(1, job.end / 50);
  const int most_kills = wanted == nullptr ? 12 : 60;

  std::mt19937_64 random(5);
  int num_kills = 0;
  int num_in_saves = 0;
  int num_moves = 0;
  while (job.first < job.end) {
    const int before = job.ranks;
    job.ranks = 1 + static_cast<int>(random() % 4);
    if (job.first > 0 && job.ranks != before) ++num_moves;
    std::vector<Process> processes;
    for (int rank = 0; rank < job.ranks; ++rank) processes.push_back(start(job, rank));
    // On a slow machine the first kills may all come before the first save.
    const bool is_killed = num_kills < most_kills || num_moves == 0;
    if (is_killed) {
      const auto steps = static_cast<std::uint64_t>(job.save_every) * 3;
      watch(processes[0], 1 + static_cast<std::int64_t>(random() % steps));
      usleep(static_cast<useconds_t>(random() % 3000));
      for (const Process& process : processes) kill(process.pid, SIGKILL);
    } else {
      for (const Process& process : processes) watch(process, job.end);
    }
    for (const Process& process : processes) {
      int status = 0;
      waitpid(process.pid, &status, 0);
      close(process.pipe);
      const bool was_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
      ASSERT_TRUE(was_killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
      ASSERT_TRUE(is_killed || !was_killed);
      num_kills += was_killed ? 1 : 0;
    }
    for (const auto& file : fs::directory_iterator(job.folder)) {
      if (file.path().extension() != ".part") continue;
      ++num_in_saves;
      fs::remove(file.path());
    }
    // On with the newest that is whole; what is older is not needed any more.
    for (std::int64_t step = job.end; step > job.first; --step) {
      if (!saved_after(job, step)) continue;
      job.first = step;
      break;
    }
    for (const auto& file : fs::directory_iterator(job.folder)) {
      if (std::stoll(file.path().filename().string()) < job.first) fs::remove(file.path());
    }
  }

  std::unordered_map<std::int64_t, Known> model;
  std::int64_t num_done = 0;
  for (std::int64_t number = 0; number < job.end; ++number) {
    const Step step = step_of(number, job.most_ids);
    num_done += static_cast<std::int64_t>(step.ids.size());
    for (const std::int64_t id : step.ids) {
      if (step.kind == Step::Kind::kErase) model.erase(id);
      if (step.kind != Step::Kind::kAdmit) continue;
      Known& known = model[id];
      ++known.count;
      known.last_step = number + 1;
    }
  }
  const IdList all = *saved_after(job, job.end);
  ASSERT_EQ(all.ids.size(), model.size());
  for (std::size_t i = 0; i < all.ids.size(); ++i) {
    const auto known = model.extract(all.ids[i]);  // an id that is there twice is not found again
    ASSERT_FALSE(known.empty()) << all.ids[i];
    ASSERT_EQ(all.counts[i], known.mapped().count) << all.ids[i];
    ASSERT_EQ(all.last_steps[i], known.mapped().last_step) << all.ids[i];
  }
  EXPECT_GE(num_kills, most_kills);
  EXPECT_GT(num_moves, 0);
  std::printf(
      "%lld operations, %d processes killed, %d of them while they saved, %d moves to other "
      "numbers of processes, %zu ids at the end\n",
      static_cast<long long>(num_done), num_kills, num_in_saves, num_moves, all.ids.size());
  fs::remove_all(job.folder);
}

}  // namespace
}  // namespace tessera::collision
