#include "tessera/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "checkpoint/json.h"
#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint {
namespace {

using json::corrupt;

struct DtypeFacts {
  Dtype dtype;
  const char* name;
  std::uint64_t num_bytes;
};

constexpr std::array<DtypeFacts, 16> kDtypes = {{
    {Dtype::kBool, "BOOL", 1},
    {Dtype::kU8, "U8", 1},
    {Dtype::kI8, "I8", 1},
    {Dtype::kF8E5M2, "F8_E5M2", 1},
    {Dtype::kF8E4M3, "F8_E4M3", 1},
    {Dtype::kI16, "I16", 2},
    {Dtype::kU16, "U16", 2},
    {Dtype::kF16, "F16", 2},
    {Dtype::kBf16, "BF16", 2},
    {Dtype::kI32, "I32", 4},
    {Dtype::kU32, "U32", 4},
    {Dtype::kF32, "F32", 4},
    {Dtype::kI64, "I64", 8},
    {Dtype::kU64, "U64", 8},
    {Dtype::kF64, "F64", 8},
    {Dtype::kC64, "C64", 8},
}};

constexpr std::uint64_t kAlignment = 64;
constexpr const char* kMetadata = "__metadata__";
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";
// A shape, two offsets, a type and saved offsets: some twenty values per tensor at the very most.
constexpr std::size_t kMaxHeaderValues = 24 * kMaxEntries;

Dtype dtype_named(const std::string& name, const std::string& where) {
  for (const DtypeFacts& facts : kDtypes) {
    if (name == facts.name) return facts.dtype;
  }
  corrupt(where, "has the unknown element type '" + name + "'");
}

std::string tensor_of(const std::string& where, const std::string& name) {
  return where + ", tensor '" + name + "'";
}

FileEntry entry_of(const std::string& name, const nlohmann::json& value, const std::string& file) {
  const std::string where = tensor_of(file, name);
  json::check_keys(value, {"dtype", "shape", "data_offsets"}, where);
  FileEntry entry;
  entry.name = name;
  entry.dtype = dtype_named(json::string_of(value, "dtype", where), where);
  entry.shape = json::counts_of(value, "shape", where);
  entry.offsets.assign(entry.shape.size(), 0);
  const auto range = json::counts_of(value, "data_offsets", where);
  if (range.size() != 2) corrupt(where, "'data_offsets' is not two numbers");
  entry.begin = static_cast<std::uint64_t>(range[0]);
  entry.end = static_cast<std::uint64_t>(range[1]);
  if (entry.begin > entry.end) corrupt(where, "ends before it begins");
  const std::uint64_t num_elements = num_elements_of(entry.shape, where);
  const std::uint64_t size = bytes_of(entry.dtype);
  if (num_elements > UINT64_MAX / size || num_elements * size != entry.end - entry.begin) {
    corrupt(where, "is " + text_of(entry.shape) + " of " + name_of(entry.dtype) + " but has " +
                       std::to_string(entry.end - entry.begin) + " bytes");
  }
  return entry;
}

void read_sharding(const std::string& text, std::vector<FileEntry>& entries,
                   const std::string& where) {
  const nlohmann::json sharding = json::parse_object(text, where, kMaxHeaderValues);
  for (FileEntry& entry : entries) {
    const std::string tensor = tensor_of(where, entry.name);
    const auto found = sharding.find(entry.name);
    if (found == sharding.end()) corrupt(tensor, "has no saved offsets");
    entry.offsets = json::counts_of(*found, "saved_offsets", tensor);
    if (entry.offsets.size() != entry.shape.size()) {
      corrupt(tensor, "has " + std::to_string(entry.shape.size()) + " dimensions and " +
                          std::to_string(entry.offsets.size()) + " saved offsets");
    }
    for (std::size_t i = 0; i < entry.shape.size(); ++i) {
      if (entry.offsets[i] > INT64_MAX - entry.shape[i]) corrupt(tensor, "has an offset too large");
    }
  }
}

}  // namespace

const char* name_of(Dtype dtype) noexcept { return kDtypes[static_cast<std::size_t>(dtype)].name; }

std::uint64_t bytes_of(Dtype dtype) noexcept {
  return kDtypes[static_cast<std::size_t>(dtype)].num_bytes;
}

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::uint64_t num_elements_of(const std::vector<std::int64_t>& shape, const std::string& where) {
  std::uint64_t count = 1;
  bool is_empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) corrupt(where, "has the negative size " + std::to_string(size));
    if (size == 0) {
      is_empty = true;
    } else if (count > INT64_MAX / static_cast<std::uint64_t>(size)) {
      corrupt(where, "has more elements than can be counted");
    } else {
      count *= static_cast<std::uint64_t>(size);
    }
  }
  return is_empty ? 0 : count;
}

void check_file_name(const std::string& name, const std::string& where) {
  const bool is_plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
  if (!is_plain || name.empty() || name.size() > 255 || name == "." || name == "..") {
    // The name itself may hold anything; it is not repeated.
    corrupt(where, "names a file that is not made of A-Z, a-z, 0-9, '.', '_' and '-'");
  }
}

FileHeader decode_header(std::string_view text, std::uint64_t file_bytes,
                         const std::string& where) {
  FileHeader header;
  header.header_bytes = 8 + text.size();
  if (header.header_bytes > file_bytes) corrupt(where, "is shorter than its header");
  const std::uint64_t data_bytes = file_bytes - header.header_bytes;
  const nlohmann::json object = json::parse_object(text, where, kMaxHeaderValues);
  if (object.size() > kMaxEntries) corrupt(where, "has more than a million tensors");
  for (const auto& [key, value] : object.items()) {
    if (key != kMetadata) {
      header.entries.push_back(entry_of(key, value, where));
      continue;
    }
    if (!value.is_object()) corrupt(where, "'__metadata__' is not an object");
    for (const auto& [name, text_value] : value.items()) {
      if (!text_value.is_string()) corrupt(where, "'__metadata__' holds more than strings");
      header.metadata[name] = text_value.get<std::string>();
    }
  }
  std::sort(header.entries.begin(), header.entries.end(),
            [](const FileEntry& a, const FileEntry& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  std::uint64_t end = 0;
  for (const FileEntry& entry : header.entries) {
    if (entry.begin != end) {
      corrupt(tensor_of(where, entry.name),
              entry.begin < end ? "overlaps another tensor" : "leaves a gap before it");
    }
    end = entry.end;
  }
  if (end != data_bytes) {
    corrupt(where, "has " + std::to_string(data_bytes) + " bytes of data, its header describes " +
                       std::to_string(end));
  }
  const auto sharding = header.metadata.find(kShardingInfo);
  if (sharding != header.metadata.end()) {
    read_sharding(sharding->second, header.entries, where + ", " + kShardingInfo);
    header.metadata.erase(sharding);
    header.is_sharded = true;
  }
  return header;
}

std::string encode_header(FileHeader& header) {
  nlohmann::json object = nlohmann::json::object();
  nlohmann::json sharding = nlohmann::json::object();
  std::uint64_t place = 0;
  for (FileEntry& entry : header.entries) {
    entry.begin = place;
    place += num_elements_of(entry.shape, entry.name) * bytes_of(entry.dtype);
    entry.end = place;
  }
  nlohmann::json metadata = header.metadata;
  if (header.is_sharded) {
    for (const FileEntry& entry : header.entries) {
      sharding[entry.name]["saved_offsets"] = entry.offsets;
    }
    metadata[kShardingInfo] = sharding.dump();
  }
  if (!metadata.empty()) object[kMetadata] = std::move(metadata);
  for (const FileEntry& entry : header.entries) {
    nlohmann::json& value = object[entry.name];
    value["dtype"] = name_of(entry.dtype);
    value["shape"] = entry.shape;
    value["data_offsets"] = std::vector<std::uint64_t>{entry.begin, entry.end};
  }
  std::string text;
  try {
    text = object.dump();
  } catch (const nlohmann::json::type_error&) {
    throw Error(ErrorKind::kInvalid, "checkpoint: a tensor's name is not UTF-8.");
  }
  text.append((kAlignment - (8 + text.size()) % kAlignment) % kAlignment, ' ');
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(text.size() >> (8 * i));
  header.header_bytes = 8 + text.size();
  return bytes + text;
}

std::map<std::string, std::string> decode_index(std::string_view text, const std::string& where) {
  const nlohmann::json object = json::parse_object(text, where, 4 * kMaxEntries);
  const nlohmann::json& files = json::member(object, "weight_map", where);
  if (!files.is_object()) corrupt(where, "'weight_map' is not an object");
  std::map<std::string, std::string> result;
  for (const auto& [name, file] : files.items()) {
    if (!file.is_string()) corrupt(where, "'weight_map' holds more than strings");
    check_file_name(file.get<std::string>(), where);
    result[name] = file.get<std::string>();
  }
  return result;
}

std::string encode_index(const std::map<std::string, std::string>& files,
                         std::uint64_t total_bytes) {
  nlohmann::json object;
  object["metadata"] = {{"total_size", total_bytes}};
  object["weight_map"] = files;
  return object.dump(2) + "\n";
}

}  // namespace tessera::checkpoint
