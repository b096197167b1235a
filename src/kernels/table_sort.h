// src/kernels/table_sort.h — brings equal rows together, in the order of their positions.
//
// A stable radix sort of the high halves of the entries, in pieces that threads can share: fill,
// then per digit count every piece, add up, and scatter every piece.

#pragma once

#include <span>

#include "kernels/table_rows.h"

namespace tessera::kernels {

/// What an entry remembers of its position.
enum class EntrySource : std::uint8_t { kBag, kPosition };

/// Writes the entries of bags `begin` to `end - 1` of the feature, from `entries` on. With
/// `bag_of`, also the bag of every position. Ids outside the table count as 0; a table without rows
/// must not come here.
void fill_entries(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                  std::int64_t end, EntrySource source, RowEntry* entries, std::uint32_t* bag_of);

/// The order of different rows.
///
/// kSpread goes through the table at 37 places at a time, each rising: rows that follow each other
/// lie far apart, so the processor's own guesses at the next lines, most of them not wanted, stay
/// away; lines of state and pages, which neighbouring rows share, are still visited in one go. It
/// pays where rising rows would lie less than a page apart.
enum class RowOrder : std::uint8_t { kRising, kSpread };

/// How a sort of rows below `num_rows` is cut into passes.
struct RadixPlan {
  int num_passes = 0;
  int bits_per_pass = 0;
  std::uint64_t factor = 1;  // rows are ordered by their product with it; odd, so all differ
  std::int64_t num_digits() const { return std::int64_t{1} << bits_per_pass; }
  /// How many counters sort_entries needs.
  std::int64_t num_counts() const { return num_passes * num_digits(); }
};
RadixPlan radix_plan(std::int64_t num_rows, RowOrder order);

/// counts[d]: how many of the entries have digit d in this pass.
void count_digits(RadixPlan plan, int pass, std::span<const RowEntry> entries,
                  std::uint32_t* counts);
/// Turns the counts of `num_pieces` pieces, one behind the other, into where each piece puts its
/// first entry of each digit.
void place_digits(RadixPlan plan, int num_pieces, std::uint32_t* counts);
/// Moves the entries of one piece to their places; `places` is used up.
void scatter_digits(RadixPlan plan, int pass, std::span<const RowEntry> entries,
                    std::uint32_t* places, RowEntry* output);

/// All of it on one thread. The result is in `entries`; `spare` is as long; `counts` has
/// plan.num_counts() numbers.
void sort_entries(RadixPlan plan, std::span<RowEntry> entries, RowEntry* spare,
                  std::uint32_t* counts);

}  // namespace tessera::kernels
