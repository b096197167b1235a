// simulator — runs the protocols in worlds of chance, one world a seed.
//
//   simulator                      the first 10,000 seeds
//   simulator --seed 4711          one, telling what happens
//   simulator --first 1 --count 1000000
//   simulator --world checkpoints  one of them only
//   simulator --list               their names

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "simulator/world.h"

namespace {

using namespace tessera::simulator;

struct World {
  const char* name;
  void (*run)(std::uint64_t seed, bool tells);
};
constexpr World kWorlds[] = {{"checkpoints", run_checkpoints},
                             {"channels", run_channels},
                             {"agreement", run_agreement},
                             {"launchers", run_launchers},
                             {"meetings", run_meetings}};

struct Words {
  std::uint64_t first = 1;
  std::uint64_t count = 10'000;
  std::optional<std::uint64_t> seed;
  std::string world;
};

[[noreturn]] void fail_usage() {
  std::fputs("usage: simulator [--seed N | --first N --count N] [--world NAME] | --list\n", stderr);
  std::exit(2);
}

Words read_words(int argc, char** argv) {
  Words words;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view flag = argv[i];
    if (i + 1 == argc) fail_usage();
    const char* value = argv[i + 1];
    if (flag == "--world") {
      words.world = value;
      continue;
    }
    char* end = nullptr;
    const std::uint64_t number = std::strtoull(value, &end, 10);
    if (end == value || *end != '\0') fail_usage();
    if (flag == "--seed") {
      words.seed = number;
    } else if (flag == "--first") {
      words.first = number;
    } else if (flag == "--count") {
      words.count = number;
    } else {
      fail_usage();
    }
  }
  const bool is_known = words.world.empty() ||
                        std::any_of(std::begin(kWorlds), std::end(kWorlds),
                                    [&](const World& world) { return words.world == world.name; });
  if (!is_known) fail_usage();
  return words;
}

// Whether every promise was kept.
bool run(const World& world, std::uint64_t seed, bool tells) {
  try {
    world.run(seed, tells);
    return true;
  } catch (const std::exception& error) {
    std::printf("FAILED: %s, seed %llu: %s\n  again: simulator --world %s --seed %llu\n",
                world.name, static_cast<unsigned long long>(seed), error.what(), world.name,
                static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--list") {
    for (const World& world : kWorlds) std::printf("%s\n", world.name);
    return 0;
  }
  const Words words = read_words(argc, argv);
  const std::uint64_t first = words.seed.value_or(words.first);
  const std::uint64_t count = words.seed ? 1 : words.count;
  std::uint64_t num_failed = 0;
  for (const World& world : kWorlds) {
    if (!words.world.empty() && words.world != world.name) continue;
    const auto begin = std::chrono::steady_clock::now();
    std::uint64_t num_bad = 0;
    // After ten the reason is known.
    std::uint64_t num_run = 0;
    for (; num_run < count && num_bad < 10; ++num_run) {
      if (words.seed) std::printf("%s, seed %llu\n", world.name, (unsigned long long)first);
      num_bad += run(world, first + num_run, words.seed.has_value()) ? 0 : 1;
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    std::printf("%s: %llu seeds from %llu, %llu failed, %.1f s\n", world.name,
                (unsigned long long)num_run, (unsigned long long)first, (unsigned long long)num_bad,
                taken.count());
    num_failed += num_bad;
  }
  return num_failed == 0 ? 0 : 1;
}
