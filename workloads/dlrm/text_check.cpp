#include "dlrm/text_check.h"

#include "data/schema.h"

namespace tessera::workloads::dlrm {
namespace {

constexpr std::size_t kTogether = 4096;

}  // namespace

void TextCheck::see(std::string_view text, std::int64_t id) {
  const std::uint32_t check = data::check_hash(text);
  const std::lock_guard lock(mutex_);
  next_ids_.push_back(id);
  next_checks_.push_back(check);
  if (next_ids_.size() == kTogether) look_up();
}

TextCheck::Found TextCheck::found() {
  const std::lock_guard lock(mutex_);
  look_up();
  return {ids_.size(), static_cast<std::int64_t>(clashes_.size())};
}

void TextCheck::look_up() {
  rows_.resize(next_ids_.size());
  ids_.admit(next_ids_, {}, 0, rows_);
  const auto known = static_cast<std::int64_t>(checks_.size());
  checks_.resize(static_cast<std::size_t>(ids_.num_rows()));
  std::vector<bool> is_set(checks_.size() - static_cast<std::size_t>(known));
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const auto row = static_cast<std::size_t>(rows_[i]);
    if (rows_[i] >= known && !is_set[row - static_cast<std::size_t>(known)]) {
      is_set[row - static_cast<std::size_t>(known)] = true;
      checks_[row] = next_checks_[i];
    } else if (checks_[row] != next_checks_[i]) {
      clashes_.emplace(next_ids_[i], next_checks_[i]);
    }
  }
  next_ids_.clear();
  next_checks_.clear();
}

}  // namespace tessera::workloads::dlrm
