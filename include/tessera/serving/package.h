// tessera/serving/package.h — a trained model as a folder that is ready to serve. No LibTorch, no
// Python, no ranks.
//
//   pkg/MANIFEST.json               files, tensors and their sums; written last
//       model.json                  inputs, features, tables, dense layers, where it comes from
//       dense.safetensors           weights of the dense layers, float32
//       tables-<n>.safetensors      rows of table n, uint8 [rows, row bytes]: mapped, not read
//       ids-<n>.safetensors         of a table that grows: the ids of its rows, int64
//
// A package holds no code. It appears whole or not at all.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"
#include "tessera/core/export.h"
#include "tessera/embedding/quantised_rows.h"

namespace tessera::serving {

/// One table of a model; `columns` numbers a row.
struct TableInfo {
  std::string name;
  embedding::RowType type = embedding::RowType::kFp32;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  std::int64_t row_bytes = 0;
  /// The table of a run with `--ids unlimited`: row i is that of any 64-bit id, and the package
  /// says which. Behind them lie two rows for ids without one: what was trained for them, and
  /// zeros.
  bool is_growing = false;
  bool trains_unknown = false;  // whether the first of the two was trained

  std::int64_t stored_rows() const noexcept { return num_rows + (is_growing ? 2 : 0); }
};

/// What an id without a row reads, in tables that grow.
enum class UnknownIds : std::uint8_t {
  kDefault,  // as in training: the row that was trained for them, or zeros
  kZero,
};

/// A bag of ids per sample, looked up in a table and pooled.
struct FeatureInfo {
  std::string name;
  std::size_t table = 0;
  bool is_mean = false;
};

enum class Interaction : std::uint8_t { kDot, kCross };

/// What a package holds: DLRM's graph, dense → bottom → interaction with the embeddings → top →
/// sigmoid.
struct ModelInfo {
  std::string name = "dlrm";
  std::int64_t step = 0;
  std::int64_t num_dense = 0;
  std::vector<FeatureInfo> features;  // in the order of the interaction
  std::vector<TableInfo> tables;
  std::vector<std::int64_t> bottom;  // widths, the inputs first
  std::vector<std::int64_t> top;
  Interaction interaction = Interaction::kDot;
  std::int64_t cross_layers = 0;
  std::int64_t cross_rank = 0;
  bool has_half_outputs = false;  // servers answer in FP16 unless asked for FP32
  std::string source;             // SHA-256 of the checkpoint's manifest
};

/// What happens to rows whose numbers, scale or bias their type cannot hold.
enum class OnOverflow : std::uint8_t {
  kError,
  kClamp,
  kBf16,  // the whole table becomes bf16
};

struct ExportOptions {
  embedding::RowType type = embedding::RowType::kInt8;
  std::map<std::string, embedding::RowType> tables;  // by name, where it differs
  std::int64_t alignment = 4;
  OnOverflow on_overflow = OnOverflow::kError;
  bool has_half_outputs = false;  // see ModelInfo
  /// Takes runs that began unknown ids with numbers of their own (`--id-default init`); servers
  /// read zeros.
  bool zeroes_unknown = false;
  /// Names of features in their order, for checkpoints that do not say; empty: the checkpoint's.
  std::vector<std::string> features;
};

/// What rounding did to one table. Errors are |row - rounded row| / |row|, Euclidean.
struct TableReport {
  TableInfo table;
  std::int64_t bytes_before = 0;
  std::int64_t bytes_after = 0;
  double mean_error = 0;
  double worst_error = 0;
  std::int64_t worst_row = -1;
  std::int64_t num_constant = 0;  // rows whose numbers differ by too little for a scale
  std::int64_t num_clamped = 0;
  bool is_raised = false;  // to bf16, for rows that the type could not hold
};

struct ExportReport {
  ModelInfo model;
  std::vector<TableReport> tables;
  std::int64_t bytes_before = 0;  // tables and dense layers
  std::int64_t bytes_after = 0;
};

/// May refuse a package that is whole, and lies in `folder` until it takes its name, by throwing.
/// What it writes into the folder it removes again.
using PackageJudge = std::function<void(const std::string& folder, const ExportReport& report)>;

/// Writes the model of a checkpoint of `tessera train dlrm` as a package to `path`, table by table,
/// in memory of a few chunks; one that is there is replaced in one step, once `judge` has let the
/// new one pass. Throws checkpoint::Error: kInvalid for a checkpoint that holds no such model and
/// for rows that cannot be kept, naming table and row; kWrite; and what `judge` throws. What was
/// there is as it was then. An export that was killed has left a folder `path`.tmp-<16 digits>,
/// which the next one removes.
TESSERA_API ExportReport write_package(const checkpoint::Reader& reader, const std::string& path,
                                       const ExportOptions& options = {},
                                       const PackageJudge& judge = {});

/// Address space behind the rows of a table, in which nothing lies yet.
struct SpareSpace {
  std::uint8_t* begin = nullptr;  // of a page
  std::size_t num_bytes = 0;
};

/// An open package: its tables are mapped, its dense weights are in memory.
class TESSERA_API Package {
 public:
  /// Checks the manifest, the sizes and headers of all files, the model's description against them
  /// and the sums of the dense weights; with `verifies` those of the tables too. Throws
  /// checkpoint::Error naming the file and what is wrong with it. Keeps address space for
  /// `spare_copies` more of each table behind it.
  explicit Package(const std::string& path, bool verifies = false, int spare_copies = 0);
  Package(const Package&) = delete;
  Package& operator=(const Package&) = delete;
  ~Package();

  /// Compares the rows of all tables with their sums, those of the files that were opened. Throws
  /// checkpoint::Error naming the file and the place. False if `goes_on` ended it early.
  bool verify(const std::function<bool()>& goes_on = {}) const;

  const std::string& path() const noexcept;
  const ModelInfo& model() const noexcept;
  const std::string& sha256() const noexcept;  // of its manifest
  /// Rows of table `table`, which live as long as this.
  embedding::RowTable table(std::size_t table) const;
  SpareSpace spare(std::size_t table) const noexcept;
  /// The ids of a growing table's rows, in their order. Throws checkpoint::Error.
  std::vector<std::int64_t> ids(std::size_t table) const;
  /// Numbers of a dense tensor, such as "bottom.layer_0.weight".
  std::span<const float> dense(const std::string& name) const;
  std::int64_t mapped_bytes() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::serving
