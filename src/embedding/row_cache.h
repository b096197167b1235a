// src/embedding/row_cache.h — rows of tables in host memory, kept in the GPU's as long as they are
// wanted. A call first admits its ids: rows that are not there come, others leave for them, and the
// ids become slots of the cache. From then on the kernels see small tables in GPU memory.
//
// Rows of calls that are not yet released stay. Work goes to the caller's current stream; streams
// wait for each other, and the host for one small report per call, which is there early if the call
// was admitted ahead.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "embedding/table_pass.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::embedding::detail {

/// One call's ids in the cache; holds its rows there until it is destroyed.
class Admission {
 public:
  virtual ~Admission() = default;
  /// The ids and offsets it was made for.
  at::Tensor ids;
  at::Tensor offsets;
};

class RowCache {
 public:
  virtual ~RowCache() = default;

  /// Starts bringing the rows of a call. `pass` is that of the tables themselves and points into
  /// the tensors of `input`.
  virtual std::unique_ptr<Admission> admit(const TablePass& pass, const LookupInput& input) = 0;
  /// Waits until it is known that all rows have a place, and makes room if they have not; makes the
  /// current stream wait for the rows.
  virtual void finish(Admission& admission) = 0;
  /// Turns a pass of the tables into one of the cache.
  virtual void place(const Admission& admission, TablePass& pass) const = 0;
  virtual void place(std::size_t table, TableTarget& target) const = 0;
  /// Copies all rows home and forgets them. Must not be called while a call is between its forward
  /// and its backward.
  virtual void write_back() = 0;
  virtual std::vector<RowCacheStatistics> statistics() const = 0;
};

/// Null if none of the tables has a cache. `optimizer` may be null. Throws ValueError for tables
/// that cannot have one.
std::shared_ptr<RowCache> make_row_cache(const std::vector<Table>& tables, CachePolicy policy,
                                         RowOptimizer* optimizer);

/// Whether a tensor of the GPU lies in host memory.
bool is_mapped(const at::Tensor& tensor);
at::Tensor make_mapped(std::int64_t rows, std::int64_t columns, at::ScalarType type,
                       at::Device device);

}  // namespace tessera::embedding::detail
