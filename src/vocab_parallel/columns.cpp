#include "tessera/vocab_parallel/columns.h"

#include <algorithm>

#include "tessera/core/check.h"

namespace tessera::vocab_parallel {

Columns columns_of(std::int64_t vocab_size, int group_rank, int size) {
  TESSERA_CHECK_VALUE(size > 0 && group_rank >= 0 && group_rank < size, "vocab.columns_of: rank ",
                      group_rank, " is not in a group of ", size, ".");
  TESSERA_CHECK_VALUE(vocab_size >= 0, "vocab.columns_of: a vocabulary of ", vocab_size,
                      " ids cannot be dealt out.");
  const std::int64_t share = vocab_size / size;
  const std::int64_t larger = vocab_size % size;
  const std::int64_t start = group_rank * share + std::min<std::int64_t>(group_rank, larger);
  return {start, start + share + (group_rank < larger ? 1 : 0)};
}

Columns columns_of(std::int64_t vocab_size, const comm::Group& group) {
  return columns_of(vocab_size, group.rank(), group.size());
}

}  // namespace tessera::vocab_parallel
