#include "tessera/checkpoint/reader.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/json.h"
#include "checkpoint/merged_list.h"
#include "checkpoint/open_file.h"
#include "checkpoint/run_beside.h"
#include "checkpoint/stored_region.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

using json::corrupt;

constexpr int kMaxChain = 1000;
// Each means that a whole save has gone by meanwhile.
constexpr int kMaxAttempts = 1000;

}  // namespace

TensorSource::~TensorSource() = default;

namespace {

// What the manifest says of the tensors in a file, by name.
using Stored = std::map<std::string, std::pair<const TensorRecord*, const RegionRecord*>>;

std::vector<Stored> stored_in_files(const Manifest& manifest, const std::string& where) {
  std::vector<Stored> stored(manifest.files.size());
  for (const TensorRecord& tensor : manifest.tensors) {
    for (const RegionRecord& record : tensor.regions) {
      const auto place = static_cast<std::size_t>(record.file);
      if (!stored[place].emplace(tensor.name, std::pair(&tensor, &record)).second) {
        corrupt(where, "has tensor '" + tensor.name + "' twice in " + manifest.files[place].name);
      }
    }
  }
  return stored;
}

// Other programs read a file by its header alone: it must say what the manifest says.
void check_header(std::string_view bytes, std::uint64_t file_bytes, const Stored& stored,
                  const std::string& path) {
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(bytes[i]);
  if (length != bytes.size() - 8) corrupt(path, "its header is not as long as the manifest says");
  const FileHeader header = decode_header(bytes.substr(8), file_bytes, path);
  for (const FileEntry& entry : header.entries) {
    const auto found = stored.find(entry.name);
    if (found == stored.end()) {
      corrupt(path, "its header has a tensor '" + entry.name + "' that the manifest has not");
    }
    const auto& [tensor, record] = found->second;
    if (entry.dtype != tensor->dtype || entry.shape != record->region.lengths ||
        entry.offsets != record->region.offsets || bytes.size() + entry.begin != record->begin ||
        bytes.size() + entry.end != record->end) {
      corrupt(path, "its header has tensor '" + entry.name + "' otherwise than the manifest");
    }
  }
  if (header.entries.size() != stored.size()) {
    corrupt(path, "its header lacks a tensor that the manifest has");
  }
}

}  // namespace

// A list that this delta changes. What it is then is found out when somebody reads it.
struct ChangedList {
  const ListDelta* delta = nullptr;
  std::once_flag is_merged = {};
  std::optional<MergedList> merged = {};
};

struct Reader::State {
  std::shared_ptr<const OpenFolder> root;  // one for a whole chain
  std::string folder;
  Manifest manifest;
  std::vector<OpenFile> files;
  std::unique_ptr<Reader> base;
  std::vector<TensorInfo> tensors;  // by name; without the parts of deltas
  std::set<std::string> delta_parts;
  std::vector<std::unique_ptr<ChangedList>> lists;
  // Tensors of lists: the list, and the tensor with the changed rows.
  std::map<std::string, std::pair<ChangedList*, const TensorRecord*>> list_columns;

  void open(std::int64_t step, int depth, const std::string& expected_sha256);
  void read_all(const OpenFolder& opened, std::int64_t step, int depth,
                const std::string& expected_sha256);
  void check_file(const OpenFolder& opened, std::size_t place, const Stored& stored);
  void read_region(const TensorRecord& tensor, const Region& region, std::byte* data) const;
  void apply_delta(const DeltaRecord& delta, const Region& region, std::byte* data) const;
  void add_list(const ListDelta& delta);
  std::vector<std::int64_t> numbers_of(const std::string& name) const;
  const MergedList& merged(ChangedList& list) const;
  void read_merged(const std::string& name, const Region& region, std::byte* data) const;
  /// A region of any tensor that is there.
  void read_any(const std::string& name, const Region& region, std::byte* data) const;
};

void Reader::State::check_file(const OpenFolder& opened, std::size_t place, const Stored& stored) {
  const FileRecord& record = manifest.files[place];
  OpenFile file(opened, record.name);
  if (file.num_bytes() != record.num_bytes) {
    corrupt(file.path(), "has " + std::to_string(file.num_bytes()) + " bytes, the manifest says " +
                             std::to_string(record.num_bytes));
  }
  const std::uint64_t count = record.header_bytes > 0 ? record.header_bytes : record.num_bytes;
  if (count > kMaxManifestBytes) corrupt(file.path(), "is too large to be read at once");
  std::string bytes(count, '\0');
  file.read(0, bytes.data(), bytes.size());
  const std::uint32_t expected = record.header_bytes > 0 ? record.header_crc : record.crc;
  if (crc32c(bytes.data(), bytes.size()) != expected) {
    corrupt(file.path(), record.header_bytes > 0 ? "its header was changed" : "was changed");
  }
  if (record.header_bytes > 0) check_header(bytes, file.num_bytes(), stored, file.path());
  files.push_back(std::move(file));
}

// A save of the same step may put another folder in the place of this one while it is read, and
// remove the files of this one: whoever has not opened them all by then begins again.
void Reader::State::open(std::int64_t step, int depth, const std::string& expected_sha256) {
  const std::string name = folder_name(step);
  for (int attempt = 1;; ++attempt) {
    const OpenFolder opened(*root, name);
    try {
      read_all(opened, step, depth, expected_sha256);
      return;
    } catch (const Error&) {
      if (attempt == kMaxAttempts || !opened.is_replaced(*root, name)) throw;
    }
    State again;
    again.root = std::move(root);
    *this = std::move(again);
  }
}

void Reader::State::read_all(const OpenFolder& opened, std::int64_t step, int depth,
                             const std::string& expected_sha256) {
  folder = opened.path();
  manifest = read_manifest(opened);
  if (manifest.step != step) {
    corrupt(folder, "holds step " + std::to_string(manifest.step) + ": it was renamed");
  }
  if (!expected_sha256.empty() && manifest.sha256 != expected_sha256) {
    corrupt(folder, "is not the base it was when the delta was saved");
  }
  const std::vector<Stored> stored = stored_in_files(manifest, folder);
  for (std::size_t i = 0; i < manifest.files.size(); ++i) check_file(opened, i, stored[i]);
  if (manifest.base) {
    if (depth >= kMaxChain) corrupt(folder, "stands on more than 1000 bases");
    const std::int64_t base_step = step_of(manifest.base->folder);
    if (base_step < 0 || base_step >= step) corrupt(folder, "names a base that is not older");
    try {
      base = std::unique_ptr<Reader>(new Reader());
      base->state_->root = root;
      base->state_->open(base_step, depth + 1, manifest.base->sha256);
    } catch (const Error& error) {
      throw Error(error.kind(), folder + " needs its base: " + error.what());
    }
  }
  for (const DeltaRecord& delta : manifest.deltas) {
    const TensorInfo* whole = base->find(delta.name);
    if (whole == nullptr || whole->dtype != delta.dtype || whole->shape != delta.shape) {
      corrupt(folder, "delta '" + delta.name + "' does not fit its base");
    }
    for (const DeltaPiece& piece : delta.pieces) {
      delta_parts.insert(piece.rows);
      delta_parts.insert(piece.values);
    }
    tensors.push_back({delta.name, delta.dtype, delta.shape});
  }
  for (const ListDelta& list : manifest.lists) add_list(list);
  for (const TensorRecord& tensor : manifest.tensors) {
    if (!delta_parts.contains(tensor.name)) {
      tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
    }
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
}

void Reader::State::read_region(const TensorRecord& tensor, const Region& region,
                                std::byte* data) const {
  for (const RegionRecord& record : tensor.regions) {
    Chunks chunks(files[record.file], record, tensor.name);
    copy_common(record, region, bytes_of(tensor.dtype), chunks, data);
  }
}

void Reader::State::apply_delta(const DeltaRecord& delta, const Region& region,
                                std::byte* data) const {
  const std::uint64_t size = bytes_of(delta.dtype);
  const std::int64_t first_row = region.offsets[0];
  const std::int64_t end_row = first_row + region.lengths[0];
  const std::int64_t first_column = region.offsets.size() == 2 ? region.offsets[1] : 0;
  const std::int64_t num_columns = region.offsets.size() == 2 ? region.lengths[1] : 1;
  for (const DeltaPiece& piece : delta.pieces) {
    const TensorRecord& rows = *manifest.find(piece.rows);
    const std::int64_t begin = std::max(first_column, piece.column_begin);
    const std::int64_t end = std::min(first_column + num_columns, piece.column_end);
    if (begin >= end || rows.shape[0] == 0) continue;
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(rows.shape[0]));
    read_region(rows, {{0}, rows.shape}, reinterpret_cast<std::byte*>(numbers.data()));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i] < 0 || numbers[i] >= delta.shape[0] ||
          (i > 0 && numbers[i] <= numbers[i - 1])) {
        corrupt(folder, "delta '" + delta.name + "' has rows that do not ascend or do not exist");
      }
    }
    const auto first = std::lower_bound(numbers.begin(), numbers.end(), first_row);
    const auto last = std::lower_bound(first, numbers.end(), end_row);
    const TensorRecord& values = *manifest.find(piece.values);
    const auto row_bytes = static_cast<std::uint64_t>(end - begin) * size;
    // A few megabytes at a time: a delta may hold most of a table.
    const auto step =
        static_cast<std::int64_t>(std::max<std::uint64_t>(1, kChunkBytes / row_bytes));
    std::vector<std::byte> buffer;
    for (auto block = first; block < last;) {
      const std::int64_t count = std::min<std::int64_t>(step, last - block);
      buffer.resize(static_cast<std::size_t>(count) * row_bytes);
      read_region(values,
                  {{block - numbers.begin(), begin - piece.column_begin}, {count, end - begin}},
                  buffer.data());
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = block[i] - first_row;
        std::memcpy(
            data + static_cast<std::uint64_t>(row * num_columns + begin - first_column) * size,
            buffer.data() + static_cast<std::uint64_t>(i) * row_bytes, row_bytes);
      }
      block += count;
    }
  }
}

void Reader::State::add_list(const ListDelta& delta) {
  lists.push_back(std::make_unique<ChangedList>(&delta));
  const auto add = [&](const std::string& name, const std::string& values) {
    const TensorRecord& changed = *manifest.find(values);
    std::vector<std::int64_t> shape = changed.shape;
    shape[0] = delta.rows;
    const TensorInfo* whole = base->find(name);
    if (whole == nullptr || whole->dtype != changed.dtype ||
        !std::equal(shape.begin() + 1, shape.end(), whole->shape.begin() + 1, whole->shape.end())) {
      corrupt(folder, "the changed rows of '" + name + "' do not fit its base");
    }
    list_columns.emplace(name, std::pair(lists.back().get(), &changed));
    delta_parts.insert(values);
    tensors.push_back({name, changed.dtype, std::move(shape)});
  };
  add(delta.name, delta.changed);
  for (const ListDelta::Column& column : delta.columns) add(column.name, column.values);
  delta_parts.insert(delta.runs);
  delta_parts.insert(delta.removed);
  const TensorInfo* groups = base->find(delta.groups);
  if (groups == nullptr || groups->shape != manifest.find(delta.groups)->shape ||
      groups->dtype != Dtype::kI64) {
    corrupt(folder, "list '" + delta.name + "' has other groups than its base");
  }
}

std::vector<std::int64_t> Reader::State::numbers_of(const std::string& name) const {
  const TensorRecord* stored = manifest.find(name);
  const auto listed = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorInfo& info, const std::string& key) { return info.name < key; });
  const std::int64_t count = stored != nullptr ? stored->shape[0] : listed->shape[0];
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(count));
  read_any(name, {{0}, {count}}, reinterpret_cast<std::byte*>(numbers.data()));
  return numbers;
}

const MergedList& Reader::State::merged(ChangedList& list) const {
  std::call_once(list.is_merged, [&] {
    const ListDelta& delta = *list.delta;
    const std::string where = folder + ", list '" + delta.name + "'";
    ListNumbers numbers;
    numbers.base = base->state_->numbers_of(delta.name);
    numbers.base_groups = base->state_->numbers_of(delta.groups);
    numbers.groups = numbers_of(delta.groups);
    numbers.changed = numbers_of(delta.changed);
    numbers.runs = numbers_of(delta.runs);
    numbers.removed = numbers_of(delta.removed);
    MergedList found(numbers, where);
    if (found.num_rows() != delta.rows) {
      corrupt(where, "has " + std::to_string(found.num_rows()) + " rows, the manifest says " +
                         std::to_string(delta.rows));
    }
    list.merged.emplace(std::move(found));
  });
  return *list.merged;
}

// The rows of the base between the first and the last of them, and those of the delta, are read at
// once, and then dealt.
void Reader::State::read_merged(const std::string& name, const Region& region,
                                std::byte* data) const {
  const auto& [list, changed] = list_columns.at(name);
  if (region.lengths[0] == 0) return;
  const auto stretches =
      merged(*list).stretches(region.offsets[0], region.offsets[0] + region.lengths[0]);
  std::uint64_t row_bytes = bytes_of(changed->dtype);
  for (std::size_t i = 1; i < region.lengths.size(); ++i) {
    row_bytes *= static_cast<std::uint64_t>(region.lengths[i]);
  }
  for (const bool is_changed : {false, true}) {
    std::int64_t begin = std::numeric_limits<std::int64_t>::max();
    std::int64_t end = 0;
    for (const MergedList::Stretch& stretch : stretches) {
      if (stretch.is_changed != is_changed) continue;
      begin = std::min(begin, stretch.source);
      end = std::max(end, stretch.source + stretch.count);
    }
    if (begin >= end) continue;
    Region source = region;
    source.offsets[0] = begin;
    source.lengths[0] = end - begin;
    std::vector<std::byte> buffer(static_cast<std::uint64_t>(end - begin) * row_bytes);
    if (is_changed) {
      read_region(*changed, source, buffer.data());
    } else {
      base->state_->read_any(name, source, buffer.data());
    }
    for (const MergedList::Stretch& stretch : stretches) {
      if (stretch.is_changed != is_changed) continue;
      std::memcpy(data + static_cast<std::uint64_t>(stretch.first - region.offsets[0]) * row_bytes,
                  buffer.data() + static_cast<std::uint64_t>(stretch.source - begin) * row_bytes,
                  static_cast<std::uint64_t>(stretch.count) * row_bytes);
    }
  }
}

void Reader::State::read_any(const std::string& name, const Region& region, std::byte* data) const {
  if (list_columns.contains(name)) return read_merged(name, region, data);
  const DeltaRecord* delta = manifest.find_delta(name);
  if (delta == nullptr) return read_region(*manifest.find(name), region, data);
  base->state_->read_any(name, region, data);
  apply_delta(*delta, region, data);
}

Reader::Reader() : state_(std::make_unique<State>()) {}

Reader::Reader(const std::string& root, std::int64_t step, Disk& disk)
    : state_(std::make_unique<State>()) {
  state_->root = std::make_shared<const OpenFolder>(root, /*follows=*/true, disk);
  state_->open(step, 0, "");
}

Reader::~Reader() = default;

const Manifest& Reader::manifest() const noexcept { return state_->manifest; }
const std::string& Reader::folder() const noexcept { return state_->folder; }

std::vector<const Manifest*> Reader::chain() const {
  std::vector<const Manifest*> manifests;
  for (const Reader* reader = this; reader != nullptr; reader = reader->state_->base.get()) {
    manifests.push_back(&reader->state_->manifest);
  }
  return manifests;
}

std::vector<TensorInfo> Reader::tensors() const { return state_->tensors; }

const TensorInfo* Reader::find(const std::string& name) const {
  const auto& tensors = state_->tensors;
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorInfo& info, const std::string& key) { return info.name < key; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

void Reader::read(const std::string& name, const Region& region, std::byte* data) const {
  const TensorInfo* info = find(name);
  if (info == nullptr) {
    throw Error(ErrorKind::kMissing, state_->folder + ": there is no tensor '" + name + "'.");
  }
  check_region(*info, region);
  if (!state_->list_columns.contains(name)) return state_->read_any(name, region, data);
  // Every link of a chain keeps the rows of its base at once: a few megabytes of them.
  std::uint64_t row_bytes = bytes_of(info->dtype);
  for (std::size_t i = 1; i < region.lengths.size(); ++i) {
    row_bytes *= static_cast<std::uint64_t>(region.lengths[i]);
  }
  const auto most = static_cast<std::int64_t>(
      std::max<std::uint64_t>(1, kChunkBytes / std::max<std::uint64_t>(1, row_bytes)));
  Region block = region;
  for (std::int64_t done = 0; done < region.lengths[0]; done += most) {
    block.offsets[0] = region.offsets[0] + done;
    block.lengths[0] = std::min(most, region.lengths[0] - done);
    state_->read_any(name, block, data + static_cast<std::uint64_t>(done) * row_bytes);
  }
}

namespace {

// A stretch of chunks of one region, for one thread.
struct Stretch {
  const OpenFile* file;
  const RegionRecord* record;
  const std::string* tensor;
  std::uint64_t first_chunk;
  std::uint64_t num_chunks;
};

constexpr std::uint64_t kStretchChunks = 16;
constexpr std::size_t kVerifyThreads = 2;
constexpr std::size_t kVerifyBytes = std::size_t{256} << 10;

// Checks all stretches with two threads, in order of the files as far as that goes.
void check_stretches(const std::vector<Stretch>& stretches,
                     const std::function<void(std::uint64_t)>& progress) {
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  std::uint64_t done = 0;
  const auto work = [&] {
    std::vector<std::byte> buffer;
    for (std::size_t i = next++; i < stretches.size(); i = next++) {
      const Stretch& stretch = stretches[i];
      try {
        buffer.resize(kVerifyBytes);
        Chunks chunks(*stretch.file, *stretch.record, *stretch.tensor);
        for (std::uint64_t c = 0; c < stretch.num_chunks; ++c) {
          const std::uint64_t count = chunks.check(stretch.first_chunk + c, buffer);
          const std::lock_guard lock(mutex);
          done += count;
          if (progress) progress(done);
        }
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next = stretches.size();
      }
    }
  };
  run_beside(stretches.size() > 1 ? kVerifyThreads : 1, work);
  if (error) std::rethrow_exception(error);
}

}  // namespace

void Reader::verify(const std::function<void(std::uint64_t)>& progress) const {
  std::vector<Stretch> stretches;
  for (const Reader* reader = this; reader != nullptr; reader = reader->state_->base.get()) {
    const State& state = *reader->state_;
    for (const TensorRecord& tensor : state.manifest.tensors) {
      for (const RegionRecord& record : tensor.regions) {
        const std::uint64_t num_chunks =
            (record.end - record.begin + kChunkBytes - 1) / kChunkBytes;
        for (std::uint64_t first = 0; first < num_chunks; first += kStretchChunks) {
          stretches.push_back({&state.files[record.file], &record, &tensor.name, first,
                               std::min(kStretchChunks, num_chunks - first)});
        }
      }
    }
  }
  check_stretches(stretches, progress);
  for (const Reader* reader = this; reader != nullptr; reader = reader->state_->base.get()) {
    const State& state = *reader->state_;
    // The sum of a whole file follows from those of its parts; a manifest that says otherwise lies.
    for (std::size_t i = 0; i < state.manifest.files.size(); ++i) {
      const FileRecord& file = state.manifest.files[i];
      if (file.header_bytes == 0) continue;
      std::vector<const RegionRecord*> parts;
      for (const TensorRecord& tensor : state.manifest.tensors) {
        for (const RegionRecord& record : tensor.regions) {
          if (static_cast<std::size_t>(record.file) == i) parts.push_back(&record);
        }
      }
      std::sort(parts.begin(), parts.end(), [](const RegionRecord* a, const RegionRecord* b) {
        return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
      });
      std::uint32_t sum = file.header_crc;
      for (const RegionRecord* part : parts) {
        sum = crc32c_joined(sum, part->crc, part->end - part->begin);
      }
      if (sum != file.crc) corrupt(state.files[i].path(), "its sum is not that of its parts");
    }
  }
}

namespace {

// Whether there is no folder of that step any more: `keep` has removed it, so there are newer ones.
bool is_gone(const std::string& root, std::int64_t step, Disk& disk) {
  struct stat facts{};
  return disk.look_at(AT_FDCWD, root + "/" + folder_name(step), facts) != 0 && errno == ENOENT;
}

}  // namespace

Found find_newest(const std::string& root, std::int64_t max_step,
                  const std::set<std::string>& left_out, Disk& disk) {
  Found found;
  for (int attempt = 1;; ++attempt) {
    bool is_stale = false;
    for (const std::int64_t step : list_commits(root, disk)) {
      if (step > max_step) continue;
      try {
        auto reader = std::make_unique<Reader>(root, step, disk);
        if (left_out.contains(reader->manifest().sha256)) continue;
        found.reader = std::move(reader);
        return found;
      } catch (const Error& error) {
        is_stale = is_gone(root, step, disk);
        if (is_stale) break;
        if (error.kind() == ErrorKind::kRead) throw;
        found.warnings.emplace_back(error.what());
      }
    }
    if (!is_stale || attempt == kMaxAttempts) return found;
    found.warnings.clear();
  }
}

}  // namespace tessera::checkpoint
