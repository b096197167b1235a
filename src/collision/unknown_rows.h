// src/collision/unknown_rows.h — what ids without a row read, and the row that all of them train.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/embedding/optimizer.h"

namespace tessera::collision {

/// Some ids without a row, as their owner has them: where their rows begin among the values that it
/// sends, and their buckets, in order of the ids.
struct UnknownPlaces {
  std::size_t table = 0;
  std::int64_t columns = 0;
  std::vector<std::int64_t> places;
  std::vector<int> buckets;
};

/// A row of every table, the same on all ranks.
///
/// Its gradient is summed by bucket on the bucket's owner, then over buckets in order: so the sum
/// has the same bits whoever owns them.
class UnknownRows {
 public:
  UnknownRows(std::vector<std::pair<std::string, std::int64_t>> tables, comm::Group group,
              const embedding::OptimizerOptions& options);

  /// [1, columns].
  const at::Tensor& row(std::size_t table) const { return weights_[table]; }
  embedding::RowOptimizer& optimizer() noexcept { return *optimizer_; }
  const embedding::RowOptimizer& optimizer() const noexcept { return *optimizer_; }

  /// Steps by what unknown ids of this rank's values got as a gradient. Collective.
  void step(const std::vector<UnknownPlaces>& unknown, const at::Tensor& gradient);

 private:
  comm::Group group_;
  std::vector<at::Tensor> weights_;
  std::unique_ptr<embedding::RowOptimizer> optimizer_;
};

/// Puts `values[i]`, rows one after the other, at the places of `unknown[i]`. No gradient reaches
/// what was there. With `rows`, whose gradient is summed in backward, that is collective; all ranks
/// then call this, also those without values.
at::Tensor with_unknown(const at::Tensor& own, std::vector<UnknownPlaces> unknown,
                        const std::vector<at::Tensor>& values, std::shared_ptr<UnknownRows> rows);

}  // namespace tessera::collision
