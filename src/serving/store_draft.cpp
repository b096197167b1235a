// A version in the making.

#include <cstring>
#include <ctime>
#include <stdexcept>

#include "serving/store.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {

Store::Draft::Draft(Store& store)
    : store_(store), choice_(store.choice_->load()), parent_(number_in(choice_)), number_(-1) {
  for (int v = 0; v < store.num_versions_ && number_ < 0; ++v) {
    if (!store.is_live(v) && !store.is_held(v)) number_ = v;
  }
  if (number_ < 0) throw std::runtime_error("serving: requests still read every version there is");
  std::memcpy(store.directory(number_, 0), store.directory(parent_, 0),
              store.directory_size_ * sizeof(std::uint32_t));
}

std::uint8_t* Store::Draft::row(std::size_t table, std::int64_t row) {
  const std::int64_t place = row / kPageRows;
  std::uint32_t* own = store_.directory(number_, table);
  const std::uint32_t* before = store_.directory(parent_, table);
  std::uint32_t& number = own[1 + place];
  const std::uint32_t old = before[1 + place];
  if (number == old) {
    if (store_.free_pages_[table].wants_look()) store_.collect(table, number_);
    const std::uint32_t fresh = store_.free_pages_[table].take();
    std::uint32_t* slots = store_.page(table, fresh);
    if (old == kNoPage) {
      for (std::int64_t i = 0; i < kPageRows; ++i) {
        slots[i] = static_cast<std::uint32_t>(place * kPageRows + i);
      }
      ++own[0];
    } else {
      std::memcpy(slots, store_.page(table, old), kPageRows * sizeof(std::uint32_t));
    }
    number = fresh;
  }
  std::uint32_t& slot = store_.page(table, number)[row % kPageRows];
  const std::uint32_t was =
      old == kNoPage ? static_cast<std::uint32_t>(row) : store_.page(table, old)[row % kPageRows];
  if (slot == was) slot = take_row(table);
  return store_.bytes_of_slot(table, slot);
}

std::uint32_t Store::Draft::take_row(std::size_t table) {
  if (store_.free_rows_[table].wants_look()) store_.collect(table, number_);
  ++num_rows_;
  return store_.first_spare_[table] + store_.free_rows_[table].take();
}

std::uint32_t Store::Draft::take_page(std::size_t table) {
  if (store_.free_pages_[table].wants_look()) store_.collect(table, number_);
  return store_.free_pages_[table].take();
}

// The page behind an entry, which no other version shows.
IdPage& Store::Draft::own_page(std::size_t table, std::uint64_t entry) {
  const std::uint32_t now = store_.directory(number_, table)[1 + entry];
  if (parent_ < 0 || now != store_.directory(parent_, table)[1 + entry]) {
    return store_.id_page(table, now);
  }
  const std::uint32_t fresh = take_page(table);
  IdPage& page = store_.id_page(table, fresh);
  page = store_.id_page(table, now);
  show_page(table, entry, page.depth, fresh);
  return page;
}

// Lets all entries that share the first `depth` bits with this one lead to a page.
void Store::Draft::show_page(std::size_t table, std::uint64_t entry, std::uint32_t depth,
                             std::uint32_t page) {
  const std::uint64_t count = std::uint64_t{1} << (store_.num_bits_[table] - depth);
  std::uint32_t* own = store_.directory(number_, table) + 1 + entry / count * count;
  std::fill_n(own, count, page);
}

// Makes two pages of the one behind an entry, which is this draft's own.
void Store::Draft::split(std::size_t table, std::uint64_t entry) {
  std::uint32_t* own = store_.directory(number_, table) + 1;
  IdPage& low = store_.id_page(table, own[entry]);
  if (low.depth >= store_.num_bits_[table]) {
    throw checkpoint::Error(checkpoint::ErrorKind::kInvalid,
                            "update: table '" + store_.model().tables[table].name +
                                "' has grown to " +
                                std::to_string(store_.directory(number_, table)[0]) +
                                " ids, more than there is room for: export it, and reload.");
  }
  const IdPage before = low;
  const std::uint32_t number = take_page(table);
  IdPage& high = store_.id_page(table, number);
  low.clear(before.depth + 1);
  high.clear(before.depth + 1);
  for (std::uint32_t i = 0; i < IdPage::kEntries; ++i) {
    if (before.slots[i] == kNoSlot) continue;
    const std::uint64_t hash = hash_of_id(before.ids[i]);
    const bool is_high = (hash >> (63U - before.depth) & 1U) != 0;
    (is_high ? high : low).insert(hash, before.ids[i], before.slots[i]);
  }
  const std::uint64_t count = std::uint64_t{1} << (store_.num_bits_[table] - before.depth);
  show_page(table, entry / count * count + count / 2, before.depth + 1, number);
}

std::uint32_t& Store::Draft::slot_of_id(std::size_t table, std::int64_t id, bool& is_new) {
  const std::uint64_t hash = hash_of_id(id);
  const std::uint64_t entry = store_.entry_of(table, hash);
  while (true) {
    IdPage& page = own_page(table, entry);
    std::uint32_t* place = page.place(hash, id);
    is_new = place == nullptr;
    if (!is_new) return *place;
    if (page.is_full()) {
      split(table, entry);
      continue;
    }
    page.insert(hash, id, 0);  // a row of the package, until it gets its own
    ++store_.directory(number_, table)[0];
    return *page.place(hash, id);
  }
}

std::uint8_t* Store::Draft::row_of_id(std::size_t table, std::int64_t id) {
  bool is_new = false;
  std::uint32_t& slot = slot_of_id(table, id, is_new);
  const std::uint64_t hash = hash_of_id(id);
  const std::uint32_t before = store_.directory(parent_, table)[1 + store_.entry_of(table, hash)];
  if (is_new || slot == store_.id_page(table, before).find(hash, id)) slot = take_row(table);
  return store_.bytes_of_slot(table, slot);
}

std::uint8_t* Store::Draft::unknown_row(std::size_t table) {
  const std::size_t place = 1 + store_.num_pages_[table];
  std::uint32_t& slot = store_.directory(number_, table)[place];
  if (slot == store_.directory(parent_, table)[place]) slot = take_row(table);
  return store_.bytes_of_slot(table, slot);
}

void Store::Draft::remove_id(std::size_t table, std::int64_t id) {
  const std::uint64_t hash = hash_of_id(id);
  const std::uint64_t entry = store_.entry_of(table, hash);
  std::uint32_t* own = store_.directory(number_, table);
  if (store_.id_page(table, own[1 + entry]).find(hash, id) == kNoSlot) return;
  own_page(table, entry).erase(id);
  --own[0];
}

void Store::Draft::clear_ids(std::size_t table) {
  store_.directory(number_, table)[0] = 0;
  const std::uint32_t page = take_page(table);
  store_.id_page(table, page).clear(0);
  show_page(table, 0, 0, page);
}

float* Store::Draft::dense() noexcept {
  return reinterpret_cast<float*>(store_.dense_memory_.data()) +
         static_cast<std::size_t>(number_) * store_.plan_.num_floats;
}

void Store::Draft::publish(std::int64_t step, std::int64_t commit, const std::string& source) {
  VersionLine& line = store_.versions_[number_];
  line.order = store_.next_order();
  line.step = step;
  line.commit = commit;
  line.made = static_cast<std::int64_t>(std::time(nullptr));
  line.num_rows = num_rows_;
  line.source.fill('\0');
  std::memcpy(line.source.data(), source.data(), std::min<std::size_t>(source.size(), 64));
}

void Store::Draft::commit() {
  std::atomic<std::int32_t>& life = store_.versions_[number_].life;
  life.store(2);  // live, and pinned
  // Somebody may have gone back meanwhile, also to where he was: what he wants counts.
  std::uint64_t before = choice_;
  const bool is_chosen =
      store_.choice_->compare_exchange_strong(before, choice_after(choice_, number_));
  store_.unpin(is_chosen ? parent_ : number_);
  if (!is_chosen) {
    store_.retire(number_);
    throw std::runtime_error("serving: another version was chosen while this one was made");
  }
  store_.retire_beyond_kept();
}

}  // namespace tessera::serving
