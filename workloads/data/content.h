// data/content.h — what kind of file it is, by its first bytes. No LibTorch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "trainer/data_error.h"

namespace tessera::workloads::data {

using trainer::DataError;

enum class FileKind : std::uint8_t { kText, kGzip, kZstd, kClickLog, kParquet, kZip, kOther };

/// Tables that lie column by column: columns.h reads them.
inline bool is_columnar(FileKind kind) {
  return kind == FileKind::kParquet || kind == FileKind::kZip;
}

/// What begins with these bytes. `name` says it in words for everything that is not text.
struct Content {
  FileKind kind = FileKind::kText;
  std::string name = {};    // "a Parquet file"
  std::string advice = {};  // what to do with it
};
Content content_of(std::string_view front);

/// Throws DataError, naming the file and what it is, unless the bytes begin a text.
void check_text(const std::string& path, std::string_view front);

/// The first bytes of a regular file as they lie on the disk, empty for a pipe, which would lose
/// them. Throws DataError if it cannot be read.
std::string front_of(const std::string& path, std::size_t num_bytes = 4096);

}  // namespace tessera::workloads::data
