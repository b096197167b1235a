// Pooled lookups in rows of few bits, one thread, beside the floor: the first and last byte of each
// row of the same list of ids, fetched 24 rows ahead. bench/compare/fbgemm_quant.py is the peer's
// row.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "support/row.h"
#include "tessera/embedding/quantised_rows.h"

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kTables = 8;
constexpr std::int64_t kBag = 20;
constexpr int kLists = 8;  // of ids, in turn
constexpr std::int64_t kAhead = 24;

// Rows of all tables, on huge or ordinary pages. Codes are random; scale and bias are those of 1.
class Memory {
 public:
  Memory(std::size_t num_bytes, bool is_huge) : num_bytes_(num_bytes) {
    data_ = static_cast<std::uint8_t*>(::mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (data_ == MAP_FAILED) std::abort();
    ::madvise(data_, num_bytes_, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::mt19937_64 random(1);
    for (std::size_t i = 0; i + 8 <= num_bytes_; i += 8) {
      // Never an exponent of all ones, whatever the type.
      const std::uint64_t word = random() & 0x3B3B3B3B3B3B3B3BULL;
      std::memcpy(data_ + i, &word, 8);
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { ::munmap(data_, num_bytes_); }
  std::uint8_t* data() const { return data_; }

 private:
  std::uint8_t* data_;
  std::size_t num_bytes_;
};

struct Ids {
  std::vector<std::int64_t> ids;      // table by table
  std::vector<std::int64_t> offsets;  // of one table
};

double microseconds(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

template <class Action>
std::vector<double> time_of(double seconds, const Action& action) {
  std::vector<double> times;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (int i = 0; i < 12 || Clock::now() < end; ++i) {
    const auto begin = Clock::now();
    action(i % kLists);
    if (i >= 4) times.push_back(microseconds(begin));
  }
  std::sort(times.begin(), times.end());
  return times;
}

void measure(embedding::RowType type, std::int64_t num_rows, std::int64_t dim, std::int64_t batch,
             bool is_huge, double seconds) {
  const std::int64_t row_bytes = embedding::row_bytes(type, dim, 4);
  const std::int64_t table_bytes = num_rows * row_bytes;
  const Memory memory(static_cast<std::size_t>(kTables * table_bytes), is_huge);
  std::vector<Ids> lists(kLists);
  std::mt19937_64 random(7);
  for (Ids& list : lists) {
    list.ids.resize(static_cast<std::size_t>(kTables * batch * kBag));
    for (auto& id : list.ids)
      id = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(num_rows));
    for (std::int64_t b = 0; b <= batch; ++b) list.offsets.push_back(b * kBag);
  }
  std::vector<float> output(static_cast<std::size_t>(batch * kTables * dim));
  volatile std::uint64_t sink = 0;
  const auto floor = time_of(seconds / 2, [&](int turn) {
    std::uint64_t sum = 0;
    const auto& ids = lists[static_cast<std::size_t>(turn)].ids;
    const auto count = static_cast<std::int64_t>(ids.size());
    const auto row_at = [&](std::int64_t k) {
      return memory.data() + k / (batch * kBag) * table_bytes +
             ids[static_cast<std::size_t>(k)] * row_bytes;
    };
    for (std::int64_t k = 0; k < count; ++k) {
      if (k + kAhead < count) {
        __builtin_prefetch(row_at(k + kAhead));
        __builtin_prefetch(row_at(k + kAhead) + row_bytes - 1);
      }
      sum += row_at(k)[0] + row_at(k)[row_bytes - 1];
    }
    sink = sink + sum;
  });
  const auto times = time_of(seconds, [&](int turn) {
    const Ids& list = lists[static_cast<std::size_t>(turn)];
    for (std::int64_t t = 0; t < kTables; ++t) {
      const embedding::RowTable table{type, memory.data() + t * table_bytes, num_rows, dim,
                                      row_bytes};
      embedding::pool_rows(table, {list.ids.data() + t * batch * kBag, list.offsets},
                           output.data() + t * dim, kTables * dim);
    }
  });
  bench::RowLabel label;
  label.name = "serving/lookup_" + std::string(embedding::name_of(type)) + "/" +
               (is_huge ? "huge" : "plain") + "/r" + std::to_string(num_rows) + "_d" +
               std::to_string(dim) + "_b" + std::to_string(batch);
  label.state = is_huge ? "huge pages" : "ordinary pages";
  label.bytes = static_cast<std::size_t>(kTables * batch * kBag * row_bytes);
  // At small batches the rows lie in the cache for everyone: no floor.
  label.floor_us = batch >= 1024 ? bench::quantile_of(floor, 0.5) : 0;
  bench::print_row(label, times);
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 1;
  std::int64_t num_rows = 1'000'000;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--rows") == 0) num_rows = std::atoll(argv[i + 1]);
  }
  using embedding::RowType;
  for (const bool is_huge : {true, false}) {
    for (const std::int64_t dim : {64, 128}) {
      for (const RowType type : {RowType::kInt8, RowType::kInt4, RowType::kFp16}) {
        for (const std::int64_t batch : {2048, 64}) {
          measure(type, num_rows, dim, batch, is_huge, seconds);
        }
      }
    }
  }
  return 0;
}
