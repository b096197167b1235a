// tessera/vocab_parallel/columns.h — which part of the vocabulary a rank holds.

#pragma once

#include <cstdint>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::vocab_parallel {

/// Vocabulary ids [start, end). Ranks hold consecutive ranges in rank order; they may differ in
/// size, and a rank may hold none.
struct Columns {
  std::int64_t start = 0;
  std::int64_t end = 0;

  std::int64_t size() const noexcept { return end - start; }
};

/// The range of `group_rank` when `vocab_size` ids are dealt out evenly to `size` ranks: the first
/// vocab_size % size ranks get one more. Throws ValueError for a rank outside the size.
TESSERA_API Columns columns_of(std::int64_t vocab_size, int group_rank, int size);

/// The same for this rank of `group`. Not collective.
TESSERA_API Columns columns_of(std::int64_t vocab_size, const comm::Group& group);

}  // namespace tessera::vocab_parallel
