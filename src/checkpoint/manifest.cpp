#include "tessera/checkpoint/manifest.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <utility>

#include "checkpoint/json.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint {
namespace {

using json::corrupt;
using Json = nlohmann::json;

constexpr const char* kFormat = "tessera-checkpoint";
constexpr std::int64_t kVersion = 2;  // 1 had no commits
constexpr std::size_t kMaxManifestValues = 64'000'000;
constexpr std::size_t kMaxRegions = 4096;  // of one tensor
constexpr std::string_view kCommit = "{\"commit\":";
constexpr std::string_view kTrailer = "\"sha256\":\"";

std::string hex_of(std::uint32_t sum) {
  std::string text(8, '0');
  for (int i = 0; i < 8; ++i) text[i] = "0123456789abcdef"[(sum >> (28 - 4 * i)) & 0xF];
  return text;
}

std::uint32_t crc_in(std::string_view text, const std::string& where) {
  std::uint32_t sum = 0;
  for (const char c : text) {
    const bool is_digit = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
    if (!is_digit) corrupt(where, "has a sum that is not hexadecimal");
    sum = sum << 4 | static_cast<std::uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  return sum;
}

std::uint32_t crc_of(const Json& object, const char* key, const std::string& where) {
  const std::string text = json::string_of(object, key, where);
  if (text.size() != 8) corrupt(where, std::string("'") + key + "' has not 8 digits");
  return crc_in(text, where);
}

// Doubles that JSON cannot hold are spelled out.
Json json_of(const Value& value) {
  if (const auto* number = std::get_if<double>(&value)) {
    if (std::isfinite(*number)) return Json::object({{"float", *number}});
    const char* name = std::isnan(*number) ? "nan" : (*number > 0 ? "inf" : "-inf");
    return Json::object({{"float", name}});
  }
  return std::visit([](const auto& v) { return Json(v); }, value);
}

Value value_of(const Json& value, const std::string& where) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer()) {
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) {
      corrupt(where, "is a number too large");
    }
    return value.get<std::int64_t>();
  }
  if (value.is_object() && value.size() == 1 && value.contains("float")) {
    const Json& number = value["float"];
    if (number.is_number()) return number.get<double>();
    if (number == "nan") return std::nan("");
    if (number == "inf") return HUGE_VAL;
    if (number == "-inf") return -HUGE_VAL;
  }
  corrupt(where, "is neither truth value, number nor string");
}

Json json_of(const Values& values) {
  Json object = Json::object();
  for (const auto& [name, value] : values) object[name] = json_of(value);
  return object;
}

Values values_of(const Json& object, const std::string& where) {
  if (!object.is_object()) corrupt(where, "is not an object");
  Values values;
  for (const auto& [name, value] : object.items()) {
    values[name] = value_of(value, where + " '" + name + "'");
  }
  return values;
}

Json body_of(const Manifest& manifest) {
  Json object;
  object["format"] = kFormat;
  object["version"] = kVersion;
  object["step"] = manifest.step;
  object["world"] = manifest.world;
  object["plan"] = manifest.plan;
  object["chunk_bytes"] = kChunkBytes;
  if (manifest.base) {
    object["base"] = {{"folder", manifest.base->folder}, {"sha256", manifest.base->sha256}};
  }
  object["files"] = Json::array();
  for (const FileRecord& file : manifest.files) {
    Json record = {{"name", file.name}, {"bytes", file.num_bytes}, {"crc32c", hex_of(file.crc)}};
    if (file.header_bytes > 0) {
      record["header_bytes"] = file.header_bytes;
      record["header_crc32c"] = hex_of(file.header_crc);
    }
    object["files"].push_back(std::move(record));
  }
  object["tensors"] = Json::object();
  for (const TensorRecord& tensor : manifest.tensors) {
    Json& record = object["tensors"][tensor.name];
    record["dtype"] = name_of(tensor.dtype);
    record["shape"] = tensor.shape;
    record["regions"] = Json::array();
    for (const RegionRecord& region : tensor.regions) {
      Json part;
      part["file"] = region.file;
      part["offsets"] = region.region.offsets;
      part["lengths"] = region.region.lengths;
      part["bytes"] = std::vector<std::uint64_t>{region.begin, region.end};
      part["crc32c"] = hex_of(region.crc);
      if (region.chunk_crcs.size() > 1) {
        std::string chunks;
        for (const std::uint32_t sum : region.chunk_crcs) chunks += hex_of(sum);
        part["chunks"] = std::move(chunks);
      }
      record["regions"].push_back(std::move(part));
    }
  }
  if (!manifest.deltas.empty()) {
    object["deltas"] = Json::object();
    for (const DeltaRecord& delta : manifest.deltas) {
      Json& record = object["deltas"][delta.name];
      record["dtype"] = name_of(delta.dtype);
      record["shape"] = delta.shape;
      record["pieces"] = Json::array();
      for (const DeltaPiece& piece : delta.pieces) {
        Json part;
        part["rows"] = piece.rows;
        part["values"] = piece.values;
        part["columns"] = std::vector<std::int64_t>{piece.column_begin, piece.column_end};
        record["pieces"].push_back(std::move(part));
      }
    }
  }
  if (!manifest.lists.empty()) {
    object["lists"] = Json::object();
    for (const ListDelta& list : manifest.lists) {
      Json& record = object["lists"][list.name];
      record = {{"rows", list.rows},
                {"groups", list.groups},
                {"changed", list.changed},
                {"runs", list.runs},
                {"removed", list.removed}};
      record["columns"] = Json::object();
      for (const ListDelta::Column& column : list.columns) {
        record["columns"][column.name] = column.values;
      }
    }
  }
  object["values"] = json_of(manifest.values);
  object["rank_values"] = Json::array();
  for (const Values& values : manifest.rank_values)
    object["rank_values"].push_back(json_of(values));
  return object;
}

Dtype dtype_of(const Json& object, const std::string& where) {
  const std::string name = json::string_of(object, "dtype", where);
  for (int i = 0; i <= static_cast<int>(Dtype::kC64); ++i) {
    if (name == name_of(static_cast<Dtype>(i))) return static_cast<Dtype>(i);
  }
  corrupt(where, "has the unknown element type '" + name + "'");
}

RegionRecord region_of(const Json& object, const std::string& where) {
  using namespace tessera::checkpoint::json;
  check_keys(object, {"file", "offsets", "lengths", "bytes", "crc32c", "chunks"}, where);
  RegionRecord record;
  const std::int64_t file = count_of(object, "file", where);
  if (file > INT32_MAX) corrupt(where, "names a file that is not there");
  record.file = static_cast<int>(file);
  record.region.offsets = counts_of(object, "offsets", where);
  record.region.lengths = counts_of(object, "lengths", where);
  const auto range = counts_of(object, "bytes", where);
  if (range.size() != 2 || range[0] > range[1]) corrupt(where, "'bytes' is not a range");
  record.begin = static_cast<std::uint64_t>(range[0]);
  record.end = static_cast<std::uint64_t>(range[1]);
  record.crc = crc_of(object, "crc32c", where);
  const std::uint64_t num_chunks = (record.end - record.begin + kChunkBytes - 1) / kChunkBytes;
  if (num_chunks <= 1) {
    if (object.contains("chunks")) corrupt(where, "has sums of chunks but is one chunk");
    if (num_chunks == 1) record.chunk_crcs.push_back(record.crc);
    return record;
  }
  const std::string chunks = string_of(object, "chunks", where);
  if (chunks.size() % 8 != 0 || chunks.size() / 8 != num_chunks) {
    corrupt(where, "has " + std::to_string(num_chunks) + " chunks but not as many sums");
  }
  std::uint32_t joined = 0;
  for (std::uint64_t i = 0; i < num_chunks; ++i) {
    record.chunk_crcs.push_back(crc_in(std::string_view(chunks).substr(8 * i, 8), where));
    const std::uint64_t left = record.end - record.begin - i * kChunkBytes;
    joined = crc32c_joined(joined, record.chunk_crcs.back(), std::min(left, kChunkBytes));
  }
  if (joined != record.crc) corrupt(where, "has sums of chunks that do not give its own");
  return record;
}

void read_files(const Json& object, Manifest& manifest, const std::string& where) {
  using namespace tessera::checkpoint::json;
  const Json& files = member(object, "files", where);
  if (!files.is_array()) corrupt(where, "'files' is not an array");
  for (const Json& value : files) {
    check_keys(value, {"name", "bytes", "crc32c", "header_bytes", "header_crc32c"}, where);
    FileRecord file;
    file.name = string_of(value, "name", where);
    check_file_name(file.name, where);
    if (file.name == kManifestName) corrupt(where, "lists itself");
    file.num_bytes = static_cast<std::uint64_t>(count_of(value, "bytes", where));
    file.crc = crc_of(value, "crc32c", where);
    if (value.contains("header_bytes")) {
      file.header_bytes = static_cast<std::uint64_t>(count_of(value, "header_bytes", where));
      file.header_crc = crc_of(value, "header_crc32c", where);
      if (file.header_bytes < 8 || file.header_bytes > kMaxHeaderBytes ||
          file.header_bytes > file.num_bytes) {
        corrupt(where, "file " + file.name + " has an impossible header");
      }
    }
    manifest.files.push_back(std::move(file));
  }
}

void read_tensors(const Json& object, Manifest& manifest, const std::string& where) {
  using namespace tessera::checkpoint::json;
  const Json& tensors = member(object, "tensors", where);
  if (!tensors.is_object()) corrupt(where, "'tensors' is not an object");
  for (const auto& [name, value] : tensors.items()) {
    const std::string place = where + ", tensor '" + name + "'";
    check_keys(value, {"dtype", "shape", "regions"}, place);
    TensorRecord tensor;
    tensor.name = name;
    tensor.dtype = dtype_of(value, place);
    tensor.shape = counts_of(value, "shape", place);
    const Json& regions = member(value, "regions", place);
    if (!regions.is_array()) corrupt(place, "'regions' is not an array");
    if (regions.size() > kMaxRegions) corrupt(place, "has more than 4096 regions");
    for (const Json& region : regions) tensor.regions.push_back(region_of(region, place));
    manifest.tensors.push_back(std::move(tensor));
  }
}

void read_deltas(const Json& object, Manifest& manifest, const std::string& where) {
  using namespace tessera::checkpoint::json;
  if (!object.contains("deltas")) return;
  const Json& deltas = object["deltas"];
  if (!deltas.is_object()) corrupt(where, "'deltas' is not an object");
  for (const auto& [name, value] : deltas.items()) {
    const std::string place = where + ", delta '" + name + "'";
    check_keys(value, {"dtype", "shape", "pieces"}, place);
    DeltaRecord delta;
    delta.name = name;
    delta.dtype = dtype_of(value, place);
    delta.shape = counts_of(value, "shape", place);
    const Json& pieces = member(value, "pieces", place);
    if (!pieces.is_array()) corrupt(place, "'pieces' is not an array");
    if (pieces.size() > kMaxRegions) corrupt(place, "has more than 4096 pieces");
    for (const Json& piece : pieces) {
      check_keys(piece, {"rows", "values", "columns"}, place);
      const auto columns = counts_of(piece, "columns", place);
      if (columns.size() != 2) corrupt(place, "'columns' is not a range");
      delta.pieces.push_back({string_of(piece, "rows", place), string_of(piece, "values", place),
                              columns[0], columns[1]});
    }
    manifest.deltas.push_back(std::move(delta));
  }
}

void read_lists(const Json& object, Manifest& manifest, const std::string& where) {
  using namespace tessera::checkpoint::json;
  if (!object.contains("lists")) return;
  const Json& lists = object["lists"];
  if (!lists.is_object()) corrupt(where, "'lists' is not an object");
  for (const auto& [name, value] : lists.items()) {
    const std::string place = where + ", list '" + name + "'";
    check_keys(value, {"rows", "groups", "changed", "runs", "removed", "columns"}, place);
    ListDelta list;
    list.name = name;
    list.rows = count_of(value, "rows", place);
    list.groups = string_of(value, "groups", place);
    list.changed = string_of(value, "changed", place);
    list.runs = string_of(value, "runs", place);
    list.removed = string_of(value, "removed", place);
    const Json& columns = member(value, "columns", place);
    if (!columns.is_object()) corrupt(place, "'columns' is not an object");
    for (const auto& [column, values] : columns.items()) {
      if (!values.is_string()) corrupt(place, "column '" + column + "' does not name its values");
      list.columns.push_back({column, values.get<std::string>()});
    }
    manifest.lists.push_back(std::move(list));
  }
}

Manifest manifest_of(const Json& object, const std::string& where) {
  using namespace tessera::checkpoint::json;
  check_keys(object,
             {"commit", "saved", "job", "format", "version", "step", "world", "plan", "chunk_bytes",
              "base", "files", "tensors", "deltas", "lists", "values", "rank_values", "sha256"},
             where);
  if (string_of(object, "format", where) != kFormat) corrupt(where, "is not a checkpoint's");
  const std::int64_t version = count_of(object, "version", where);
  if (version < 1 || version > kVersion) {
    corrupt(where, "has version " + std::to_string(version) + ", this program reads 1 to " +
                       std::to_string(kVersion));
  }
  if (count_of(object, "chunk_bytes", where) != static_cast<std::int64_t>(kChunkBytes)) {
    corrupt(where, "is summed in chunks of another size");
  }
  Manifest manifest;
  manifest.step = count_of(object, "step", where);
  if (object.contains("commit")) manifest.commit = count_of(object, "commit", where);
  if (object.contains("saved")) manifest.saved = string_of(object, "saved", where);
  if (object.contains("job")) manifest.job = string_of(object, "job", where);
  const std::int64_t world = count_of(object, "world", where);
  if (world < 1 || world > 1'000'000) corrupt(where, "has an impossible world");
  manifest.world = static_cast<int>(world);
  manifest.plan = string_of(object, "plan", where);
  if (object.contains("base")) {
    const Json& base = object["base"];
    check_keys(base, {"folder", "sha256"}, where);
    manifest.base = Base{string_of(base, "folder", where), string_of(base, "sha256", where)};
    check_file_name(manifest.base->folder, where);
  }
  read_files(object, manifest, where);
  read_tensors(object, manifest, where);
  read_deltas(object, manifest, where);
  read_lists(object, manifest, where);
  manifest.values = values_of(member(object, "values", where), where + ", value");
  const Json& ranks = member(object, "rank_values", where);
  if (!ranks.is_array() || (!ranks.empty() && ranks.size() != static_cast<std::size_t>(world))) {
    corrupt(where, "'rank_values' is not one object per rank");
  }
  for (const Json& values : ranks) {
    manifest.rank_values.push_back(values_of(values, where + ", value"));
  }
  return manifest;
}

}  // namespace

const TensorRecord* Manifest::find(const std::string& name) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorRecord& record, const std::string& key) { return record.name < key; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

const DeltaRecord* Manifest::find_delta(const std::string& name) const {
  const auto found = std::lower_bound(
      deltas.begin(), deltas.end(), name,
      [](const DeltaRecord& record, const std::string& key) { return record.name < key; });
  return found != deltas.end() && found->name == name ? &*found : nullptr;
}

std::string encode_manifest(Manifest& manifest) {
  std::string text;
  try {
    text.append(kCommit).append(std::to_string(manifest.commit));
    text.append(",\"saved\":").append(Json(manifest.saved).dump());
    text.append(",\"job\":").append(Json(manifest.job).dump()).append(",\n");
    text.append(body_of(manifest).dump(), 1);  // without its brace
  } catch (const Json::type_error&) {
    throw Error(ErrorKind::kInvalid, "checkpoint: a name or a value is not UTF-8.");
  }
  text.back() = ',';  // instead of the brace that the last line closes
  text += '\n';
  manifest.sha256 = sha256(text);
  return text.append(kTrailer).append(manifest.sha256).append("\"}\n");
}

std::int64_t commit_in(std::string_view beginning) noexcept {
  if (!beginning.starts_with(kCommit)) return 0;
  const std::string_view digits = beginning.substr(kCommit.size());
  std::int64_t commit = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), commit);
  return error == std::errc() && end != digits.data() + digits.size() && commit > 0 ? commit : 0;
}

Manifest decode_manifest(std::string_view text, const std::string& where) {
  constexpr std::size_t kTrailerBytes = kTrailer.size() + 64 + 3;
  if (text.size() > kMaxManifestBytes) corrupt(where, "is larger than 1 GiB");
  if (text.size() <= kTrailerBytes ||
      text.substr(text.size() - kTrailerBytes, kTrailer.size()) != kTrailer ||
      text.substr(text.size() - 3) != "\"}\n") {
    corrupt(where, "does not end with its sum: it is cut short or was never a manifest");
  }
  const std::string_view body = text.substr(0, text.size() - kTrailerBytes);
  const std::string_view stated = text.substr(body.size() + kTrailer.size(), 64);
  const std::string sum = sha256(body);
  if (sum != stated) corrupt(where, "does not have the sum in its last line: it was changed");
  Manifest manifest = manifest_of(json::parse_object(text, where, kMaxManifestValues), where);
  manifest.sha256 = sum;
  check_manifest(manifest, where);
  return manifest;
}

std::string encode_fragment(const Manifest& part) {
  try {
    return body_of(part).dump();
  } catch (const Json::type_error&) {
    throw Error(ErrorKind::kInvalid, "checkpoint: a name or a value is not UTF-8.");
  }
}

Manifest decode_fragment(std::string_view text, const std::string& where) {
  return manifest_of(json::parse_object(text, where, kMaxManifestValues), where);
}

void merge(Manifest& whole, Manifest part) {
  const int first_file = static_cast<int>(whole.files.size());
  for (FileRecord& file : part.files) whole.files.push_back(std::move(file));
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < whole.tensors.size(); ++i) places[whole.tensors[i].name] = i;
  for (TensorRecord& tensor : part.tensors) {
    for (RegionRecord& region : tensor.regions) region.file += first_file;
    const auto found = places.find(tensor.name);
    if (found == places.end()) {
      whole.tensors.push_back(std::move(tensor));
      continue;
    }
    TensorRecord& known = whole.tensors[found->second];
    if (known.dtype != tensor.dtype || known.shape != tensor.shape) {
      std::string text = "checkpoint.save: tensor '";
      text.append(tensor.name).append("' is ").append(name_of(known.dtype)).append(" ");
      text.append(text_of(known.shape)).append(" on one rank and ").append(name_of(tensor.dtype));
      text.append(" ").append(text_of(tensor.shape)).append(" on another.");
      throw Error(ErrorKind::kInvalid, text);
    }
    for (RegionRecord& region : tensor.regions) known.regions.push_back(std::move(region));
  }
  for (DeltaRecord& delta : part.deltas) {
    const auto found = std::find_if(whole.deltas.begin(), whole.deltas.end(),
                                    [&](const DeltaRecord& d) { return d.name == delta.name; });
    if (found == whole.deltas.end()) {
      whole.deltas.push_back(std::move(delta));
      continue;
    }
    for (DeltaPiece& piece : delta.pieces) found->pieces.push_back(std::move(piece));
  }
  for (ListDelta& list : part.lists) {
    const bool is_known = std::any_of(whole.lists.begin(), whole.lists.end(),
                                      [&](const ListDelta& l) { return l.name == list.name; });
    if (!is_known) whole.lists.push_back(std::move(list));
  }
  std::sort(whole.lists.begin(), whole.lists.end(), by_name);
  std::sort(whole.tensors.begin(), whole.tensors.end(), by_name);
  std::sort(whole.deltas.begin(), whole.deltas.end(), by_name);
}

}  // namespace tessera::checkpoint
