// dlrm/click_log.h — samples of a click log, by number. No LibTorch.
//
// A sample is a label (clicked or not), dense numbers, and a bag of ids per feature. Every source
// of samples (synthetic.h, criteo.h, click_file.h) is a ClickLog; batch.h makes tensors of it.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/export.h"
#include "trainer/data_error.h"

namespace tessera::workloads::dlrm {

using trainer::DataError;

/// A sparse feature: a bag of ids per sample, each in [0, num_rows), or any 64 bits if its table
/// grows.
struct Feature {
  std::string name;
  std::int64_t num_rows = 0;  // 0: the table grows
  /// Ids per sample, 0 if it varies.
  std::int64_t bag_size = 1;
  /// Rows of a bag are averaged; otherwise added up.
  bool means = false;
  /// Columns of its table; 0: as many as the others have.
  std::int64_t dim = 0;

  bool grows() const { return num_rows == 0; }
  std::int64_t dim_or(std::int64_t others) const { return dim > 0 ? dim : others; }
  bool operator==(const Feature&) const = default;
};

struct ClickSchema {
  std::int64_t num_dense = 13;
  std::vector<Feature> features;
  std::vector<std::string> dense_names = {};  // one per dense number, or none
  std::string origin = {};                    // the schema that made the log, in TOML, or nothing

  bool operator==(const ClickSchema&) const = default;
};

/// Whether a table of one of them grows.
TESSERA_API bool any_grows(const ClickSchema& schema);

/// Features "<prefix>0", "<prefix>1", …, all alike.
TESSERA_API std::vector<Feature> equal_features(std::int64_t count, std::int64_t num_rows,
                                                std::int64_t bag_size = 1,
                                                const std::string& prefix = "cat_");

/// Samples in a row, laid out as a KeyedJaggedTensor wants them.
struct SampleBlock {
  std::int64_t num_samples = 0;
  std::vector<float> labels;          // [samples], 0 or 1
  std::vector<float> dense;           // [samples, num_dense]
  std::vector<std::int32_t> lengths;  // [features, samples]
  std::vector<std::int64_t> ids;      // feature by feature, sample by sample
};

/// Samples by number. Immutable once made; `read` is safe from several threads.
class TESSERA_API ClickLog {
 public:
  virtual ~ClickLog() = default;

  virtual const ClickSchema& schema() const noexcept = 0;

  /// How many there are; -1 for a log without end.
  virtual std::int64_t num_samples() const noexcept = 0;

  /// Fills `block` with the samples [first, first + count), reusing its memory. Any rank may read
  /// any sample. Throws DataError past the end.
  virtual void read(std::int64_t first, std::int64_t count, SampleBlock& block) const = 0;

  /// Fills `block` with these samples, in this order. Throws DataError for one past the end.
  virtual void gather(std::span<const std::int64_t> samples, SampleBlock& block) const;

  /// Says that these samples will be read soon. A log on a disk begins to fetch them and returns
  /// without waiting; the others do nothing. Samples past the end are left out.
  virtual void expect(std::int64_t first, std::int64_t count) const;
};

/// Throws DataError beginning with `name` unless the log holds the samples [first, first + count).
void check_range(const ClickLog& log, std::int64_t first, std::int64_t count,
                 const std::string& name);

}  // namespace tessera::workloads::dlrm
