#include "serving/store.h"

#include <unistd.h>

#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>

#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

constexpr std::size_t kNumLines = 1024;
// Fewer rows than this are never worth a look for those that were let go.
constexpr std::uint32_t kFewRows = 1 << 14;

std::size_t pages_of(std::int64_t num_rows) {
  return static_cast<std::size_t>((num_rows + kPageRows - 1) / kPageRows);
}

}  // namespace

struct Store::Control {
  std::atomic<std::int32_t> current{0};
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

Store::Store(const std::string& path, bool verifies, int kept)
    : kept_(kept),
      // The newest, those that are kept, one in the making, one that a reader holds on to.
      num_versions_(kept > 0 ? kept + 3 : 1),
      package_(path, verifies, kept > 0 ? num_versions_ : 0),
      plan_(package_.model()) {
  const ModelInfo& model = package_.model();
  std::size_t pages_bytes = 0;
  std::size_t spare_bytes = 0;
  const auto versions = static_cast<std::size_t>(num_versions_);
  for (std::size_t t = 0; t < model.tables.size(); ++t) {
    embedding::RowTable rows = package_.table(t);
    num_pages_.push_back(pages_of(rows.num_rows));
    directory_at_.push_back(directory_size_);
    directory_size_ += 1 + num_pages_[t];  // how many pages there are, first
    pages_at_.push_back(pages_bytes);
    pages_bytes += versions * num_pages_[t] * kPageRows * sizeof(std::uint32_t);
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
    free_pages_.push_back({0, static_cast<std::uint32_t>(versions * num_pages_[t]), kNoPage, {}});
    if (takes_updates()) rows.num_rows = static_cast<std::int64_t>(first + limit);
    rows_.push_back(rows);
  }
  control_memory_ =
      SharedMemory("tessera-control", sizeof(Control) + versions * sizeof(VersionLine));
  control_ = new (control_memory_.data()) Control;
  current_ = &control_->current;
  versions_ = reinterpret_cast<VersionLine*>(control_memory_.data() + sizeof(Control));
  for (std::size_t v = 0; v < versions; ++v) new (versions_ + v) VersionLine;
  dense_memory_ = SharedMemory("tessera-dense", versions * plan_.num_floats * sizeof(float));
  if (takes_updates()) {
    directories_ = SharedMemory("tessera-directories", versions * directory_size_ * 4);
    pages_ = SharedMemory("tessera-pages", std::max<std::size_t>(pages_bytes, 1));
    spare_ = SharedMemory("tessera-rows", std::max<std::size_t>(spare_bytes, 1));
    for (std::size_t t = 0; t < model.tables.size(); ++t) {
      const SpareSpace spare = package_.spare(t);
      spare_.show_at(spare.begin, spare_at_[t], spare.num_bytes);
      std::uint32_t* pages = directory(0, t);
      pages[0] = 0;
      std::fill_n(pages + 1, num_pages_[t], kNoPage);
    }
  }
  plan_.pack([this](const std::string& name) { return package_.dense(name); },
             reinterpret_cast<float*>(dense_memory_.data()));
  VersionLine& first = versions_[0];
  first.step = model.step;
  first.made = static_cast<std::int64_t>(std::time(nullptr));
  std::memcpy(first.source.data(), model.source.data(),
              std::min<std::size_t>(model.source.size(), 64));
  first.is_live.store(1);
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
    const int number = current_->load();
    line.version.store(number);
    if (versions_[number].is_live.load() != 0) return number;
  }
}

std::optional<int> Store::hold(ReaderLine& line, std::int64_t step) const noexcept {
  int found = -1;
  for (const int number : live()) {
    if (versions_[number].step == step) found = number;
  }
  if (found < 0) return std::nullopt;
  line.version.store(found);
  if (versions_[found].is_live.load() != 0 && versions_[found].step == step) return found;
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

bool Store::has_slots(int number, std::size_t table) const noexcept {
  return takes_updates() && directory(number, table)[0] != 0;
}

void Store::find_slots(int number, std::size_t table, std::span<const std::int64_t> ids,
                       std::int64_t* slots) const noexcept {
  const std::uint32_t* pages = directory(number, table) + 1;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint32_t own = pages[ids[i] / kPageRows];
    slots[i] = own == kNoPage ? ids[i] : page(table, own)[ids[i] % kPageRows];
  }
}

std::vector<int> Store::live() const {
  std::vector<int> numbers;
  for (int v = 0; v < num_versions_; ++v) {
    if (versions_[v].is_live.load() != 0) numbers.push_back(v);
  }
  std::sort(numbers.begin(), numbers.end(),
            [this](int a, int b) { return versions_[a].order.load() < versions_[b].order.load(); });
  return numbers;
}

bool Store::make_current(std::int64_t step) noexcept {
  int found = -1;
  for (const int number : live()) {
    if (versions_[number].step == step) found = number;
  }
  if (found < 0) return false;
  // As new as any: of those that are kept, the ones that were left behind go first.
  versions_[found].order = next_order();
  current_->store(found);
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
    versions_[numbers[i]].is_live.store(0);
  }
}

void Store::collect(std::size_t table, int draft) {
  Free& rows = free_rows_[table];
  Free& pages = free_pages_[table];
  std::vector<bool> used_rows(rows.next);
  std::vector<bool> used_pages(pages.next);
  for (int v = 0; v < num_versions_; ++v) {
    if (v != draft && versions_[v].is_live.load() == 0 && !is_held(v)) continue;
    const std::uint32_t* own = directory(v, table) + 1;
    for (std::size_t p = 0; p < num_pages_[table]; ++p) {
      if (own[p] == kNoPage || used_pages[own[p]]) continue;
      used_pages[own[p]] = true;
      const std::uint32_t* slots = page(table, own[p]);
      for (std::int64_t i = 0; i < kPageRows; ++i) {
        if (slots[i] >= first_spare_[table]) used_rows[slots[i] - first_spare_[table]] = true;
      }
    }
  }
  rows.keep(used_rows);
  pages.keep(used_pages);
}

void Store::take_over() {
  for (std::size_t t = 0; t < free_rows_.size(); ++t) {
    // What the other has given out is not known: look at everything.
    free_rows_[t].next = 0;
    free_pages_[t].next = 0;
    for (int v = 0; v < num_versions_; ++v) {
      if (versions_[v].is_live.load() == 0 && !is_held(v)) continue;
      const std::uint32_t* own = directory(v, t) + 1;
      for (std::size_t p = 0; p < num_pages_[t]; ++p) {
        if (own[p] == kNoPage) continue;
        free_pages_[t].next = std::max(free_pages_[t].next, own[p] + 1);
        const std::uint32_t* slots = page(t, own[p]);
        for (std::int64_t i = 0; i < kPageRows; ++i) {
          if (slots[i] < first_spare_[t]) continue;
          free_rows_[t].next = std::max(free_rows_[t].next, slots[i] - first_spare_[t] + 1);
        }
      }
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

Store::Draft::Draft(Store& store) : store_(store), parent_(store.current()), number_(-1) {
  for (int v = 0; v < store.num_versions_ && number_ < 0; ++v) {
    if (v != parent_ && store.versions_[v].is_live.load() == 0 && !store.is_held(v)) {
      number_ = v;
    }
  }
  if (number_ < 0) throw std::runtime_error("serving: requests still read every version there is");
  std::memcpy(store.directory(number_, 0), store.directory(parent_, 0),
              store.directory_size_ * sizeof(std::uint32_t));
}

Store::Draft::~Draft() {
  if (!is_committed_) store_.versions_[number_].is_live.store(0);
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
  if (slot == was) {
    if (store_.free_rows_[table].wants_look()) store_.collect(table, number_);
    slot = store_.first_spare_[table] + store_.free_rows_[table].take();
    ++num_rows_;
  }
  return reinterpret_cast<std::uint8_t*>(store_.spare_.data()) + store_.spare_at_[table] +
         store_.spare_offset_[table] +
         static_cast<std::uint64_t>(slot - store_.first_spare_[table]) *
             static_cast<std::uint64_t>(store_.rows_[table].row_bytes);
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
  line.is_live.store(1);
}

void Store::Draft::commit() {
  // Somebody may have gone back meanwhile: what he wants counts.
  std::int32_t before = parent_;
  if (!store_.current_->compare_exchange_strong(before, number_)) {
    throw std::runtime_error("serving: another version was chosen while this one was made");
  }
  is_committed_ = true;
  store_.retire_beyond_kept();
}

}  // namespace tessera::serving
