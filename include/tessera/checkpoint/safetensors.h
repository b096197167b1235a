// tessera/checkpoint/safetensors.h — the header of a safetensors file, checked. No LibTorch.
//
// A file is 8 bytes (the length of the header, little endian), the header (JSON), and the tensors
// without gaps. The sharding of torch's distributed checkpoint stands in the header's metadata:
// DCP_SHARDING_INFO says where in the whole tensor each one begins.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// Element types, by their names in safetensors.
enum class Dtype : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
  kC64,
};

TESSERA_API const char* name_of(Dtype dtype) noexcept;
TESSERA_API std::uint64_t bytes_of(Dtype dtype) noexcept;

/// One tensor of a file; `begin` and `end` count from the end of the header.
struct FileEntry {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;    // of what is in this file
  std::vector<std::int64_t> offsets;  // where it begins in the whole tensor
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct FileHeader {
  std::vector<FileEntry> entries;               // in the order of their bytes
  std::map<std::string, std::string> metadata;  // without DCP_SHARDING_INFO
  std::uint64_t header_bytes = 0;               // the 8 bytes and the JSON
  bool is_sharded = false;                      // the offsets are written, or were there
};

/// Largest header that is read, as in safetensors itself.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr std::size_t kMaxEntries = 1'000'000;

/// Reads the JSON of a header whose file has `file_bytes` bytes.
///
/// Accepted means: known types, shape times size equals bytes without overflow, tensors follow each
/// other without gap or overlap and fill the file, no key twice, offsets fit. Otherwise throws
/// Error(kCorrupt) that begins with `where`.
TESSERA_API FileHeader decode_header(std::string_view json, std::uint64_t file_bytes,
                                     const std::string& where);

/// Returns the length and the JSON; the data then begins at a multiple of 64 bytes. `begin` and
/// `end` of the entries are filled in.
TESSERA_API std::string encode_header(FileHeader& header);

/// Returns tensor names and the files that hold them out of a model.safetensors.index.json.
/// Throws Error(kCorrupt) that begins with `where`.
TESSERA_API std::map<std::string, std::string> decode_index(std::string_view json,
                                                            const std::string& where);
TESSERA_API std::string encode_index(const std::map<std::string, std::string>& files,
                                     std::uint64_t total_bytes);

/// Throws Error(kCorrupt) unless `name` is a plain file name of [A-Za-z0-9._-], at most 255 long,
/// and neither . nor ..
TESSERA_API void check_file_name(const std::string& name, const std::string& where);

/// Returns the number of elements; throws Error(kCorrupt) for negative sizes or overflow.
TESSERA_API std::uint64_t num_elements_of(const std::vector<std::int64_t>& shape,
                                          const std::string& where);

/// "[3, 4]".
TESSERA_API std::string text_of(const std::vector<std::int64_t>& shape);

}  // namespace tessera::checkpoint
