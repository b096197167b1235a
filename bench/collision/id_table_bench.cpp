// Times the id table beside maps, and beside the memory: one random line an id, and two.
//
//   id_table_bench [--ids N]... [--seconds S]
//
// One thread, batches of 65536 ids, all ids equally likely. Times are of the thread's processor
// time. The floors read prefetched lines of an array as large as the table's lines, in huge pages
// like the table. Names say what share of the table's memory lies in huge pages.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/util/flat_hash_map.h>
#ifdef TESSERA_HAS_ABSL
#include <absl/container/flat_hash_map.h>
#endif
#if __has_include(<boost/unordered/unordered_flat_map.hpp>)
#include <boost/unordered/unordered_flat_map.hpp>
#define TESSERA_HAS_BOOST_FLAT_MAP
#endif

#include "kernels/dispatch.h"
#include "support/row.h"
#include "tessera/collision/id_table.h"

namespace tessera::bench {
namespace {

using Ids = std::vector<std::int64_t>;

constexpr std::size_t kBatch = 65536;
constexpr int kWarmUps = 2;

double now_us() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

double time_of(const std::function<void()>& call) {
  const double begin = now_us();
  call();
  return now_us() - begin;
}

std::vector<double> repeat(const std::function<void(std::size_t)>& call, double seconds) {
  std::vector<double> times;
  const double end = now_us() + seconds * 1e6;
  for (std::size_t round = 0; times.size() < 10 || now_us() < end; ++round) {
    const double time = time_of([&] { call(round); });
    if (round >= kWarmUps) times.push_back(time);
  }
  return times;
}

std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15U;
  return collision::id_hash(static_cast<std::int64_t>(state));
}

/// Number i of all ids; the numbers from `count` on are not in the table.
std::int64_t id_number(std::uint64_t i) {
  return collision::id_of_hash(i * 0x9e3779b97f4a7c15U ^ 0x5bd1e995U);
}

/// Batches of random ids, a few that take turns.
std::vector<Ids> batches(std::uint64_t first, std::uint64_t count) {
  std::vector<Ids> all(16, Ids(kBatch));
  std::uint64_t state = 1;
  for (Ids& batch : all) {
    for (std::int64_t& id : batch) id = id_number(first + next_random(state) % count);
  }
  return all;
}

void row(const std::string& what, const std::string& variant, std::uint64_t count, double floor_us,
         std::vector<double> times) {
  RowLabel label;
  label.name = "collision/" + what + "/" + variant + "/n" + std::to_string(count) + "_b65536";
  label.isa = kernels::name_of(kernels::active_isa());
  label.bytes = kBatch * sizeof(std::int64_t);
  label.floor_us = floor_us;
  print_row(label, std::move(times));
}

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return quantile_of(times, 0.5);
}

/// Reads `lines_per_id` random lines of so many bytes for every id of a batch.
std::vector<double> floor_times(std::size_t bytes, int lines_per_id, double seconds) {
  constexpr std::size_t kAhead = 32;
  constexpr std::size_t kHugePage = std::size_t{1} << 21;
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  auto* begin = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(memory) + kHugePage - 1) /
                                        kHugePage * kHugePage);
  madvise(begin, bytes, MADV_HUGEPAGE);
  for (std::size_t at = 0; at < bytes; at += 4096) begin[at] = 1;
  const std::size_t num_lines = bytes / 64;
  std::uint64_t state = 2;
  std::vector<std::vector<std::uint32_t>> places(16,
                                                 std::vector<std::uint32_t>(kBatch * lines_per_id));
  for (auto& batch : places) {
    for (auto& place : batch) place = static_cast<std::uint32_t>(next_random(state) % num_lines);
  }
  std::int64_t sum = 0;
  auto times = repeat(
      [&](std::size_t round) {
        const auto& batch = places[round % places.size()];
        for (std::size_t i = 0; i < batch.size(); ++i) {
          const std::size_t ahead = std::min(i + kAhead, batch.size() - 1);
          __builtin_prefetch(begin + std::size_t{batch[ahead]} * 64);
          sum += *reinterpret_cast<const std::int64_t*>(begin + std::size_t{batch[i]} * 64);
        }
      },
      seconds);
  if (sum == 42) std::fprintf(stderr, "\n");  // keeps the reads
  munmap(memory, bytes + kHugePage);
  return times;
}

template <typename Map>
void measure_map(const std::string& name, std::uint64_t count, double seconds) {
  Map map;
  std::vector<double> growth;
  for (std::uint64_t first = 0; first < count; first += kBatch) {
    growth.push_back(time_of([&] {
      for (std::uint64_t i = first; i < std::min<std::uint64_t>(count, first + kBatch); ++i) {
        map.emplace(id_number(i), static_cast<std::uint32_t>(i));
      }
    }));
  }
  const double worst = *std::max_element(growth.begin(), growth.end());
  row("grow_worst", name, count, 0, {worst});
  row("grow", name, count, 0, std::move(growth));
  const auto hits = batches(0, count);
  Ids rows(kBatch);
  row("find", name, count, 0,
      repeat(
          [&](std::size_t round) {
            const Ids& ids = hits[round % hits.size()];
            for (std::size_t i = 0; i < kBatch; ++i) {
              const auto place = map.find(ids[i]);
              rows[i] = place == map.end() ? -1 : place->second;
            }
          },
          seconds));
}

/// What a table with a fixed number of rows does: an id modulo its rows, and one number of that
/// row.
std::vector<double> fixed_times(std::uint64_t count, double seconds) {
  std::vector<std::uint32_t> array(count, 1);
  const auto hits = batches(0, count);
  Ids rows(kBatch);
  return repeat(
      [&](std::size_t round) {
        const Ids& ids = hits[round % hits.size()];
        for (std::size_t i = 0; i < kBatch; ++i) {
          const auto row = static_cast<std::uint64_t>(ids[i]) % count;
          rows[i] = static_cast<std::int64_t>(row) + array[row];
        }
      },
      seconds);
}

void measure(std::uint64_t count, double seconds) {
  collision::IdTable table;
  Ids rows(kBatch);
  std::vector<double> growth;
  for (std::uint64_t first = 0; first < count; first += kBatch) {
    Ids ids(std::min<std::uint64_t>(kBatch, count - first));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = id_number(first + i);
    growth.push_back(time_of([&] { table.admit(ids, {}, 0, std::span(rows).first(ids.size())); }));
  }
  const auto huge = table.huge_page_bytes();
  const std::string variant =
      "tessera_huge" +
      std::to_string(huge < 0 ? 0 : std::min<std::int64_t>(100, huge * 100 / table.bytes()));
  row("grow_worst", variant, count, 0, {*std::max_element(growth.begin(), growth.end())});
  row("grow", variant, count, 0, std::move(growth));
  std::fprintf(stderr, "id_table_bench: %llu ids, %.1f bytes an id with its record\n",
               static_cast<unsigned long long>(count),
               static_cast<double>(table.bytes()) / static_cast<double>(count));

  const auto line_bytes = static_cast<std::size_t>(table.num_segments()) << 16;
  auto one = floor_times(line_bytes, 1, seconds);
  auto two = floor_times(line_bytes, 2, seconds);
  const double one_us = median(one);
  const double two_us = median(two);
  row("floor", "one_line", count, 0, std::move(one));
  row("floor", "two_lines", count, 0, std::move(two));
  const auto hits = batches(0, count);
  const auto misses = batches(count, count);
  for (std::size_t i = 0; i < kBatch; i += 997) {
    table.find(std::span(hits[0]).subspan(i, 1), std::span(rows).first(1));
    if (rows[0] < 0 || table.id_of(rows[0]) != hits[0][i]) std::abort();
  }
  const auto find = [&](const std::vector<Ids>& of) {
    return repeat([&](std::size_t round) { table.find(of[round % of.size()], rows); }, seconds);
  };
  row("find", variant, count, one_us, find(hits));
  row("find_unknown", variant, count, one_us, find(misses));
  row("find_and_count", variant, count, two_us,
      repeat([&](std::size_t round) { table.admit(hits[round % hits.size()], {}, 1, rows); },
             seconds));
  row("find", "fixed_rows", count, 0, fixed_times(count, seconds));
#ifdef TESSERA_HAS_ABSL
  measure_map<absl::flat_hash_map<std::int64_t, std::uint32_t>>("absl", count, seconds);
#endif
#ifdef TESSERA_HAS_BOOST_FLAT_MAP
  measure_map<boost::unordered_flat_map<std::int64_t, std::uint32_t>>("boost", count, seconds);
#endif
  measure_map<ska::flat_hash_map<std::int64_t, std::uint32_t>>("ska", count, seconds);
  if (count <= 10'000'000) {
    measure_map<std::unordered_map<std::int64_t, std::uint32_t>>("std", count, seconds);
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  double seconds = 0.5;
  std::vector<std::uint64_t> counts;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--seconds") seconds = std::atof(argv[i + 1]);
    if (std::string(argv[i]) == "--ids") counts.push_back(std::strtoull(argv[i + 1], nullptr, 10));
  }
  if (counts.empty()) counts = {1'000'000, 10'000'000};
  for (const std::uint64_t count : counts) tessera::bench::measure(count, seconds);
  return 0;
}
