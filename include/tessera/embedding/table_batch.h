// tessera/embedding/table_batch.h — looks up many tables in one call.
//
// The ids of all features lie behind each other, feature by feature, and in each feature sample by
// sample. One call reads the rows of all features from their tables and pools them; backward either
// hands out gradients or, fused, steps the rows at once and never stores a gradient.
//
// Results do not depend on the number of threads. Rows that occur several times are summed in the
// order of the ids. Nothing here communicates.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/optimizer.h"

namespace tessera::embedding {

/// Where the gradients of the rows go.
enum class GradientForm : std::uint8_t {
  kDense,   // into `weight.grad()`, as large as the table
  kSparse,  // into `weight.grad()`, a sparse tensor of the rows looked up; further passes add to it
  kFused,   // nowhere: backward steps the rows
};

/// One table. The weights are shared, not copied.
struct Table {
  std::string name;
  /// [rows, columns], contiguous; float32, float16 or bfloat16; any number of columns.
  at::Tensor weight;
  /// For `pooled`; `sequence` does not read it.
  PoolingType pooling = PoolingType::kSum;
  /// Rows that a cache in the GPU's memory has room for; 0: there is none. The weight must lie in
  /// host memory (`mapped_rows`), and the gradients must be fused.
  std::int64_t cached_rows = 0;
};

/// Which rows leave a cache first: those not used for longest, or those that the fewest calls used
/// since they came.
enum class CachePolicy : std::uint8_t { kLru, kLfu };

/// What the cache of one table did.
struct RowCacheStatistics {
  std::string table;
  std::int64_t num_rows = 0;     // of the table
  std::int64_t cached_rows = 0;  // room for so many
  std::int64_t num_calls = 0;
  std::int64_t num_found = 0;   // different rows of a call that were there, over all calls
  std::int64_t num_loaded = 0;  // those that were not
  std::int64_t num_grown = 0;   // how often a batch did not fit
};

/// One key of the input and the table it is looked up in. Several features may share a table.
struct Feature {
  std::string name;
  std::int64_t table = 0;
};

/// Ids of all features. Tensors are contiguous, 1-D and on the device of the tables.
struct LookupInput {
  /// int32 or int64.
  at::Tensor ids;
  /// Where each sample's ids begin, and the end of the last: feature-major, from 0 to the number of
  /// ids, int32 or int64, one more than there are samples over all features.
  at::Tensor offsets;
  /// float32, one per id; undefined means 1. Its gradient is computed if it asks for one.
  at::Tensor weights = {};
  /// Samples of each feature. Empty: all features have equally many.
  std::vector<std::int64_t> batch_sizes = {};
};

/// Takes the gradients of a backward pass, one entry per table.
using RowGradientSink = std::function<void(std::vector<RowGradient>)>;

struct TableBatchOptions {
  GradientForm gradients = GradientForm::kDense;
  /// Read if the gradients are fused.
  OptimizerOptions optimizer = {};
  /// On CUDA, kFatal waits for the device.
  BoundsCheckMode bounds_check = BoundsCheckMode::kFatal;
  CachePolicy cache_policy = CachePolicy::kLru;
  /// kSparse: gets the gradients of every backward pass in place of `weight.grad()`. It is called
  /// also if no row was looked up.
  RowGradientSink sink = {};
};

/// Features [begin, end) of a batch of tables.
struct FeatureRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Makes the memory of a 1-D result of so many float32 on the CPU.
using RowMemory = std::function<at::Tensor(std::int64_t size)>;

/// Pooled rows, and what can be done ahead for their backward pass.
struct PreparedRows {
  at::Tensor rows;
  /// Reads the rows of one more feature that was left for later, and returns true; false if none is
  /// left. They go to `output`, float32, contiguous, which begins with the first such feature; the
  /// part of `rows` that is theirs is never written. To be done before backward. Null if nothing
  /// was left.
  std::function<bool(const at::Tensor& output)> look_up_later;
  /// Sorts the ids of one more table, of one per thread if there are several, and returns true;
  /// false if nothing is left to do. Null if there is nothing to prepare: without a record for
  /// backward, on CUDA, and where gradients go into `weight.grad()`.
  std::function<bool()> prepare;
};

/// Tables that are looked up together. Copies share the tables, the optimizer and the workspace.
///
/// Work buffers are kept and grow to the largest batch seen: beyond that, a call allocates nothing
/// but its results. Calls from several threads take turns in backward.
class TESSERA_API TableBatch {
 public:
  /// Throws ValueError or TypeError for tables that cannot be looked up together.
  TableBatch(std::vector<Table> tables, std::vector<Feature> features,
             TableBatchOptions options = {});

  /// Returns the pooled rows, float32: [batch, sum of the features' columns]; or, with
  /// `batch_sizes`, 1-D, feature by feature, sample by sample.
  ///
  /// Throws IndexError for an id outside its table if the ids are checked, ValueError or TypeError
  /// for shapes and types that do not fit.
  at::Tensor pooled(const LookupInput& input) const;
  /// The same, for callers that have time to spare before backward, such as for a message to
  /// arrive. Backward does what was not prepared, and gives the same bits either way. The work
  /// buffers hold one call's preparation: a pass of another call in between undoes it.
  ///
  /// The features of `later` are not looked up yet, for callers that need the rows of the others
  /// first; `batch_sizes` must be given then. On CUDA nothing is left for later.
  /// `memory` makes the memory of the rows where it is not to be this process' own; for CPU tables
  /// with `batch_sizes`.
  PreparedRows pooled_ahead(const LookupInput& input, FeatureRange later = {},
                            const RowMemory& memory = {}) const;
  /// The same as `pooled` into `output`, without a record for backward.
  void pooled_out(const LookupInput& input, at::Tensor& output) const;

  /// Returns the rows of all ids, float32, 1-D: feature by feature, id by id, column by column. If
  /// all features have one number of columns, view it as [ids, columns]. Weights multiply the rows.
  at::Tensor sequence(const LookupInput& input) const;

  /// Starts bringing the rows of a coming call into the caches, on the current stream; the call
  /// with the same tensor of ids finds them there. Nothing if no table has a cache.
  ///
  /// The cache has room for the rows of all calls between their `prefetch` or forward and their
  /// backward; where it has not, it grows, and says so once.
  void prefetch(const LookupInput& input) const;
  /// Copies cached rows and their state home and empties the caches: to be called before anyone
  /// else reads or writes a table with a cache or its optimizer's state. Waits for the device.
  /// Throws ValueError between a forward and its backward.
  void write_back() const;
  /// Of the tables with a cache.
  std::vector<RowCacheStatistics> cache_statistics() const;

  const std::vector<Table>& tables() const noexcept;
  const std::vector<Feature>& features() const noexcept;
  const TableBatchOptions& options() const noexcept;
  /// Sum of the features' columns.
  std::int64_t num_columns() const noexcept;
  /// The optimizer of a fused batch, null otherwise.
  const std::shared_ptr<RowOptimizer>& optimizer() const noexcept;
  /// Bytes of the work buffers at present.
  std::int64_t workspace_bytes() const noexcept;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

/// An uninitialised [rows, columns] tensor for a table. On the CPU it asks the system for huge
/// pages, which makes random rows cheaper to reach.
TESSERA_API at::Tensor empty_rows(std::int64_t rows, std::int64_t columns, at::ScalarType type,
                                  at::Device device = at::kCPU);

/// The same for a table that is looked up on `device`, a GPU, and lies in host memory, pinned and
/// mapped: a tensor of that device as any other, of any size the host has. Kernels reach its rows
/// over the bus, at a small part of the memory's speed; `Table::cached_rows` keeps some nearer. On
/// the CPU it is `empty_rows`.
TESSERA_API at::Tensor mapped_rows(std::int64_t rows, std::int64_t columns, at::ScalarType type,
                                   at::Device device);

}  // namespace tessera::embedding
