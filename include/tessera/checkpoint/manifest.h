// tessera/checkpoint/manifest.h — the list of everything in a checkpoint, with sums. No LibTorch.
//
// MANIFEST.json is written last. Its final line holds the SHA-256 of all bytes before that line, so
// a manifest is either whole or refused. See docs/checkpoint.md for every key.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// Plain values beside the tensors: step counters, seeds, reader positions, schedules.
using Value = std::variant<bool, std::int64_t, double, std::string>;
using Values = std::map<std::string, Value>;

/// A box inside a tensor.
struct Region {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> lengths;
  bool operator==(const Region&) const = default;
};

/// Data is summed in chunks of so many bytes, so that a part of a region can be checked by itself.
inline constexpr std::uint64_t kChunkBytes = std::uint64_t{4} << 20;

struct FileRecord {
  std::string name;
  std::uint64_t num_bytes = 0;
  std::uint64_t header_bytes = 0;  // 0: not a safetensors file, summed as a whole
  std::uint32_t header_crc = 0;
  std::uint32_t crc = 0;  // of the whole file
};

/// Where a region of a tensor lies: bytes [begin, end) of a file.
struct RegionRecord {
  int file = 0;  // place in Manifest::files
  Region region;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t crc = 0;
  std::vector<std::uint32_t>
      chunk_crcs;  // one per kChunkBytes of the region, the last may be short
};

struct TensorRecord {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;
  std::vector<RegionRecord> regions;  // disjoint, and together the whole tensor
};

/// Rows of a table that replace those of the base: `rows` names an I64 tensor of ascending row
/// numbers, `values` the tensor that holds the columns [column_begin, column_end) of these rows.
struct DeltaPiece {
  std::string rows;
  std::string values;
  std::int64_t column_begin = 0;
  std::int64_t column_end = 0;
};

struct DeltaRecord {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;  // one or two dimensions
  std::vector<DeltaPiece> pieces;
};

/// A list of different ids, and the tensors with a row per id of it, as a delta changes them. The
/// list comes in groups (the 1024 buckets of a table that grows), group after group.
///
/// Within each group: the base's rows go whose ids were removed; those of changed ids are replaced
/// in their place; then come the rows of changed ids that are not there yet, in their order.
struct ListDelta {
  /// A tensor of this checkpoint, and the one that holds the rows of the changed ids.
  struct Column {
    std::string name;
    std::string values;
  };
  std::string name;             // of the list, int64
  std::int64_t rows = 0;        // of all its tensors, once the delta is applied
  std::string groups;           // int64: ids of each group; there in full, also in the base
  std::string changed;          // int64: ids that are new or have other rows, group after group
  std::string runs;             // int64: how many of them are of each group
  std::string removed;          // int64: ids that had lost their rows since the base, in any order
  std::vector<Column> columns;  // without the list itself
};

/// The checkpoint that a delta builds on: its folder beside this one, and its manifest's SHA-256.
struct Base {
  std::string folder;
  std::string sha256;
};

struct TESSERA_API Manifest {
  std::int64_t step = 0;
  /// Which commit of its root this is, counted from 1. Clocks jump and steps come again after a
  /// load of an older one; this only grows. 0: of version 1, which did not count.
  std::int64_t commit = 0;
  std::string saved;  // UTC, "2026-11-15T10:20:30Z", for people
  std::string job;    // who saved it; empty: of version 1
  int world = 1;
  std::string plan;  // free text, such as a hash of the sharding plan
  std::optional<Base> base;
  std::vector<FileRecord> files;
  std::vector<TensorRecord> tensors;  // by name
  std::vector<DeltaRecord> deltas;    // by name
  std::vector<ListDelta> lists;       // by name
  Values values;
  std::vector<Values> rank_values;  // one per rank that saved, or none
  std::string sha256;               // filled in by encode and decode

  const TensorRecord* find(const std::string& name) const;
  const DeltaRecord* find_delta(const std::string& name) const;
};

inline constexpr const char* kManifestName = "MANIFEST.json";
inline constexpr const char* kIndexName = "model.safetensors.index.json";
inline constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 30;

/// Returns the text of MANIFEST.json and fills in `manifest.sha256`. The first line holds the
/// commit, so that it can be had without the rest.
TESSERA_API std::string encode_manifest(Manifest& manifest);

/// The commit in the beginning of a manifest's text, unchecked; 0 if there is none.
TESSERA_API std::int64_t commit_in(std::string_view beginning) noexcept;

/// Reads and checks a manifest: every promise of the structures above holds afterwards. Throws
/// Error(kCorrupt) that begins with `where`.
TESSERA_API Manifest decode_manifest(std::string_view text, const std::string& where);

/// What one rank has written, as text for the rank that writes the manifest. Not summed.
TESSERA_API std::string encode_fragment(const Manifest& part);
TESSERA_API Manifest decode_fragment(std::string_view text, const std::string& where);

/// Adds the files, tensors, deltas and lists of `part` to `whole`, and sorts them.
TESSERA_API void merge(Manifest& whole, Manifest part);

/// Throws Error(kCorrupt) unless the regions of each tensor cover it exactly once, those of each
/// file fill it exactly, and deltas refer to tensors that are there.
TESSERA_API void check_manifest(const Manifest& manifest, const std::string& where);

}  // namespace tessera::checkpoint
