#include "tessera/checkpoint/reader.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "checkpoint/json.h"
#include "checkpoint/open_file.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

using json::corrupt;

constexpr int kMaxChain = 1000;
// What a disk of some gigabytes per second delivers while one chunk is summed and copied, and more.
constexpr std::uint64_t kAheadBytes = 6 * kChunkBytes;

std::uint64_t product(const std::vector<std::int64_t>& sizes, std::size_t first = 0) {
  std::uint64_t count = 1;
  for (std::size_t i = first; i < sizes.size(); ++i) count *= static_cast<std::uint64_t>(sizes[i]);
  return count;
}

void check_region(const TensorInfo& tensor, const Region& region) {
  bool is_inside =
      region.offsets.size() == tensor.shape.size() && region.lengths.size() == tensor.shape.size();
  for (std::size_t i = 0; is_inside && i < tensor.shape.size(); ++i) {
    is_inside = region.offsets[i] >= 0 && region.lengths[i] >= 0 &&
                region.lengths[i] <= tensor.shape[i] &&
                region.offsets[i] <= tensor.shape[i] - region.lengths[i];
  }
  if (is_inside) return;
  throw Error(ErrorKind::kInvalid, "checkpoint: region " + text_of(region.offsets) + " of " +
                                       text_of(region.lengths) + " leaves tensor '" + tensor.name +
                                       "' of shape " + text_of(tensor.shape) + ".");
}

// Hands the bytes of a stored region to a reader, a chunk at a time, each checked once before use.
class Chunks {
 public:
  Chunks(const OpenFile& file, const RegionRecord& record, const std::string& tensor)
      : file_(file), record_(record), tensor_(tensor), num_bytes_(record.end - record.begin) {}

  /// Copies bytes [begin, begin + count) of the region; calls come with ascending `begin`.
  void copy(std::uint64_t begin, std::uint64_t count, std::byte* target) {
    while (count > 0) {
      const std::uint64_t chunk = begin / kChunkBytes;
      const std::uint64_t first = chunk * kChunkBytes;
      const std::uint64_t last = std::min(first + kChunkBytes, num_bytes_);
      const std::uint64_t here = std::min(last - begin, count);
      if (here == last - first) {
        load(chunk, first, last, target);
      } else {
        if (held_ != chunk) {
          buffer_.resize(last - first);
          load(chunk, first, last, buffer_.data());
          held_ = chunk;
        }
        std::memcpy(target, buffer_.data() + (begin - first), here);
      }
      begin += here;
      count -= here;
      target += here;
    }
  }

  /// Compares one chunk with its sum and keeps nothing: the bytes pass through `buffer`, which
  /// stays in the cache. Returns how many there were.
  std::uint64_t check(std::uint64_t chunk, std::vector<std::byte>& buffer) {
    const std::uint64_t first = chunk * kChunkBytes;
    const std::uint64_t last = std::min(first + kChunkBytes, num_bytes_);
    expect(record_.begin + first);
    std::uint32_t sum = 0;
    for (std::uint64_t begin = first; begin < last; begin += buffer.size()) {
      const std::uint64_t count = std::min<std::uint64_t>(buffer.size(), last - begin);
      file_.read(record_.begin + begin, buffer.data(), count);
      sum = crc32c(buffer.data(), count, sum);
    }
    compare(chunk, first, last, sum);
    return last - first;
  }

 private:
  void load(std::uint64_t chunk, std::uint64_t first, std::uint64_t last, std::byte* target) {
    expect(record_.begin + first);
    file_.read(record_.begin + first, target, last - first);
    if (record_.chunk_crcs.empty()) return;  // of a stranger; nothing to compare with
    compare(chunk, first, last, crc32c(target, last - first));
  }

  // The chunks that follow, also of the next tensor, come from the disk while this one is summed.
  void expect(std::uint64_t place) {
    const std::uint64_t ahead = expected_ == 0 ? place : expected_;
    if (ahead >= place + kAheadBytes) return;
    file_.expect(ahead, place + kAheadBytes - ahead);
    expected_ = place + kAheadBytes;
  }

  void compare(std::uint64_t chunk, std::uint64_t first, std::uint64_t last, std::uint32_t sum) {
    if (sum == record_.chunk_crcs[chunk]) return;
    corrupt(file_.path(), "tensor '" + tensor_ + "' was changed between bytes " +
                              std::to_string(record_.begin + first) + " and " +
                              std::to_string(record_.begin + last));
  }

  const OpenFile& file_;
  const RegionRecord& record_;
  const std::string& tensor_;
  std::uint64_t num_bytes_;
  std::uint64_t held_ = UINT64_MAX;
  std::uint64_t expected_ = 0;  // end of what the kernel was told to fetch
  std::vector<std::byte> buffer_;
};

// Copies what a stored region and a wanted one have in common.
void copy_common(const RegionRecord& record, const Region& wanted, std::uint64_t element_bytes,
                 Chunks& chunks, std::byte* data) {
  const Region& stored = record.region;
  const std::size_t rank = stored.offsets.size();
  Region common{std::vector<std::int64_t>(rank), std::vector<std::int64_t>(rank)};
  for (std::size_t i = 0; i < rank; ++i) {
    common.offsets[i] = std::max(stored.offsets[i], wanted.offsets[i]);
    const std::int64_t end =
        std::min(stored.offsets[i] + stored.lengths[i], wanted.offsets[i] + wanted.lengths[i]);
    common.lengths[i] = end - common.offsets[i];
    if (common.lengths[i] <= 0) return;
  }
  // Dimensions from `inner` on are whole on both sides, so a step of dimension inner - 1 is one
  // run.
  std::size_t inner = rank;
  while (inner > 0 && common.lengths[inner - 1] == stored.lengths[inner - 1] &&
         common.lengths[inner - 1] == wanted.lengths[inner - 1]) {
    --inner;
  }
  const std::size_t outer = inner > 0 ? inner - 1 : 0;
  std::uint64_t run_bytes = element_bytes * product(common.lengths, inner);
  if (inner > 0) run_bytes *= static_cast<std::uint64_t>(common.lengths[inner - 1]);

  std::vector<std::int64_t> index(outer, 0);
  for (;;) {
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    for (std::size_t i = 0; i < rank; ++i) {
      const std::int64_t place = common.offsets[i] + (i < outer ? index[i] : 0);
      from = from * static_cast<std::uint64_t>(stored.lengths[i]) +
             static_cast<std::uint64_t>(place - stored.offsets[i]);
      to = to * static_cast<std::uint64_t>(wanted.lengths[i]) +
           static_cast<std::uint64_t>(place - wanted.offsets[i]);
    }
    chunks.copy(from * element_bytes, run_bytes, data + to * element_bytes);
    std::size_t i = outer;
    while (i > 0 && ++index[i - 1] == common.lengths[i - 1]) index[--i] = 0;
    if (i == 0) return;
  }
}

}  // namespace

TensorSource::~TensorSource() = default;

struct Reader::State {
  std::string root;
  std::string folder;
  Manifest manifest;
  std::vector<OpenFile> files;
  std::unique_ptr<Reader> base;
  std::vector<TensorInfo> tensors;  // by name; without the parts of deltas
  std::set<std::string> delta_parts;

  void open(std::int64_t step, int depth, const std::string& expected_sha256);
  void check_file(std::size_t place);
  void read_region(const TensorRecord& tensor, const Region& region, std::byte* data) const;
  void apply_delta(const DeltaRecord& delta, const Region& region, std::byte* data) const;
};

void Reader::State::check_file(std::size_t place) {
  const FileRecord& record = manifest.files[place];
  OpenFile file(folder, record.name);
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
  files.push_back(std::move(file));
}

void Reader::State::open(std::int64_t step, int depth, const std::string& expected_sha256) {
  folder = root + "/" + folder_name(step);
  manifest = read_manifest(folder);
  if (manifest.step != step) {
    corrupt(folder, "holds step " + std::to_string(manifest.step) + ": it was renamed");
  }
  if (!expected_sha256.empty() && manifest.sha256 != expected_sha256) {
    corrupt(folder, "is not the base it was when the delta was saved");
  }
  for (std::size_t i = 0; i < manifest.files.size(); ++i) check_file(i);
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

Reader::Reader() : state_(std::make_unique<State>()) {}

Reader::Reader(const std::string& root, std::int64_t step) : state_(std::make_unique<State>()) {
  state_->root = root;
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
  const DeltaRecord* delta = state_->manifest.find_delta(name);
  if (delta == nullptr) {
    state_->read_region(*state_->manifest.find(name), region, data);
    return;
  }
  state_->base->read(name, region, data);
  state_->apply_delta(*delta, region, data);
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
    std::vector<std::byte> buffer(kVerifyBytes);
    for (std::size_t i = next++; i < stretches.size(); i = next++) {
      const Stretch& stretch = stretches[i];
      try {
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
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < std::min(kVerifyThreads, stretches.size()); ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) thread.join();
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

struct PlainReader::State {
  std::vector<OpenFile> files;
  std::map<std::string, TensorRecord> tensors;
};

PlainReader::PlainReader(const std::string& path) : state_(std::make_unique<State>()) {
  std::string folder = path;
  std::vector<std::string> names;
  struct stat facts{};
  if (::stat(path.c_str(), &facts) != 0) {
    throw Error(ErrorKind::kMissing, path + ": there is no such file or folder.");
  }
  if (S_ISDIR(facts.st_mode)) {
    DIR* listing = ::opendir(path.c_str());
    while (const dirent* entry = listing == nullptr ? nullptr : ::readdir(listing)) {
      const std::string name = static_cast<const char*>(entry->d_name);
      if (name.ends_with(".safetensors")) names.push_back(name);
    }
    if (listing != nullptr) ::closedir(listing);
    std::sort(names.begin(), names.end());
    if (names.empty()) {
      throw Error(ErrorKind::kMissing, path + ": holds no safetensors file.");
    }
  } else {
    const std::size_t slash = path.find_last_of('/');
    folder = slash == std::string::npos ? "." : path.substr(0, slash + 1) + ".";
    names.push_back(slash == std::string::npos ? path : path.substr(slash + 1));
  }
  for (const std::string& name : names) {
    OpenFile file(folder, name);
    const FileHeader header = read_header(file);
    for (const FileEntry& entry : header.entries) {
      TensorRecord& tensor = state_->tensors[entry.name];
      const std::string where = file.path() + ", tensor '" + entry.name + "'";
      if (tensor.regions.empty()) {
        tensor.name = entry.name;
        tensor.dtype = entry.dtype;
        tensor.shape.assign(entry.shape.size(), 0);
      } else if (tensor.dtype != entry.dtype || tensor.shape.size() != entry.shape.size()) {
        corrupt(where, "is another tensor than in the other files");
      }
      for (std::size_t i = 0; i < entry.shape.size(); ++i) {
        tensor.shape[i] = std::max(tensor.shape[i], entry.offsets[i] + entry.shape[i]);
      }
      RegionRecord record;
      record.file = static_cast<int>(state_->files.size());
      record.region = {entry.offsets, entry.shape};
      record.begin = header.header_bytes + entry.begin;
      record.end = header.header_bytes + entry.end;
      tensor.regions.push_back(std::move(record));
    }
    state_->files.push_back(std::move(file));
  }
  if (S_ISDIR(facts.st_mode)) {
    struct stat index{};
    if (::lstat((path + "/" + kIndexName).c_str(), &index) == 0) {
      const auto listed =
          decode_index(read_small_file(path, kIndexName, kMaxHeaderBytes), path + "/" + kIndexName);
      for (const auto& [name, file] : listed) {
        if (!state_->tensors.contains(name))
          corrupt(path, "lists '" + name + "', which is not there");
      }
    }
  }
  // The same promises as a manifest's: covered exactly once.
  for (const auto& [name, tensor] : state_->tensors) {
    Manifest one;
    one.tensors.push_back(tensor);
    std::uint64_t place = 8;
    for (RegionRecord& region : one.tensors[0].regions) {
      region.file = 0;
      const std::uint64_t count = region.end - region.begin;
      region.begin = place;
      region.end = place += count;
    }
    one.files.push_back({.name = "x", .num_bytes = place, .header_bytes = 8});
    check_manifest(one, path);
  }
}

PlainReader::~PlainReader() = default;

std::vector<TensorInfo> PlainReader::tensors() const {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : state_->tensors) {
    infos.push_back({name, tensor.dtype, tensor.shape});
  }
  return infos;
}

void PlainReader::read(const std::string& name, const Region& region, std::byte* data) const {
  const auto found = state_->tensors.find(name);
  if (found == state_->tensors.end()) {
    throw Error(ErrorKind::kMissing, "checkpoint: there is no tensor '" + name + "'.");
  }
  const TensorRecord& tensor = found->second;
  check_region({tensor.name, tensor.dtype, tensor.shape}, region);
  for (const RegionRecord& record : tensor.regions) {
    Chunks chunks(state_->files[record.file], record, tensor.name);
    copy_common(record, region, bytes_of(tensor.dtype), chunks, data);
  }
}

Found find_newest(const std::string& root, std::int64_t max_step) {
  Found found;
  for (const std::int64_t step : list_steps(root)) {
    if (step > max_step) continue;
    try {
      found.reader = std::make_unique<Reader>(root, step);
      return found;
    } catch (const Error& error) {
      found.warnings.emplace_back(error.what());
    }
  }
  return found;
}

}  // namespace tessera::checkpoint
