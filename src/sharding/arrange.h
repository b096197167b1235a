// src/sharding/arrange.h — the ids of a batch in the order in which they are sent.

#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "sharding/table_layout.h"
#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::sharding {

/// Route by route, in a route sample by sample.
struct ArrangedIds {
  at::Tensor lengths;  // int32
  at::Tensor values;
  at::Tensor weights;  // undefined if there are none
  /// For each id sent, its place among the values given. Undefined unless asked for; and if ids are
  /// sent as they are.
  at::Tensor source;
  Sizes values_per_rank;
  Sizes lengths_per_rank;
};

/// How a layout's routes read the ids of a batch; made once, used for every batch.
class Arrangement {
 public:
  explicit Arrangement(const TableLayout& layout);

  /// `places[f]` is where feature f of the layout lies among the keys. Copies nothing if the ids
  /// lie as they are sent. Ids of row-cut tables become numbers inside their shard; those outside
  /// the table become row 0 of the table. Ids that are cut by their hash stay as they are, and need
  /// their source. Not collective, no gradient.
  ArrangedIds arrange(const jagged::KeyedJaggedTensor& features,
                      const std::vector<std::size_t>& places, bool is_weighted,
                      bool needs_source) const;

 private:
  /// A feature in a part of the columns whose rows lie in several shards.
  struct Cut {
    std::size_t feature = 0;
    std::vector<std::int64_t> starts;   // of the parts, and the end
    std::vector<std::size_t> segments;  // of the parts, among all that is sent
  };
  struct Segment {
    std::size_t feature = 0;
    std::size_t rank = 0;
    bool is_cut = false;
  };

  bool is_identity(const jagged::KeyedJaggedTensor& features,
                   const std::vector<std::size_t>& places) const;
  template <typename Id, typename Length>
  void fill(const jagged::KeyedJaggedTensor& features, const std::vector<std::size_t>& places,
            const at::Tensor& weights, ArrangedIds& result) const;
  void compose(const jagged::KeyedJaggedTensor& features, const std::vector<std::size_t>& places,
               bool is_weighted, bool needs_source, ArrangedIds& result) const;

  std::size_t num_ranks_;
  bool cuts_by_hash_;
  std::vector<Segment> segments_;
  std::vector<Cut> cuts_;
};

}  // namespace tessera::sharding
