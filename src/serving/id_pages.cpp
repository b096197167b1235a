#include "serving/id_pages.h"

#include "tessera/collision/id_table.h"

namespace tessera::serving {

std::uint64_t hash_of_id(std::int64_t id) noexcept { return collision::id_hash(id); }

void IdPage::clear(std::uint32_t shared_bits) noexcept {
  depth = shared_bits;
  count = 0;
  ids.fill(0);
  slots.fill(kNoSlot);
}

std::uint32_t IdPage::find(std::uint64_t hash, std::int64_t id) const noexcept {
  auto at = static_cast<std::uint32_t>(hash % kEntries);
  // A full page would be searched without end; there is none.
  while (slots[at] != kNoSlot) {
    if (ids[at] == id) return slots[at];
    at = (at + 1) % kEntries;
  }
  return kNoSlot;
}

std::uint32_t* IdPage::place(std::uint64_t hash, std::int64_t id) noexcept {
  auto at = static_cast<std::uint32_t>(hash % kEntries);
  while (slots[at] != kNoSlot) {
    if (ids[at] == id) return &slots[at];
    at = (at + 1) % kEntries;
  }
  return nullptr;
}

void IdPage::insert(std::uint64_t hash, std::int64_t id, std::uint32_t slot) noexcept {
  auto at = static_cast<std::uint32_t>(hash % kEntries);
  while (slots[at] != kNoSlot) at = (at + 1) % kEntries;
  ids[at] = id;
  slots[at] = slot;
  ++count;
}

bool IdPage::erase(std::int64_t id) noexcept {
  if (place(hash_of_id(id), id) == nullptr) return false;
  // Those behind it may stand where they do because of it.
  const IdPage before = *this;
  clear(before.depth);
  for (std::uint32_t i = 0; i < kEntries; ++i) {
    if (before.slots[i] == kNoSlot || before.ids[i] == id) continue;
    insert(hash_of_id(before.ids[i]), before.ids[i], before.slots[i]);
  }
  return true;
}

}  // namespace tessera::serving
