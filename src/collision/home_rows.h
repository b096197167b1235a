// src/collision/home_rows.h — rows that came from their owners, into the samples they are for.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::collision {

/// One column block of the result: bag b is the sum, or the mean, of the rows of its ids.
struct HomeBlock {
  std::int64_t first_column = 0;
  std::int64_t num_columns = 0;
  bool is_mean = false;
  /// Where each id's row begins among the values that arrived, in order of the ids.
  std::vector<std::int64_t> places;
  /// The first id of every bag, and the end of the last.
  std::vector<std::int64_t> offsets;
};

struct HomePlan {
  std::int64_t num_bags = 0;
  std::int64_t num_columns = 0;  // of the result
  /// All rows that arrived are for this result; otherwise the gradient of the others is zero.
  bool is_whole = true;
  std::vector<HomeBlock> blocks;
};

/// Returns [bags, columns]. Rows of a bag are added in order of its ids. No row that
/// arrived is read by two ids, so the gradient of every value is known without a sum.
at::Tensor rows_at_home(const at::Tensor& arrived, HomePlan plan);

}  // namespace tessera::collision
