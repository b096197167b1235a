#include "kernels/table_sort.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace tessera::kernels {
namespace {

// 2048 counters and as many open lines fit the first-level caches.
constexpr int kMostBits = 11;
static_assert(3 * kMostBits >= 32, "rows of 32 bits take three passes at most");

constexpr std::uint64_t kPlaces = 37;

// Plans are passed by value: a reference would be read again after every counter is written.
std::uint32_t digit_of(RadixPlan plan, int pass, RowEntry entry) {
  const std::uint64_t key = static_cast<std::uint64_t>(row_of(entry)) * plan.factor;
  return static_cast<std::uint32_t>(key >> (pass * plan.bits_per_pass)) &
         ((1U << plan.bits_per_pass) - 1U);
}

/// Counts the digits of all passes in one sweep.
template <int kPasses>
void count_all(RadixPlan plan, std::span<const RowEntry> entries, std::uint32_t* counts) {
  const std::int64_t digits = plan.num_digits();
  for (const RowEntry entry : entries) {
    for (int pass = 0; pass < kPasses; ++pass) {
      ++counts[pass * digits + digit_of(plan, pass, entry)];
    }
  }
}

template <typename Id>
void fill(const Id* ids, const LookupIds& call, const TableFeature& feature, std::int64_t begin,
          std::int64_t end, EntrySource source, RowEntry* entries, std::uint32_t* bag_of) {
  const auto num_rows = static_cast<std::uint64_t>(feature.rows.num_rows);
  std::int64_t position = call.offset(feature.first_bag + begin);
  for (std::int64_t bag = begin; bag < end; ++bag) {
    const std::int64_t last = call.offset(feature.first_bag + bag + 1);
    const auto bag_number = static_cast<std::uint64_t>(feature.first_bag + bag);
    for (; position < last; ++position) {
      auto row = static_cast<std::uint64_t>(static_cast<std::int64_t>(ids[position]));
      if (row >= num_rows) row = 0;
      const auto origin =
          source == EntrySource::kBag ? bag_number : static_cast<std::uint64_t>(position);
      *entries++ = make_entry(row, origin);
      if (bag_of != nullptr) bag_of[position] = static_cast<std::uint32_t>(bag_number);
    }
  }
}

}  // namespace

void fill_entries(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                  std::int64_t end, EntrySource source, RowEntry* entries, std::uint32_t* bag_of) {
  if (ids.wide_ids) {
    fill(static_cast<const std::int64_t*>(ids.ids), ids, feature, begin, end, source, entries,
         bag_of);
  } else {
    fill(static_cast<const std::int32_t*>(ids.ids), ids, feature, begin, end, source, entries,
         bag_of);
  }
}

RadixPlan radix_plan(std::int64_t num_rows, RowOrder order) {
  const int bits =
      std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(num_rows, 1)) - 1);
  RadixPlan plan;
  plan.num_passes = (bits + kMostBits - 1) / kMostBits;
  plan.bits_per_pass = plan.num_passes == 0 ? 0 : (bits + plan.num_passes - 1) / plan.num_passes;
  if (order == RowOrder::kSpread) plan.factor = kPlaces;
  return plan;
}

void count_digits(RadixPlan plan, int pass, std::span<const RowEntry> entries,
                  std::uint32_t* counts) {
  std::fill_n(counts, plan.num_digits(), 0U);
  for (const RowEntry entry : entries) ++counts[digit_of(plan, pass, entry)];
}

void place_digits(RadixPlan plan, int num_pieces, std::uint32_t* counts) {
  std::uint32_t next = 0;
  for (std::int64_t digit = 0; digit < plan.num_digits(); ++digit) {
    for (int piece = 0; piece < num_pieces; ++piece) {
      std::uint32_t& count = counts[piece * plan.num_digits() + digit];
      next += std::exchange(count, next);
    }
  }
}

void scatter_digits(RadixPlan plan, int pass, std::span<const RowEntry> entries,
                    std::uint32_t* places, RowEntry* output) {
  for (const RowEntry entry : entries) output[places[digit_of(plan, pass, entry)]++] = entry;
}

void sort_entries(RadixPlan plan, std::span<RowEntry> entries, RowEntry* spare,
                  std::uint32_t* counts) {
  std::span<RowEntry> from = entries;
  std::span<RowEntry> to(spare, entries.size());
  std::fill_n(counts, plan.num_counts(), 0U);
  if (plan.num_passes == 1) count_all<1>(plan, entries, counts);
  if (plan.num_passes == 2) count_all<2>(plan, entries, counts);
  if (plan.num_passes == 3) count_all<3>(plan, entries, counts);
  for (int pass = 0; pass < plan.num_passes; ++pass, counts += plan.num_digits()) {
    place_digits(plan, 1, counts);
    scatter_digits(plan, pass, from, counts, to.data());
    std::swap(from, to);
  }
  if (from.data() != entries.data()) std::copy(from.begin(), from.end(), entries.begin());
}

}  // namespace tessera::kernels
