// src/serving/published_rows.h — what a published checkpoint changes in a version that is served.
//
// A training that publishes saves a whole checkpoint now and then, and deltas between: see
// docs/checkpoint.md. Between the version that is served and the newest one lies a chain of deltas,
// or the newest stands on something else.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"

namespace tessera::serving {

class PublishedRows {
 public:
  /// What lies between the checkpoint whose manifest has the sum `served` and `reader`'s, which
  /// must outlive this. Throws checkpoint::Error.
  PublishedRows(const checkpoint::Reader& reader, const std::string& served);
  ~PublishedRows();

  /// Whether deltas lead from the one to the other.
  bool is_chain() const noexcept { return is_chain_; }

  using Take = std::function<void(std::int64_t row, std::span<float> numbers)>;
  /// Hands over the changed rows of a table, ascending; all if nobody knows which. Throws
  /// checkpoint::Error if bytes are not those that were written.
  void each_row(const checkpoint::TensorInfo& table, const Take& take) const;

  /// What to do with the ids of a table that grows.
  struct IdChanges {
    std::function<void()> clear;                  // all ids go; those that stay come next
    std::function<void(std::int64_t id)> remove;  // may not be there
    std::function<void(std::int64_t id, std::span<float> numbers)> take;  // new, or changed
  };
  /// The same by id, delta by delta: first ids that were removed, then those with other rows. All
  /// of them, after a `clear`, if nobody knows which.
  void each_id(const checkpoint::TensorInfo& ids, const checkpoint::TensorInfo& weights,
               const IdChanges& changes) const;

 private:
  class Link;
  void each_changed_id(const std::string& ids, const std::string& weights,
                       const IdChanges& changes) const;
  void each_changed(const checkpoint::TensorInfo& table, const Take& take) const;

  const checkpoint::Reader& reader_;
  bool is_chain_ = false;
  std::vector<std::unique_ptr<Link>> links_;  // oldest first
};

/// Rows [begin, begin + count) of a tensor of float32, float16 or bfloat16, or all numbers of one
/// with another number of dimensions, as float32.
std::vector<float> read_numbers(const checkpoint::Reader& reader,
                                const checkpoint::TensorInfo& tensor, std::int64_t begin,
                                std::int64_t count);

}  // namespace tessera::serving
