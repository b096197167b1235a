#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoint/open_file.h"
#include "serving/model_info.h"
#include "serving/published_rows.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/serving/package.h"

namespace tessera::serving {
namespace {

using checkpoint::Dtype;
using checkpoint::Error;
using checkpoint::ErrorKind;
using checkpoint::Manifest;
using checkpoint::Part;
using checkpoint::Reader;
using checkpoint::TensorInfo;
using embedding::RowType;

constexpr std::int64_t kReadBytes = std::int64_t{8} << 20;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::kInvalid, "export: " + what);
}

const TensorInfo& needed(const Reader& reader, const std::string& name, std::size_t num_dims) {
  const TensorInfo* found = reader.find(name);
  if (found == nullptr) {
    refuse(reader.folder() + " has no tensor '" + name +
           "': it is not a checkpoint of tessera train dlrm.");
  }
  const bool is_float =
      found->dtype == Dtype::kF32 || found->dtype == Dtype::kF16 || found->dtype == Dtype::kBf16;
  if (!is_float || found->shape.size() != num_dims) {
    refuse("tensor '" + name + "' of " + reader.folder() + " is " +
           checkpoint::name_of(found->dtype) + " " + checkpoint::text_of(found->shape) +
           "; numbers with " + std::to_string(num_dims) + " dimensions are needed.");
  }
  return *found;
}

std::vector<std::int64_t> widths_of(const Reader& reader, const std::string& name) {
  std::vector<std::int64_t> widths;
  for (int i = 0;; ++i) {
    const std::string tensor = name + ".layer_" + std::to_string(i) + kWeightSuffix;
    if (i > 0 && reader.find(tensor) == nullptr) return widths;
    const TensorInfo& weight = needed(reader, tensor, 2);
    if (i == 0) widths.push_back(weight.shape[1]);
    widths.push_back(weight.shape[0]);
  }
}

// The number at the end of a name, -1 without one.
std::int64_t number_in(const std::string& name) {
  const std::size_t digits = name.find_last_not_of("0123456789") + 1;
  const std::string number = name.substr(digits);
  return number.empty() || number.size() > 9 ? -1 : std::stoll(number);
}

// A text among the values of a checkpoint; empty if it is not there.
std::string text_in(const Reader& reader, const std::string& key) {
  const auto& values = reader.manifest().values;
  const auto stored = values.find(key);
  const auto* text = stored == values.end() ? nullptr : std::get_if<std::string>(&stored->second);
  return text == nullptr ? "" : *text;
}

// The names of a list among the values of a checkpoint.
std::vector<std::string> names_in(const Reader& reader, const std::string& key) {
  std::vector<std::string> names;
  const auto list = nlohmann::json::parse(text_in(reader, key), nullptr,
                                          /*allow_exceptions=*/false);
  for (const auto& name : list.is_array() ? list : nlohmann::json::array()) {
    names.push_back(name.is_string() ? name.get<std::string>() : "");
  }
  return names;
}

// The layer that makes the rows of a narrower or wider table as wide as the model, if there is one.
const TensorInfo* projection_of(const Reader& reader, std::size_t feature) {
  return reader.find("model.projection_" + std::to_string(feature) + kWeightSuffix);
}

// Whether a table grows, and what ids without a row read there.
void look_for_ids(const Reader& reader, const ExportOptions& options, TableInfo& table) {
  const std::string name = kTablePrefix + table.name;
  const TensorInfo* ids = reader.find(name + kIdsSuffix);
  if (ids == nullptr) return;
  if (ids->dtype != Dtype::kI64 || ids->shape != std::vector<std::int64_t>{table.num_rows}) {
    refuse("tensor '" + ids->name + "' of " + reader.folder() + " does not name an id per row.");
  }
  table.is_growing = true;
  table.trains_unknown = reader.find(name + kUnknownSuffix) != nullptr;
  if (text_in(reader, "id_default") == "init" && !options.zeroes_unknown) {
    refuse(
        "unknown ids began with numbers of their own in this training (--id-default init), and "
        "servers read one row or zeros for them. Say --unknown zero.");
  }
}

std::vector<std::string> features_of(const Reader& reader, const ExportOptions& options) {
  std::vector<std::string> tables;
  for (const TensorInfo& tensor : reader.tensors()) {
    const std::string& name = tensor.name;
    if (!name.starts_with(kTablePrefix) || !name.ends_with(kWeightSuffix)) continue;
    const std::size_t begin = std::strlen(kTablePrefix);
    tables.push_back(name.substr(begin, name.size() - begin - std::strlen(kWeightSuffix)));
  }
  if (tables.empty()) {
    refuse(reader.folder() + " has no tables: it is not a checkpoint of tessera train dlrm.");
  }
  std::vector<std::string> names = options.features;
  if (names.empty()) names = names_in(reader, "features");
  if (names.empty()) {
    // The tables of a generated log and of Criteo's are numbered.
    names = tables;
    std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
      return number_in(a) < number_in(b);
    });
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (number_in(names[i]) != static_cast<std::int64_t>(i)) {
        refuse(reader.folder() +
               " does not say in which order its features are mixed. Name them all with "
               "--features a,b,c, in the order of the training data.");
      }
    }
    return names;
  }
  std::vector<std::string> sorted = names;
  std::sort(sorted.begin(), sorted.end());
  std::sort(tables.begin(), tables.end());
  if (sorted != tables) {
    refuse("the names of " + std::to_string(names.size()) + " features are not those of the " +
           std::to_string(tables.size()) + " tables of " + reader.folder() + ".");
  }
  return names;
}

ModelInfo model_of(const Reader& reader, const ExportOptions& options) {
  ModelInfo model;
  model.step = reader.manifest().step;
  model.source = reader.manifest().sha256;
  model.has_half_outputs = options.has_half_outputs;
  model.bottom = widths_of(reader, "model.bottom");
  model.top = widths_of(reader, "model.top");
  model.num_dense = model.bottom.front();
  while (reader.find("model.cross.down_" + std::to_string(model.cross_layers) + kWeightSuffix)) {
    ++model.cross_layers;
  }
  if (model.cross_layers > 0) {
    model.interaction = Interaction::kCross;
    model.cross_rank = needed(reader, "model.cross.down_0.weight", 2).shape[0];
  }
  for (const auto& [name, type] : options.tables) {
    if (reader.find(kTablePrefix + name + kWeightSuffix) == nullptr) {
      refuse("there is no table '" + name + "' to store as " +
             std::string(embedding::name_of(type)) + ".");
    }
  }
  const std::vector<std::string> averaged = names_in(reader, "mean_features");
  for (const std::string& name : features_of(reader, options)) {
    const TensorInfo& weight = needed(reader, kTablePrefix + name + kWeightSuffix, 2);
    TableInfo table;
    table.name = name;
    const auto own = options.tables.find(name);
    table.type = own == options.tables.end() ? options.type : own->second;
    table.num_rows = weight.shape[0];
    const TensorInfo* projection = projection_of(reader, model.tables.size());
    table.num_columns = projection == nullptr ? weight.shape[1] : projection->shape[0];
    table.row_bytes = embedding::row_bytes(table.type, table.num_columns, options.alignment);
    look_for_ids(reader, options, table);
    const bool is_mean = std::find(averaged.begin(), averaged.end(), name) != averaged.end();
    model.features.push_back({name, model.tables.size(), is_mean});
    model.tables.push_back(std::move(table));
  }
  try {
    decode_model(encode_model(model), reader.folder());  // the checks of a reader
  } catch (const Error& error) {
    refuse(error.what());
  }
  return model;
}

// What a row's type holds without overflow, a little inside.
float largest_of(RowType type) {
  switch (type) {
    case RowType::kFp32:
    case RowType::kBf16:
      return 3.38e38F;
    case RowType::kFp8:
      return 65504.0F * 448.0F;
    default:
      return 65504.0F;  // and the range of a row, 2 * 65504 / 3, stays below it
  }
}

// What ids without a row read, if it was trained.
std::vector<float> unknown_numbers(const Reader& reader, const TableInfo& table,
                                   std::int64_t width) {
  if (!table.trains_unknown) return {};
  const TensorInfo& row = needed(reader, kTablePrefix + table.name + kUnknownSuffix, 2);
  if (row.shape != std::vector<std::int64_t>{1, width}) {
    refuse("tensor '" + row.name + "' of " + reader.folder() + " is not a row.");
  }
  return read_numbers(reader, row, 0, 1);
}

// A table whose rows its type cannot hold, and which may have another one.
struct RowsOverflow {};

// Makes the rows of a table in the order in which they are written.
class RowMaker {
 public:
  RowMaker(const Reader& reader, std::size_t feature, TableReport& report, OnOverflow on_overflow)
      : reader_(reader),
        tensor_(needed(reader, kTablePrefix + report.table.name + kWeightSuffix, 2)),
        report_(report),
        on_overflow_(on_overflow) {
    const TensorInfo* projection = projection_of(reader, feature);
    if (projection == nullptr) return;
    needed(reader, projection->name, 2);
    if (projection->shape[1] != tensor_.shape[1]) {
      refuse("tensor '" + projection->name + "' takes " + std::to_string(projection->shape[1]) +
             " columns, table '" + report.table.name + "' has " + std::to_string(tensor_.shape[1]) +
             ".");
    }
    projection_ = read_numbers(reader, *projection, 0, projection->shape[0]);
  }

  void fill(std::span<std::byte> out) {
    while (!out.empty()) {
      if (place_ == made_.size()) make();
      const std::size_t count = std::min(out.size(), made_.size() - place_);
      std::memcpy(out.data(), made_.data() + place_, count);
      place_ += count;
      out = out.subspan(count);
    }
  }

 private:
  void make() {
    const TableInfo& table = report_.table;
    const std::int64_t most = std::max<std::int64_t>(1, kReadBytes / (4 * table.num_columns));
    std::int64_t count = std::min(most, table.num_rows - next_row_);
    std::vector<float> numbers;
    if (count > 0) {
      numbers = read_numbers(reader_, tensor_, next_row_, count);
    } else {
      count = table.stored_rows() - table.num_rows;
      numbers = unknown_numbers(reader_, table, tensor_.shape[1]);
      numbers.resize(static_cast<std::size_t>(count * tensor_.shape[1]));
    }
    if (!projection_.empty()) numbers = projected(numbers, count);
    made_.assign(static_cast<std::size_t>(count * table.row_bytes), 0);
    place_ = 0;
    const auto width = static_cast<std::size_t>(table.num_columns);
    std::vector<float> back(width);
    for (std::int64_t r = 0; r < count; ++r) {
      make_row(std::span(numbers).subspan(static_cast<std::size_t>(r) * width, width),
               made_.data() + r * table.row_bytes, back, next_row_ + r);
    }
    next_row_ += count;
  }

  // Sums and means of rows are then those of the model: the layer is linear.
  std::vector<float> projected(const std::vector<float>& rows, std::int64_t count) const {
    const auto from = static_cast<std::size_t>(tensor_.shape[1]);
    const auto to = static_cast<std::size_t>(report_.table.num_columns);
    std::vector<float> out;
    out.reserve(static_cast<std::size_t>(count) * to);
    for (std::size_t r = 0; r < static_cast<std::size_t>(count); ++r) {
      for (std::size_t c = 0; c < to; ++c) {
        double sum = 0;
        for (std::size_t i = 0; i < from; ++i) {
          sum += static_cast<double>(projection_[c * from + i]) * rows[r * from + i];
        }
        out.push_back(static_cast<float>(sum));
      }
    }
    return out;
  }

  void make_row(std::span<float> numbers, std::uint8_t* row, std::vector<float>& back,
                std::int64_t number) {
    const RowType type = report_.table.type;
    embedding::RowFaults faults = embedding::quantise_row(type, numbers, row);
    if (faults.has_nan) refuse_row(number, "holds a NaN");
    if (faults.is_overflow) {
      if (on_overflow_ == OnOverflow::kBf16) throw RowsOverflow{};
      if (on_overflow_ == OnOverflow::kError) {
        refuse_row(number, "holds numbers that " + std::string(embedding::name_of(type)) +
                               " cannot, and --on-overflow is error. Say clamp, or bf16 for "
                               "the whole table");
      }
      ++report_.num_clamped;
      const float most = largest_of(type);
      for (float& x : numbers) x = std::clamp(x, -most, most);
      faults = embedding::quantise_row(type, numbers, row);
      if (faults.is_overflow) refuse_row(number, "cannot be clamped");
    }
    if (faults.is_constant) ++report_.num_constant;
    embedding::dequantise_row(type, row, back);
    double lost = 0;
    double whole = 0;
    for (std::size_t c = 0; c < numbers.size(); ++c) {
      const double difference = static_cast<double>(numbers[c]) - back[c];
      lost += difference * difference;
      whole += static_cast<double>(numbers[c]) * numbers[c];
    }
    const double error = whole > 0 ? std::sqrt(lost / whole) : (lost > 0 ? 1.0 : 0.0);
    report_.mean_error += error / static_cast<double>(report_.table.num_rows);
    if (report_.worst_row < 0 || error > report_.worst_error) {
      report_.worst_error = error;
      report_.worst_row = number;
    }
  }

  [[noreturn]] void refuse_row(std::int64_t number, const std::string& what) const {
    refuse("row " + std::to_string(number) + " of table '" + report_.table.name + "' " + what +
           ".");
  }

  const Reader& reader_;
  const TensorInfo& tensor_;
  TableReport& report_;
  OnOverflow on_overflow_;
  std::vector<float> projection_;  // [columns of the model, columns of the table], or nothing
  std::vector<std::uint8_t> made_;
  std::size_t place_ = 0;
  std::int64_t next_row_ = 0;
};

// The ids of a table's rows, read as they are written.
Part ids_part(const Reader& reader, const TableInfo& table) {
  Part part;
  part.name = "tables." + table.name + kIdsSuffix;
  part.dtype = Dtype::kI64;
  part.shape = {table.num_rows};
  part.region = {{0}, part.shape};
  part.fill = [&reader, name = kTablePrefix + table.name + kIdsSuffix](std::uint64_t begin,
                                                                       std::span<std::byte> out) {
    const auto first = static_cast<std::int64_t>(begin / sizeof(std::int64_t));
    const auto count = static_cast<std::int64_t>(out.size() / sizeof(std::int64_t));
    reader.read(name, {{first}, {count}}, out.data());
  };
  return part;
}

// A folder that takes its final name in one step. Until then it has a name that nobody else has,
// and is locked, so that others see whether its process lives.
class PendingPackage {
 public:
  explicit PendingPackage(std::string path) : target_(std::move(path)) {
    while (target_.size() > 1 && target_.back() == '/') target_.pop_back();
    if (target_.empty()) refuse("the package has no name.");
    look_at_target();
    const auto parent = std::filesystem::path(target_).parent_path();
    parent_ = parent.empty() ? "." : parent.string();
    std::error_code ignored;
    std::filesystem::create_directories(parent_, ignored);
    remove_left_behind();
    make_folder();
  }
  PendingPackage(const PendingPackage&) = delete;
  PendingPackage& operator=(const PendingPackage&) = delete;
  ~PendingPackage() { checkpoint::remove_folder(path_, disk_); }  // what has no final name

  const std::string& path() const { return path_; }

  void add(Manifest& whole, const std::vector<Part>& parts, const std::string& name) {
    Manifest part = checkpoint::write_shard(path_, 0, 1, parts, disk_);
    for (checkpoint::FileRecord& file : part.files) {
      if (disk_.rename(path_ + "/" + file.name, path_ + "/" + name) != 0) {
        checkpoint::throw_write_error("rename to", path_ + "/" + name);
      }
      file.name = name;
    }
    checkpoint::merge(whole, std::move(part));
  }

  // Removes what an `add` that threw has left.
  void discard() const {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (!entry.path().filename().string().starts_with("shard-")) continue;
      std::error_code ignored;
      std::filesystem::remove(entry.path(), ignored);
    }
  }

  void add_text(Manifest& whole, const std::string& text, const std::string& name) {
    write(text, name);
    whole.files.push_back({.name = name,
                           .num_bytes = text.size(),
                           .crc = checkpoint::crc32c(text.data(), text.size())});
  }

  // From here on it can be opened where it is.
  void finish(Manifest& manifest) {
    checkpoint::check_manifest(manifest, "export");
    write(checkpoint::encode_manifest(manifest), checkpoint::kManifestName);
    if (disk_.sync_folder(path_) != 0) checkpoint::throw_write_error("sync", path_);
  }

  void commit() {
    look_at_target();  // it may have come or gone meanwhile
    const int result = has_old_ ? disk_.exchange(path_, target_) : disk_.rename(path_, target_);
    if (result != 0) checkpoint::throw_write_error("rename to", target_);
    if (disk_.sync_folder(parent_) != 0) checkpoint::throw_write_error("sync", parent_);
  }

 private:
  static constexpr std::string_view kPending = ".tmp-";
  static constexpr std::size_t kNumDigits = 16;

  void look_at_target() {
    struct stat facts{};
    has_old_ = ::lstat(target_.c_str(), &facts) == 0;
    if (!has_old_) return;
    try {
      const Manifest old = checkpoint::read_manifest(target_, disk_);
      if (old.values.contains(kPackageMark)) return;
    } catch (const Error&) {
      std::error_code error;
      if (std::filesystem::is_empty(target_, error) && !error) return;
    }
    refuse(target_ + " is there and is not a package. Name another folder.");
  }

  // A folder that can be locked is nobody's any more.
  static int lock(const std::string& path, int how) {
    const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0 || ::flock(folder, how) == 0) return folder;
    ::close(folder);
    return -1;
  }

  // Of exports that were killed.
  void remove_left_behind() {
    const std::string stem =
        std::filesystem::path(target_).filename().string() + std::string(kPending);
    std::vector<std::string> names;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(parent_, ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(stem) && name.size() == stem.size() + kNumDigits &&
          name.find_first_not_of("0123456789abcdef", stem.size()) == std::string::npos) {
        names.push_back(parent_ + "/" + name);
      }
    }
    for (const std::string& name : names) {
      const checkpoint::Descriptor folder(disk_, lock(name, LOCK_EX | LOCK_NB));
      if (folder.get() >= 0) checkpoint::remove_folder(name, disk_);
    }
  }

  void make_folder() {
    for (int attempt = 0; attempt < 100; ++attempt) {
      char digits[kNumDigits + 1];
      std::snprintf(digits, sizeof(digits), "%016llx",
                    static_cast<unsigned long long>(disk_.random()));
      path_ = target_ + std::string(kPending) + digits;
      if (disk_.make_folder(path_) != 0) checkpoint::throw_write_error("make the folder", path_);
      lock_.emplace(disk_, lock(path_, LOCK_EX));
      // Another export may have taken it for left behind before it was locked.
      struct stat facts{};
      if (::lstat(path_.c_str(), &facts) == 0) return;
    }
    checkpoint::throw_write_error("make the folder", path_);
  }

  void write(const std::string& text, const std::string& name) {
    checkpoint::FileWriter writer(disk_, path_ + "/" + name);
    writer.write(text);
    writer.finish();
  }

  checkpoint::Disk& disk_ = checkpoint::Disk::real();
  std::string target_;
  std::string parent_;
  std::string path_;
  std::optional<checkpoint::Descriptor> lock_;
  bool has_old_ = false;
};

}  // namespace

ExportReport write_package(const Reader& reader, const std::string& path,
                           const ExportOptions& options, const PackageJudge& judge) {
  ExportReport report;
  report.model = model_of(reader, options);
  PendingPackage folder(path);
  Manifest manifest;
  manifest.step = report.model.step;
  manifest.values[kPackageMark] = kPackageVersion;

  std::vector<std::vector<float>> numbers;
  std::vector<Part> dense;
  for (const auto& [name, shape] : dense_tensors(report.model)) {
    const TensorInfo& tensor = needed(reader, "model." + name, shape.size());
    if (tensor.shape != shape) {
      refuse("tensor 'model." + name + "' has shape " + checkpoint::text_of(tensor.shape) +
             "; the layers around it ask for " + checkpoint::text_of(shape) + ".");
    }
    numbers.push_back(read_numbers(reader, tensor, 0, shape[0]));
    for (const float x : numbers.back()) {
      if (!std::isfinite(x))
        refuse("tensor 'model." + name + "' holds a number that is not finite.");
    }
    Part part;
    part.name = name;
    part.shape = shape;
    part.region = {std::vector<std::int64_t>(shape.size(), 0), shape};
    part.data = reinterpret_cast<const std::byte*>(numbers.back().data());
    report.bytes_before += static_cast<std::int64_t>(4 * numbers.back().size());
    report.bytes_after += static_cast<std::int64_t>(4 * numbers.back().size());
    dense.push_back(std::move(part));
  }
  folder.add(manifest, dense, "dense.safetensors");

  for (std::size_t i = 0; i < report.model.tables.size(); ++i) {
    TableReport table;
    table.table = report.model.tables[i];
    table.bytes_before = 4 * table.table.num_rows * table.table.num_columns;
    const auto add_rows = [&](OnOverflow on_overflow) {
      RowMaker maker(reader, i, table, on_overflow);
      Part part;
      part.name = "tables." + table.table.name + kWeightSuffix;
      part.dtype = Dtype::kU8;
      part.shape = {table.table.stored_rows(), table.table.row_bytes};
      part.region = {{0, 0}, part.shape};
      part.fill = [&maker](std::uint64_t, std::span<std::byte> out) { maker.fill(out); };
      folder.add(manifest, {part}, "tables-" + std::to_string(i) + ".safetensors");
    };
    try {
      add_rows(options.on_overflow);
    } catch (const RowsOverflow&) {
      folder.discard();
      TableInfo& info = report.model.tables[i];
      info.type = RowType::kBf16;
      info.row_bytes = embedding::row_bytes(info.type, info.num_columns, options.alignment);
      table = {};
      table.table = info;
      table.is_raised = true;
      table.bytes_before = 4 * info.num_rows * info.num_columns;
      add_rows(OnOverflow::kError);
    }
    table.bytes_after = table.table.stored_rows() * table.table.row_bytes;
    if (table.table.is_growing) {
      table.bytes_after += 8 * table.table.num_rows;
      folder.add(manifest, {ids_part(reader, table.table)},
                 "ids-" + std::to_string(i) + ".safetensors");
    }
    report.bytes_before += table.bytes_before;
    report.bytes_after += table.bytes_after;
    report.tables.push_back(std::move(table));
  }
  folder.add_text(manifest, encode_model(report.model), kModelFile);
  folder.finish(manifest);
  if (judge) judge(folder.path(), report);
  folder.commit();
  return report;
}

}  // namespace tessera::serving
