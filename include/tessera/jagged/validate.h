// tessera/jagged/validate.h — says what is wrong with a batch, before it is used.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::jagged {

/// Checks everything that can be checked about a batch: that lengths are not negative, agree with
/// offsets and add up to the number of values, that keys do not repeat, that strides and inverse
/// indices fit, and that the ids of each feature of `num_embeddings` lie within its table.
///
/// Throws ValueError naming the feature, the sample and the id. Reads all the data; on CUDA the
/// host waits.
TESSERA_API void validate(
    const KeyedJaggedTensor& features,
    const std::vector<std::pair<std::string, std::int64_t>>& num_embeddings = {});

/// An id outside its table.
struct BadId {
  std::string feature;
  std::int64_t sample;
  std::int64_t id;
  std::int64_t num_embeddings;

  /// "feature 'f', sample 3 has id 12; there are 10 rows"
  std::string text() const;
};

/// The first id (in the order of the values) of `feature` that is not in [0, num_embeddings).
TESSERA_API std::optional<BadId> find_bad_id(const KeyedJaggedTensor& features, std::size_t feature,
                                             std::int64_t num_embeddings);

}  // namespace tessera::jagged
