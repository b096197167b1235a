#include "serving/store.h"

#include <unistd.h>

#include <bit>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>
#include <utility>

#include "serving/model_info.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

constexpr std::size_t kNumLines = 1024;
// Fewer rows than this are never worth a look for those that were let go.
constexpr std::uint32_t kFewRows = 1 << 14;

std::size_t pages_of(std::int64_t num_rows) {
  return static_cast<std::size_t>((num_rows + kPageRows - 1) / kPageRows);
}

// Entries of the directory of a table that grows: four for each page that all its ids will need.
std::size_t entries_of(std::int64_t num_ids) {
  return std::bit_ceil(static_cast<std::size_t>(most_ids(num_ids)) / 16);
}

constexpr std::size_t page_bytes(bool is_growing) {
  return is_growing ? sizeof(IdPage) : kPageRows * sizeof(std::uint32_t);
}

}  // namespace

struct Store::Control {
  std::atomic<std::uint64_t> choice{0};
  std::array<ReaderLine, kNumLines> lines;
};

std::uint32_t Store::Free::take() {
  if (!returned.empty()) {
    const std::uint32_t number = returned.back();
    returned.pop_back();
    return number;
  }
  if (next >= limit) throw std::runtime_error("serving: there is no room for more changed rows");
  return next++;
}

void Store::Free::keep(const std::vector<bool>& is_used) {
  returned.clear();
  std::uint32_t num_used = 0;
  for (std::uint32_t i = 0; i < next; ++i) {
    if (is_used[i]) {
      ++num_used;
    } else {
      returned.push_back(i);
    }
  }
  look_at = std::max(2 * num_used, kFewRows);
}

Store::Store(const std::string& path, bool verifies, int kept, UnknownIds unknown)
    : kept_(kept),
      // The newest, those that are kept, one in the making, one that a reader holds on to.
      num_versions_(kept > 0 ? kept + 3 : 1),
      unknown_(unknown),
      package_(path, verifies, kept > 0 ? num_versions_ : 0),
      plan_(package_.model()) {
  const ModelInfo& model = package_.model();
  std::size_t pages_bytes = 0;
  std::size_t spare_bytes = 0;
  const auto versions = static_cast<std::size_t>(num_versions_);
  for (std::size_t t = 0; t < model.tables.size(); ++t) {
    embedding::RowTable rows = package_.table(t);
    num_pages_.push_back(is_growing(t) ? entries_of(model.tables[t].num_rows)
                                       : pages_of(rows.num_rows));
    num_bits_.push_back(is_growing(t) ? static_cast<std::uint32_t>(std::countr_zero(num_pages_[t]))
                                      : 0);
    directory_at_.push_back(directory_size_);
    // How many pages there are, or ids; the pages; what unknown ids read.
    directory_size_ += 1 + num_pages_[t] + (is_growing(t) ? 1 : 0);
    pages_at_.push_back(pages_bytes);
    pages_bytes += versions * num_pages_[t] * page_bytes(is_growing(t));
    const SpareSpace spare = package_.spare(t);
    spare_at_.push_back(spare_bytes);
    spare_bytes += spare.num_bytes;
    const auto behind = static_cast<std::uint64_t>(spare.begin - rows.data);
    const auto width = static_cast<std::uint64_t>(rows.row_bytes);
    const std::uint64_t first = (behind + width - 1) / width;
    spare_offset_.push_back(first * width - behind);
    const std::uint64_t room = takes_updates() ? (spare.num_bytes - spare_offset_[t]) / width : 0;
    first_spare_.push_back(static_cast<std::uint32_t>(std::min<std::uint64_t>(first, kNoPage)));
    if (takes_updates() && first + static_cast<std::uint64_t>(rows.num_rows) >= kNoPage) {
      throw checkpoint::Error(checkpoint::ErrorKind::kInvalid,
                              path + ": table '" + model.tables[t].name + "' has " +
                                  std::to_string(rows.num_rows) +
                                  " rows, more than can be updated while it is served.");
    }
    const auto limit = static_cast<std::uint32_t>(std::min<std::uint64_t>(room, kNoPage - first));
    free_rows_.push_back({0, limit, kFewRows, {}});
    const auto most_pages =
        static_cast<std::uint32_t>(std::min<std::size_t>(versions * num_pages_[t], kNoPage));
    free_pages_.push_back({0, most_pages, is_growing(t) ? kFewRows : kNoPage, {}});
    if (takes_updates()) rows.num_rows = static_cast<std::int64_t>(first + limit);
    rows_.push_back(rows);
  }
  control_memory_ =
      SharedMemory("tessera-control", sizeof(Control) + versions * sizeof(VersionLine));
  control_ = new (control_memory_.data()) Control;
  choice_ = &control_->choice;
  versions_ = reinterpret_cast<VersionLine*>(control_memory_.data() + sizeof(Control));
  for (std::size_t v = 0; v < versions; ++v) new (versions_ + v) VersionLine;
  dense_memory_ = SharedMemory("tessera-dense", versions * plan_.num_floats * sizeof(float));
  if (takes_updates() || has_growing(model)) {
    directories_ = SharedMemory("tessera-directories", versions * directory_size_ * 4);
    pages_ = SharedMemory("tessera-pages", std::max<std::size_t>(pages_bytes, 1));
    for (std::size_t t = 0; t < model.tables.size(); ++t) {
      std::uint32_t* pages = directory(0, t);
      pages[0] = 0;
      std::fill_n(pages + 1, num_pages_[t], kNoPage);
    }
    fill_ids();
  }
  if (takes_updates()) {
    spare_ = SharedMemory("tessera-rows", std::max<std::size_t>(spare_bytes, 1));
    for (std::size_t t = 0; t < model.tables.size(); ++t) {
      const SpareSpace spare = package_.spare(t);
      spare_.show_at(spare.begin, spare_at_[t], spare.num_bytes);
    }
  }
  plan_.pack([this](const std::string& name) { return package_.dense(name); },
             reinterpret_cast<float*>(dense_memory_.data()));
  VersionLine& first = versions_[0];
  first.step = model.step;
  first.made = static_cast<std::int64_t>(std::time(nullptr));
  std::memcpy(first.source.data(), model.source.data(),
              std::min<std::size_t>(model.source.size(), 64));
  first.life.store(2);  // live, and pinned by being the current one
}

Store::~Store() = default;

ReaderLine& Store::claim_line() {
  const auto process = static_cast<std::int32_t>(::getpid());
  for (ReaderLine& line : control_->lines) {
    std::int32_t nobody = 0;
    if (line.owner.load(std::memory_order_relaxed) == 0 &&
        line.owner.compare_exchange_strong(nobody, process)) {
      line.version.store(-1);
      return line;
    }
  }
  throw std::runtime_error("serving: more than 1024 leases at a time");
}

void Store::return_line(ReaderLine& line) noexcept {
  if (line.owner.load() != ::getpid()) return;  // of the process that this one was forked from
  line.version.store(-1);
  line.owner.store(0);
}

void Store::release_process(std::int32_t process) noexcept {
  for (ReaderLine& line : control_->lines) {
    if (line.owner.load() != process) continue;
    line.version.store(-1);
    line.owner.store(0);
  }
}

int Store::hold(ReaderLine& line) const noexcept {
  while (true) {
    const int number = current();
    line.version.store(number);
    if (is_live(number))
      return number;  // or it was retired between the two, and is no more current
  }
}

std::optional<int> Store::hold(ReaderLine& line, std::int64_t step) const noexcept {
  int found = -1;
  for (const int number : live()) {
    if (versions_[number].step == step) found = number;
  }
  if (found < 0) return std::nullopt;
  line.version.store(found);
  if (is_live(found) && versions_[found].step == step) return found;
  line.version.store(-1);
  return std::nullopt;
}

void Store::drop(ReaderLine& line) noexcept { line.version.store(-1); }

const float* Store::dense(int number) const noexcept {
  return reinterpret_cast<const float*>(dense_memory_.data()) +
         static_cast<std::size_t>(number) * plan_.num_floats;
}

std::uint32_t* Store::directory(int number, std::size_t table) const noexcept {
  return reinterpret_cast<std::uint32_t*>(directories_.data()) +
         static_cast<std::size_t>(number) * directory_size_ + directory_at_[table];
}

std::uint32_t* Store::page(std::size_t table, std::uint32_t number) const noexcept {
  return reinterpret_cast<std::uint32_t*>(pages_.data() + pages_at_[table]) +
         static_cast<std::size_t>(number) * kPageRows;
}

IdPage& Store::id_page(std::size_t table, std::uint32_t number) const noexcept {
  return reinterpret_cast<IdPage*>(pages_.data() + pages_at_[table])[number];
}

template <typename Take>
void Store::each_slot(std::size_t table, std::uint32_t page_number, const Take& take) const {
  if (is_growing(table)) {
    for (const std::uint32_t slot : id_page(table, page_number).slots) {
      if (slot != kNoSlot) take(slot);
    }
    return;
  }
  const std::uint32_t* slots = page(table, page_number);
  for (std::int64_t i = 0; i < kPageRows; ++i) take(slots[i]);
}

// The ids of the package, as the first version knows them.
void Store::fill_ids() {
  for (std::size_t t = 0; t < num_pages_.size(); ++t) {
    if (!is_growing(t)) continue;
    const TableInfo& table = model().tables[t];
    std::uint32_t* own = directory(0, t);
    own[1 + num_pages_[t]] =
        static_cast<std::uint32_t>(table.num_rows + (unknown_ == UnknownIds::kZero ? 1 : 0));
    Draft draft(*this, Draft::OfPackage{});
    draft.clear_ids(t);
    const std::vector<std::int64_t> ids = package_.ids(t);
    for (std::size_t row = 0; row < ids.size(); ++row) {
      bool is_new = false;
      draft.slot_of_id(t, ids[row], is_new) = static_cast<std::uint32_t>(row);
      if (!is_new) {
        throw checkpoint::Error(checkpoint::ErrorKind::kCorrupt,
                                package_.path() + ": id " + std::to_string(ids[row]) +
                                    " has two rows in table '" + table.name + "'.");
      }
    }
  }
}

bool Store::has_slots(int number, std::size_t table) const noexcept {
  return is_growing(table) || (takes_updates() && directory(number, table)[0] != 0);
}

std::int64_t Store::num_ids(int number, std::size_t table) const noexcept {
  return directory(number, table)[0];
}

std::int64_t Store::find_slots(int number, std::size_t table, std::span<const std::int64_t> ids,
                               std::int64_t* slots) const noexcept {
  const std::uint32_t* pages = directory(number, table) + 1;
  if (!is_growing(table)) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::uint32_t own = pages[ids[i] / kPageRows];
      slots[i] = own == kNoPage ? ids[i] : page(table, own)[ids[i] % kPageRows];
    }
    return 0;
  }
  const std::uint32_t unknown = pages[num_pages_[table]];
  std::int64_t num_unknown = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint64_t hash = hash_of_id(ids[i]);
    const std::uint32_t slot = id_page(table, pages[entry_of(table, hash)]).find(hash, ids[i]);
    slots[i] = slot == kNoSlot ? unknown : slot;
    num_unknown += slot == kNoSlot ? 1 : 0;
  }
  return num_unknown;
}

std::vector<int> Store::live() const {
  // Their order as it is now: others may change it while it is sorted by.
  std::vector<std::pair<std::int64_t, int>> found;
  for (int v = 0; v < num_versions_; ++v) {
    if (is_live(v)) found.emplace_back(versions_[v].order.load(), v);
  }
  std::sort(found.begin(), found.end());
  std::vector<int> numbers;
  for (const auto& [order, number] : found) numbers.push_back(number);
  return numbers;
}

bool Store::pin(int number) noexcept {
  std::atomic<std::int32_t>& life = versions_[number].life;
  std::int32_t now = life.load();
  while (now != 0 && !life.compare_exchange_weak(now, now + 1)) {
  }
  return now != 0;
}

void Store::retire(int number) noexcept {
  std::int32_t live = 1;
  versions_[number].life.compare_exchange_strong(live, 0);
}

bool Store::make_current(std::int64_t step) {
  int found = -1;
  for (const int number : live()) {
    if (versions_[number].step == step) found = number;
  }
  if (found < 0 || !pin(found)) return false;
  if (versions_[found].step != step) {  // another one has taken its place since
    unpin(found);
    return false;
  }
  // As new as any: of those that are kept, the ones that were left behind go first.
  versions_[found].order = next_order();
  std::uint64_t before = choice_->load();
  while (!choice_->compare_exchange_weak(before, choice_after(before, found))) {
  }
  unpin(number_in(before));
  return true;
}

std::int64_t Store::next_order() const noexcept {
  std::int64_t order = 0;
  for (int v = 0; v < num_versions_; ++v) {
    order = std::max(order, versions_[v].order.load() + 1);
  }
  return order;
}

bool Store::is_held(int number) const noexcept {
  return std::any_of(control_->lines.begin(), control_->lines.end(),
                     [=](const ReaderLine& line) { return line.version.load() == number; });
}

void Store::retire_beyond_kept() {
  std::vector<int> numbers = live();
  std::erase(numbers, current());
  for (std::size_t i = 0; i + static_cast<std::size_t>(kept_) < numbers.size(); ++i) {
    retire(numbers[i]);
  }
}

void Store::collect(std::size_t table, int draft) {
  Free& rows = free_rows_[table];
  Free& pages = free_pages_[table];
  std::vector<bool> used_rows(rows.next);
  std::vector<bool> used_pages(pages.next);
  const auto mark = [&](std::uint32_t slot) {
    if (slot >= first_spare_[table]) used_rows[slot - first_spare_[table]] = true;
  };
  for (int v = 0; v < num_versions_; ++v) {
    if (v != draft && !is_live(v) && !is_held(v)) continue;
    const std::uint32_t* own = directory(v, table) + 1;
    for (std::size_t p = 0; p < num_pages_[table]; ++p) {
      if (own[p] == kNoPage || used_pages[own[p]]) continue;
      used_pages[own[p]] = true;
      each_slot(table, own[p], mark);
    }
    if (is_growing(table)) mark(own[num_pages_[table]]);
  }
  rows.keep(used_rows);
  pages.keep(used_pages);
}

void Store::take_over() {
  for (std::size_t t = 0; t < free_rows_.size(); ++t) {
    // What the other has given out is not known: look at everything.
    free_rows_[t].next = 0;
    free_pages_[t].next = 0;
    const auto mark = [&](std::uint32_t slot) {
      if (slot < first_spare_[t]) return;
      free_rows_[t].next = std::max(free_rows_[t].next, slot - first_spare_[t] + 1);
    };
    for (int v = 0; v < num_versions_; ++v) {
      if (!is_live(v) && !is_held(v)) continue;
      const std::uint32_t* own = directory(v, t) + 1;
      for (std::size_t p = 0; p < num_pages_[t]; ++p) {
        if (own[p] == kNoPage) continue;
        free_pages_[t].next = std::max(free_pages_[t].next, own[p] + 1);
        each_slot(t, own[p], mark);
      }
      if (is_growing(t)) mark(own[num_pages_[t]]);
    }
    collect(t, -1);
  }
}

void Store::give_up_writing() const noexcept {
  for (const SharedMemory* memory : {&dense_memory_, &directories_, &pages_, &spare_}) {
    memory->make_read_only();
  }
}

std::int64_t Store::updated_bytes() const noexcept {
  std::int64_t sum = 0;
  for (std::size_t t = 0; t < rows_.size(); ++t) {
    sum += rows_[t].row_bytes * (static_cast<std::int64_t>(free_rows_[t].next) -
                                 static_cast<std::int64_t>(free_rows_[t].returned.size()));
  }
  return sum;
}

std::uint8_t* Store::bytes_of_slot(std::size_t table, std::uint32_t slot) const noexcept {
  return reinterpret_cast<std::uint8_t*>(spare_.data()) + spare_at_[table] + spare_offset_[table] +
         static_cast<std::uint64_t>(slot - first_spare_[table]) *
             static_cast<std::uint64_t>(rows_[table].row_bytes);
}

}  // namespace tessera::serving
