#include "collision/row_deadlines.h"

#include <algorithm>

namespace tessera::collision {

void RowDeadlines::plan(std::uint32_t row, std::int64_t deadline) {
  if (row >= has_entry_.size()) has_entry_.resize(std::size_t{row} + 1);
  if (has_entry_[row]) return;
  added_.push_back(row);
  planned_[deadline].push_back(row);
  has_entry_[row] = true;
}

void RowDeadlines::reserve() {
  for (const auto& [step, rows] : planned_) {
    const auto slot = slots_.find(step);
    if (slot == slots_.end()) continue;
    auto& known = slot->second;
    const std::size_t needed = known.size() + rows.size();
    if (needed > known.capacity()) known.reserve(std::max(needed, known.size() * 3 / 2));
  }
}

void RowDeadlines::keep() noexcept {
  slots_.erase(slots_.begin(), slots_.upper_bound(due_));
  for (const auto& [step, rows] : planned_) {
    const auto slot = slots_.find(step);
    if (slot != slots_.end()) slot->second.insert(slot->second.end(), rows.begin(), rows.end());
  }
  slots_.merge(planned_);
  forget_plan();
}

void RowDeadlines::undo() noexcept {
  for (const std::uint32_t row : added_) has_entry_[row] = false;
  for (const std::uint32_t row : dropped_) has_entry_[row] = true;
  forget_plan();
}

void RowDeadlines::clear() noexcept {
  slots_.clear();
  has_entry_ = std::vector<bool>();  // its memory, too
  forget_plan();
}

void RowDeadlines::forget_plan() noexcept {
  due_ = kNone;
  planned_.clear();
  added_.clear();
  dropped_.clear();
}

std::int64_t RowDeadlines::bytes() const noexcept {
  // A slot is a node of the map: a vector, its step and four words of the tree.
  constexpr std::size_t kSlot = sizeof(std::vector<std::uint32_t>) + 5 * sizeof(void*);
  std::size_t bytes = has_entry_.capacity() / 8;
  for (const auto& [step, rows] : slots_) bytes += kSlot + rows.capacity() * sizeof(std::uint32_t);
  return static_cast<std::int64_t>(bytes);
}

}  // namespace tessera::collision
