// checkpoint/merged_list.h — where the rows of a list come from, once a delta is applied to it.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// What a ListDelta says, as numbers; see there.
struct ListNumbers {
  std::vector<std::int64_t> base;
  std::vector<std::int64_t> base_groups;
  std::vector<std::int64_t> groups;
  std::vector<std::int64_t> changed;
  std::vector<std::int64_t> runs;
  std::vector<std::int64_t> removed;
};

/// Rows of the base and of the delta in the order of the merged list. Takes memory for what the
/// delta changes, not for the list.
class MergedList {
 public:
  /// Rows [first, first + count) of the merged list, which lie behind each other in their source.
  struct Stretch {
    std::int64_t first = 0;
    std::int64_t count = 0;
    std::int64_t source = 0;  // the row there
    bool is_changed = false;  // of the delta, not of the base
  };

  /// Throws Error(kCorrupt) that begins with `where` for numbers that no delta has.
  MergedList(const ListNumbers& numbers, const std::string& where);

  std::int64_t num_rows() const noexcept { return num_rows_; }
  /// Rows [begin, end), in order.
  std::vector<Stretch> stretches(std::int64_t begin, std::int64_t end) const;

 private:
  void add(std::int64_t source, bool is_changed);

  std::vector<Stretch> stretches_;
  std::int64_t num_rows_ = 0;
};

}  // namespace tessera::checkpoint
