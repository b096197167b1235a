// data/schema.h — which columns of a table are what: a file in TOML that people write. No LibTorch.
//
// docs/your_data.md describes every key.

#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/input.h"
#include "dlrm/click_log.h"

namespace tessera::workloads::data {

/// The format of a text.
enum class Format : std::uint8_t { kAny, kCsv, kTsv, kJsonLines };

struct LabelColumn {
  std::string column;
  std::vector<std::string> positive = {};  // texts that count as 1, all others as 0; none: 0 and 1
  std::optional<double> threshold = {};    // numbers from here on count as 1
};

struct DenseColumn {
  std::string column;
  bool log1p = false;  // log(1 + x), 0 for x below 0, after clipping
  std::optional<double> low = {};
  std::optional<double> high = {};
  std::optional<double> missing = 0.0;  // for a missing value; none: that is an error
};

enum class IdKind : std::uint8_t { kInteger, kHash, kVocabulary };

struct FeatureColumn {
  std::string column;
  std::string name = {};  // of feature and table; the column's if empty
  IdKind kind = IdKind::kHash;
  std::int64_t rows = 0;        // kVocabulary: the lines of its file, and one for all other values
  bool grows = false;           // a table without an end: every id has a row of its own, rows are 0
  std::int64_t dim = 0;         // columns of its table; 0: as the training says
  std::string vocabulary = {};  // a file, one value per line
  bool wraps = false;           // kInteger: ids beyond the rows are taken modulo
  std::string separator = {};   // of several values in a cell; none: one value
  std::int64_t most = 0;        // of several values the first so many; 0: all
  bool empties = false;         // kInteger: a missing value is an empty bag; otherwise an error
  bool means = false;           // pooling: mean; otherwise sum
  std::vector<std::string> values = {};  // kVocabulary: the lines of the file

  const std::string& feature() const { return name.empty() ? column : name; }
  /// Bags of one id each.
  bool is_single() const { return separator.empty() && !empties; }
};

struct Schema {
  Format format = Format::kAny;
  char separator = 0;  // of columns; 0: as the format says
  /// Names of columns of a text without a line of names; empty: its first line names them.
  std::vector<std::string> columns = {};
  std::vector<std::string> missing = {""};  // texts that stand for no value
  LabelColumn label;
  std::vector<DenseColumn> dense = {};
  std::vector<FeatureColumn> features = {};

  dlrm::ClickSchema click_schema() const;
  /// As a file.
  std::string text() const;
};

/// Reads vocabulary files, which are named from where the schema lies, too. Throws DataError,
/// naming file, line and key, for what is not a schema.
Schema read_schema(const std::string& path);
/// The same from a text, without vocabulary files; `path` is named in what is thrown.
Schema parse_schema(std::string_view text, const std::string& path);

/// The row of a text in a table of `rows` rows: a hash of its bytes, described in
/// docs/your_data.md.
inline std::uint64_t hash_of(std::string_view text) noexcept {
  std::uint64_t h = 0x9e3779b97f4a7c15U ^ (text.size() * 0xff51afd7ed558ccdU);
  const auto mix = [&h](std::uint64_t word) {
    h = (h ^ word) * 0xbf58476d1ce4e5b9U;
    h ^= h >> 32U;
  };
  const char* at = text.data();
  std::size_t left = text.size();
  std::uint64_t word = 0;
  for (; left >= 8; left -= 8, at += 8) {
    std::memcpy(&word, at, 8);
    mix(word);
  }
  if (left > 0) {
    if (text.size() >= 8) {
      std::memcpy(&word, at + left - 8, 8);  // with bytes before, which are shifted out
      word >>= 8 * (8 - left);
    } else {
      word = 0;
      for (std::size_t i = 0; i < left; ++i) {
        word |= static_cast<std::uint64_t>(static_cast<unsigned char>(at[i])) << (8 * i);
      }
    }
    mix(word);
  }
  h *= 0x94d049bb133111ebU;
  return h ^ (h >> 29U);
}
/// The same of a text with 16 bytes behind it that can be read: without a branch on its length, as
/// far as 16 bytes.
inline std::uint64_t hash_of_nearby(std::string_view text) noexcept {
  const std::size_t size = text.size();
  if (size - 1 >= 16) return hash_of(text);  // 0 too
  std::uint64_t words[2];
  std::memcpy(words, text.data(), 16);
  // Bytes that are not the text's are 0.
  const std::size_t first = size < 8 ? size : 8;
  words[0] &= ~std::uint64_t{0} >> (64 - 8 * first);
  words[1] &= (std::uint64_t{1} << 4U * (size - first) << 4U * (size - first)) - 1;
  std::uint64_t h = 0x9e3779b97f4a7c15U ^ (size * 0xff51afd7ed558ccdU);
  const auto mixed = [](std::uint64_t before, std::uint64_t word) {
    const std::uint64_t product = (before ^ word) * 0xbf58476d1ce4e5b9U;
    return product ^ (product >> 32U);
  };
  h = mixed(h, words[0]);
  const std::uint64_t second = mixed(h, words[1]);
  h = (size > 8 ? second : h) * 0x94d049bb133111ebU;
  return h ^ (h >> 29U);
}
/// A text as an id of 64 bits: XXH3 of its bytes as they are, with seed 0. Of 10^8 different texts
/// any two share an id with a chance of 3 in 10,000. Throws DataError in a build without xxHash.
inline constexpr std::string_view kTextHashName = "xxh3-64";
std::int64_t raw_id(std::string_view text);
/// Another hash of the same bytes: texts of one id that differ in it are different.
std::uint32_t check_hash(std::string_view text);
/// The row of a hash: its share of 2^64.
inline std::int64_t row_of_hash(std::uint64_t hash, std::int64_t rows) noexcept {
  return static_cast<std::int64_t>(
      static_cast<unsigned __int128>(hash) * static_cast<std::uint64_t>(rows) >> 64U);
}
inline std::int64_t hashed_row(std::string_view text, std::int64_t rows) noexcept {
  return row_of_hash(hash_of(text), rows);
}

}  // namespace tessera::workloads::data
