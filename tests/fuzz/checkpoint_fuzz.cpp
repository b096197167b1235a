// Headers, indexes and manifests: any bytes are read without harm, and what is accepted keeps its
// promises and comes back the same.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"

using namespace tessera::checkpoint;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// The first two bytes say how much data follows the header.
void try_header(std::string_view text, std::uint64_t data_bytes) {
  FileHeader header;
  try {
    header = decode_header(text, 8 + text.size() + data_bytes, "f");
  } catch (const Error&) {
    return;
  }
  std::uint64_t end = 0;
  for (const FileEntry& entry : header.entries) {
    require(entry.begin == end && entry.end >= entry.begin);
    require(num_elements_of(entry.shape, "f") * bytes_of(entry.dtype) == entry.end - entry.begin);
    require(entry.offsets.size() == entry.shape.size());
    end = entry.end;
  }
  require(end == data_bytes);
  FileHeader copy = header;
  const std::string bytes = encode_header(copy);
  const FileHeader back =
      decode_header(std::string_view(bytes).substr(8), bytes.size() + data_bytes, "f");
  require(back.entries.size() == header.entries.size() && back.metadata == header.metadata);
  for (std::size_t i = 0; i < back.entries.size(); ++i) {
    require(back.entries[i].begin == header.entries[i].begin);
  }
}

void try_index(std::string_view text) {
  try {
    const auto files = decode_index(text, "i");
    require(decode_index(encode_index(files, 0), "i") == files);
  } catch (const Error&) {
  }
}

// Without its sum, which no fuzzer guesses; the meaning is checked the same.
void try_manifest(std::string_view text) {
  Manifest manifest;
  try {
    decode_manifest(text, "m");
  } catch (const Error&) {
  }
  try {
    manifest = decode_fragment(text, "m");
    check_manifest(manifest, "m");
  } catch (const Error&) {
    return;
  }
  const std::string again = encode_manifest(manifest);
  Manifest back = decode_manifest(again, "m");
  require(encode_manifest(back) == again);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (size >= 2) {
    try_header(text.substr(2), static_cast<std::uint64_t>(data[0]) | data[1] << 8);
  }
  try_index(text);
  try_manifest(text);
  return 0;
}
