#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/json.h"
#include "checkpoint/open_file.h"
#include "checkpoint/stored_region.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint {

namespace {

using json::corrupt;

}  // namespace

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
  const OpenFolder opened(folder, /*follows=*/true);
  for (const std::string& name : names) {
    OpenFile file(opened, name);
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
      const auto listed = decode_index(read_small_file(opened, kIndexName, kMaxHeaderBytes),
                                       path + "/" + kIndexName);
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

}  // namespace tessera::checkpoint
