#include "tessera/serving/package.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "checkpoint/json.h"
#include "checkpoint/open_file.h"
#include "checkpoint/stored_region.h"
#include "serving/model_info.h"
#include "serving/shared_memory.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

using checkpoint::Error;
using checkpoint::ErrorKind;
using checkpoint::OpenFile;
using checkpoint::RegionRecord;
using checkpoint::TensorRecord;
using checkpoint::json::corrupt;

// A file in memory, as far as it is touched, and addresses behind it.
class Mapping {
 public:
  Mapping(const checkpoint::OpenFolder& folder, const std::string& name, std::uint64_t num_bytes,
          std::uint64_t spare_bytes)
      : file_bytes_(whole_pages(num_bytes)), num_bytes_(file_bytes_ + whole_pages(spare_bytes)) {
    const checkpoint::Descriptor file(
        checkpoint::Disk::real(),
        ::openat(folder.fd(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    struct stat facts{};
    if (file.get() < 0 || ::fstat(file.get(), &facts) != 0) fail(folder, name);
    if (static_cast<std::uint64_t>(facts.st_size) != num_bytes) {
      corrupt(folder.path() + "/" + name, "changed while it was opened");
    }
    void* space =
        ::mmap(nullptr, num_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) fail(folder, name);
    data_ = space;
    if (::mmap(space, num_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) {
      const int code = errno;
      ::munmap(space, num_bytes_);
      errno = code;
      fail(folder, name);
    }
    ::madvise(data_, num_bytes, MADV_RANDOM);
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        file_bytes_(other.file_bytes_),
        num_bytes_(other.num_bytes_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, num_bytes_);
  }
  const std::uint8_t* bytes() const { return static_cast<const std::uint8_t*>(data_); }
  SpareSpace spare() const {
    return {static_cast<std::uint8_t*>(data_) + file_bytes_, num_bytes_ - file_bytes_};
  }

 private:
  [[noreturn]] static void fail(const checkpoint::OpenFolder& folder, const std::string& name) {
    throw Error(ErrorKind::kRead,
                folder.path() + "/" + name + ": cannot be mapped: " + std::strerror(errno) + ".");
  }

  void* data_ = nullptr;
  std::uint64_t file_bytes_;
  std::uint64_t num_bytes_;  // with what is spare
};

// Rows of which there is room behind a table.
std::uint64_t spare_rows(const TableInfo& table, int copies) {
  // A row more: the first spare one begins behind the first spare byte.
  std::int64_t rows = copies * table.stored_rows() + 1;
  if (table.is_growing) rows += most_ids(table.num_rows);
  return static_cast<std::uint64_t>(rows);
}

// The one region that a tensor of a package has.
const RegionRecord& region_of(const checkpoint::Manifest& manifest, const std::string& name,
                              checkpoint::Dtype dtype, const std::vector<std::int64_t>& shape,
                              const std::string& where) {
  const TensorRecord* tensor = manifest.find(name);
  if (tensor == nullptr) corrupt(where, "has no tensor '" + name + "'");
  if (tensor->dtype != dtype || tensor->shape != shape || tensor->regions.size() != 1) {
    corrupt(where, "tensor '" + name + "' is " + checkpoint::name_of(tensor->dtype) + " " +
                       checkpoint::text_of(tensor->shape) + ", the model says " +
                       checkpoint::name_of(dtype) + " " + checkpoint::text_of(shape));
  }
  return tensor->regions.front();
}

}  // namespace

struct Package::State {
  std::string path;
  checkpoint::Manifest manifest;
  ModelInfo model;
  std::map<std::string, std::vector<float>> dense;
  std::vector<OpenFile> files;
  std::vector<Mapping> mappings;  // one per table
  std::vector<std::uint64_t> begins;
  std::int64_t mapped_bytes = 0;
};

Package::Package(const std::string& path, bool verifies, int spare_copies)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  const checkpoint::OpenFolder folder(path, /*follows=*/true);
  state.path = folder.path();
  state.manifest = checkpoint::read_manifest(folder);
  const checkpoint::Manifest& manifest = state.manifest;
  if (!manifest.values.contains(kPackageMark) || manifest.base) {
    corrupt(path, "is not a package; make one with tessera export");
  }
  std::string description;
  std::vector<OpenFile>& files = state.files;
  for (const checkpoint::FileRecord& record : manifest.files) {
    OpenFile file(folder, record.name);
    if (file.num_bytes() != record.num_bytes) {
      corrupt(file.path(), "has " + std::to_string(file.num_bytes()) +
                               " bytes, the manifest says " + std::to_string(record.num_bytes));
    }
    const std::uint64_t count = record.header_bytes > 0 ? record.header_bytes : record.num_bytes;
    if (count > checkpoint::kMaxManifestBytes) corrupt(file.path(), "is too large");
    std::string bytes(count, '\0');
    file.read(0, bytes.data(), bytes.size());
    if (checkpoint::crc32c(bytes.data(), bytes.size()) !=
        (record.header_bytes > 0 ? record.header_crc : record.crc)) {
      corrupt(file.path(), record.header_bytes > 0 ? "its header was changed" : "was changed");
    }
    if (record.name == kModelFile) description = std::move(bytes);
    files.push_back(std::move(file));
  }
  const std::string where = path + "/" + kModelFile;
  if (description.empty()) corrupt(where, "is missing");
  state.model = decode_model(description, where);

  const auto numbered = [&](const RegionRecord& region) -> const OpenFile& {
    return files[static_cast<std::size_t>(region.file)];
  };
  for (const auto& [name, shape] : dense_tensors(state.model)) {
    const RegionRecord& region = region_of(manifest, name, checkpoint::Dtype::kF32, shape, path);
    std::vector<float> numbers(checkpoint::num_elements_of(shape, name));
    checkpoint::Chunks chunks(numbered(region), region, name);
    chunks.copy(0, region.end - region.begin, reinterpret_cast<std::byte*>(numbers.data()));
    state.dense.emplace(name, std::move(numbers));
  }
  for (const TableInfo& table : state.model.tables) {
    const std::string name = "tables." + table.name + ".weight";
    const RegionRecord& region = region_of(manifest, name, checkpoint::Dtype::kU8,
                                           {table.stored_rows(), table.row_bytes}, path);
    if (table.is_growing) {
      region_of(manifest, "tables." + table.name + kIdsSuffix, checkpoint::Dtype::kI64,
                {table.num_rows}, path);
    }
    const checkpoint::FileRecord& file = manifest.files[static_cast<std::size_t>(region.file)];
    state.mappings.emplace_back(
        folder, file.name, file.num_bytes,
        spare_copies == 0
            ? 0
            : spare_rows(table, spare_copies) * static_cast<std::uint64_t>(table.row_bytes));
    state.begins.push_back(region.begin);
    state.mapped_bytes += static_cast<std::int64_t>(file.num_bytes);
  }
  if (verifies) verify();
}

bool Package::verify(const std::function<bool()>& goes_on) const {
  std::vector<std::byte> buffer(std::size_t{1} << 18);
  for (const TableInfo& table : state_->model.tables) {
    const std::string name = "tables." + table.name + ".weight";
    const RegionRecord& region = state_->manifest.find(name)->regions.front();
    checkpoint::Chunks chunks(state_->files[static_cast<std::size_t>(region.file)], region, name);
    for (std::uint64_t chunk = 0; chunk < region.chunk_crcs.size(); ++chunk) {
      if (goes_on && !goes_on()) return false;
      chunks.check(chunk, buffer);
    }
  }
  return true;
}

Package::~Package() = default;

const std::string& Package::path() const noexcept { return state_->path; }
const ModelInfo& Package::model() const noexcept { return state_->model; }
const std::string& Package::sha256() const noexcept { return state_->manifest.sha256; }
std::int64_t Package::mapped_bytes() const noexcept { return state_->mapped_bytes; }

embedding::RowTable Package::table(std::size_t table) const {
  const TableInfo& info = state_->model.tables.at(table);
  return {info.type, state_->mappings[table].bytes() + state_->begins[table], info.stored_rows(),
          info.num_columns, info.row_bytes};
}

SpareSpace Package::spare(std::size_t table) const noexcept {
  return state_->mappings[table].spare();
}

std::vector<std::int64_t> Package::ids(std::size_t table) const {
  const TableInfo& info = state_->model.tables.at(table);
  const std::string name = "tables." + info.name + kIdsSuffix;
  const RegionRecord& region =
      region_of(state_->manifest, name, checkpoint::Dtype::kI64, {info.num_rows}, state_->path);
  const checkpoint::OpenFolder folder(state_->path, /*follows=*/true);
  const OpenFile file(folder, state_->manifest.files[static_cast<std::size_t>(region.file)].name);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(info.num_rows));
  if (ids.empty()) return ids;
  checkpoint::Chunks chunks(file, region, name);
  chunks.copy(0, region.end - region.begin, reinterpret_cast<std::byte*>(ids.data()));
  return ids;
}

std::span<const float> Package::dense(const std::string& name) const {
  return state_->dense.at(name);
}

}  // namespace tessera::serving
