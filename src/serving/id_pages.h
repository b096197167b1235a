// src/serving/id_pages.h — which slot each id of a growing table has, in pages that versions share.
//
// Extendible hashing: the first bits of an id's hash choose an entry of a directory, the entry a
// page. A page that is full becomes two, by the next bit; entries that differ only in later bits
// share a page until then. Pages hold no pointers and are never written while a version shows them:
// who changes one works on a copy (store.h).

#pragma once

#include <array>
#include <cstdint>

namespace tessera::serving {

inline constexpr std::uint32_t kNoSlot = UINT32_MAX;

struct IdPage {
  static constexpr std::uint32_t kEntries = 64;
  /// A page with more ids than this is split: the search for one that is not there stays short.
  static constexpr std::uint32_t kMost = 56;

  std::uint32_t depth = 0;  // bits of the hash that all its ids share
  std::uint32_t count = 0;
  std::array<std::int64_t, kEntries> ids;
  std::array<std::uint32_t, kEntries> slots;  // kNoSlot: the entry is free

  void clear(std::uint32_t shared_bits) noexcept;
  /// The slot of an id, or kNoSlot.
  std::uint32_t find(std::uint64_t hash, std::int64_t id) const noexcept;
  /// Where the slot of an id stands, null if the id is not here.
  std::uint32_t* place(std::uint64_t hash, std::int64_t id) noexcept;
  bool is_full() const noexcept { return count >= kMost; }
  /// Adds an id that is not here to a page that is not full.
  void insert(std::uint64_t hash, std::int64_t id, std::uint32_t slot) noexcept;
  /// False if it was not here.
  bool erase(std::int64_t id) noexcept;
};

/// The hash by which ids are found; that of checkpoints.
std::uint64_t hash_of_id(std::int64_t id) noexcept;

}  // namespace tessera::serving
