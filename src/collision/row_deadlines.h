// src/collision/row_deadlines.h — when the rows of a table with a time to live are looked at.

#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace tessera::collision {

/// Every row with an id has one entry: a step before which it is not too old. A row that was seen
/// since gets a later one when that step comes. So a step looks at the rows that one earlier step
/// saw last, never at the whole table.
///
/// What a batch changes is planned, then kept or undone. An entry outlives the id it was made for;
/// the next one in the row is looked at too early once, never too late.
class RowDeadlines {
 public:
  /// What `look` returns for rows that need no entry.
  static constexpr std::int64_t kNone = -1;

  bool has_due(std::int64_t step) const noexcept {
    return !slots_.empty() && slots_.begin()->first <= step;
  }
  /// Takes the entries for `step` and before: `look(row)` returns when the row is looked at again,
  /// later than `step`, or kNone.
  template <typename Look>
  void plan_due(std::int64_t step, const Look& look) {
    due_ = step;
    for (auto slot = slots_.begin(); slot != slots_.end() && slot->first <= step; ++slot) {
      for (const std::uint32_t row : slot->second) {
        const std::int64_t next = look(row);
        if (next == kNone) {
          dropped_.push_back(row);
          has_entry_[row] = false;
        } else {
          planned_[next].push_back(row);
        }
      }
    }
  }
  /// An entry for the row, unless it has one.
  void plan(std::uint32_t row, std::int64_t deadline);
  /// Takes the memory that `keep` needs.
  void reserve();
  void keep() noexcept;
  void undo() noexcept;
  void clear() noexcept;

  std::int64_t bytes() const noexcept;

 private:
  void forget_plan() noexcept;

  std::map<std::int64_t, std::vector<std::uint32_t>> slots_;  // rows by the step of their entry
  std::vector<bool> has_entry_;                               // by row
  // Of the batch at hand.
  std::int64_t due_ = kNone;
  std::map<std::int64_t, std::vector<std::uint32_t>> planned_;
  std::vector<std::uint32_t> added_;
  std::vector<std::uint32_t> dropped_;
};

}  // namespace tessera::collision
