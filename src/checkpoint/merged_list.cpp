#include "checkpoint/merged_list.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "checkpoint/json.h"

namespace tessera::checkpoint {
namespace {

using json::corrupt;

/// What a delta says of an id. A table of its own: every id of the base is looked for once.
class Fates {
 public:
  struct Fate {
    std::int64_t id = 0;
    std::int64_t changed = -1;  // its place among the changed ids
    bool is_removed = false;
    bool is_used = false;  // this entry
  };

  explicit Fates(std::size_t most) : entries_(std::bit_ceil(std::max<std::size_t>(4 * most, 16))) {}

  Fate& operator[](std::int64_t id) {
    Fate& found = entries_[place_of(id)];
    found.id = id;
    found.is_used = true;
    return found;
  }
  const Fate* find(std::int64_t id) const {
    const Fate& found = entries_[place_of(id)];
    return found.is_used ? &found : nullptr;
  }

 private:
  std::size_t place_of(std::int64_t id) const {
    const std::size_t mask = entries_.size() - 1;
    auto mixed = static_cast<std::uint64_t>(id) * 0x9e3779b97f4a7c15U;
    mixed ^= mixed >> 32;
    auto place = static_cast<std::size_t>(mixed) & mask;
    while (entries_[place].is_used && entries_[place].id != id) place = (place + 1) & mask;
    return place;
  }

  std::vector<Fate> entries_;
};

std::int64_t sum_of(const std::vector<std::int64_t>& numbers) {
  // Of numbers that cannot be counts, one that is no size of a list.
  for (const std::int64_t number : numbers) {
    if (number < 0 || number > (std::int64_t{1} << 48)) return -1;
  }
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
}

void check(const ListNumbers& numbers, const std::string& where) {
  const auto size = [](const std::vector<std::int64_t>& list) {
    return static_cast<std::int64_t>(list.size());
  };
  if (numbers.base_groups.size() != numbers.groups.size() ||
      numbers.runs.size() != numbers.groups.size() ||
      sum_of(numbers.base_groups) != size(numbers.base) ||
      sum_of(numbers.runs) != size(numbers.changed)) {
    corrupt(where, "its groups overlap, or leave ids out");
  }
}

}  // namespace

MergedList::MergedList(const ListNumbers& numbers, const std::string& where) {
  check(numbers, where);
  Fates fates(numbers.changed.size() + numbers.removed.size());
  for (const std::int64_t id : numbers.removed) fates[id].is_removed = true;
  for (std::size_t i = 0; i < numbers.changed.size(); ++i) {
    Fates::Fate& fate = fates[numbers.changed[i]];
    if (fate.changed >= 0) {
      corrupt(where, "has id " + std::to_string(numbers.changed[i]) + " twice, in changed rows " +
                         std::to_string(fate.changed) + " and " + std::to_string(i));
    }
    fate.changed = static_cast<std::int64_t>(i);
  }
  std::vector<bool> is_placed(numbers.changed.size());
  std::size_t base = 0;
  std::size_t changed = 0;
  for (std::size_t group = 0; group < numbers.groups.size(); ++group) {
    const std::int64_t before = num_rows_;
    for (std::int64_t i = 0; i < numbers.base_groups[group]; ++i, ++base) {
      const Fates::Fate* fate = fates.find(numbers.base[base]);
      if (fate == nullptr) {
        add(static_cast<std::int64_t>(base), false);
      } else if (!fate->is_removed) {
        add(fate->changed, true);
        is_placed[static_cast<std::size_t>(fate->changed)] = true;
      }
    }
    for (std::int64_t i = 0; i < numbers.runs[group]; ++i, ++changed) {
      if (!is_placed[changed]) add(static_cast<std::int64_t>(changed), true);
    }
    if (num_rows_ - before != numbers.groups[group]) {
      corrupt(where, "group " + std::to_string(group) + " is to have " +
                         std::to_string(numbers.groups[group]) + " ids, and has " +
                         std::to_string(num_rows_ - before));
    }
  }
}

void MergedList::add(std::int64_t source, bool is_changed) {
  if (!stretches_.empty()) {
    Stretch& last = stretches_.back();
    if (last.is_changed == is_changed && last.source + last.count == source) {
      ++last.count;
      ++num_rows_;
      return;
    }
  }
  stretches_.push_back({num_rows_, 1, source, is_changed});
  ++num_rows_;
}

std::vector<MergedList::Stretch> MergedList::stretches(std::int64_t begin, std::int64_t end) const {
  std::vector<Stretch> cut;
  auto place = std::upper_bound(
      stretches_.begin(), stretches_.end(), begin,
      [](std::int64_t row, const Stretch& stretch) { return row < stretch.first; });
  if (place != stretches_.begin()) --place;
  for (; place != stretches_.end() && place->first < end; ++place) {
    Stretch part = *place;
    const std::int64_t skipped = std::max<std::int64_t>(0, begin - part.first);
    part.first += skipped;
    part.source += skipped;
    part.count = std::min(part.count - skipped, end - part.first);
    if (part.count > 0) cut.push_back(part);
  }
  return cut;
}

}  // namespace tessera::checkpoint
