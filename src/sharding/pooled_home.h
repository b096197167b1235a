// src/sharding/pooled_home.h — pooled rows on their way to the samples they are of.
//
// Who looks bags up sends their sums home, those of all ranks in one exchange; what lies on this
// rank is read while the others travel. At home one pass lays columns side by side.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sharding/combine.h"
#include "sharding/flat_exchange.h"
#include "sharding/input_dist.h"
#include "sharding/subgroups.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/jagged/keyed_tensor.h"

namespace tessera::sharding {

/// Rows on their way home: from their rank, in one tensor or one per rank, and from their host.
struct Homeward {
  comm::Awaitable<Exchange::Parts> direct;
  comm::Awaitable<at::Tensor> hosted;
};

struct PooledHomeOptions {
  comm::Codecs codecs = {};
  at::Device device = at::kCPU;
  /// Of the layout's local routes, those looked up in tables that are stepped and in dense ones.
  std::vector<std::size_t> stepped_routes = {};
  std::vector<std::size_t> dense_routes = {};
  /// Whole tables send sums where the mean is wanted; it is made at home.
  bool sends_sums = false;
};

class PooledHome {
 public:
  /// Collective if rows are summed inside hosts.
  PooledHome(std::shared_ptr<const TableLayout> layout, const comm::Group& group,
             PooledHomeOptions options);

  /// How and what to look up: TableBatch::pooled_ahead takes these.
  embedding::RowMemory row_memory() const;
  embedding::FeatureRange own_rows() const;
  /// Starts sending what was looked up. Collective.
  Homeward send(const DistContext& context, const embedding::PreparedRows& looked_up) const;
  /// Waits for it. `stepped` and `dense` are the rows of the local routes; `owner` lives as long as
  /// the record for backward.
  jagged::KeyedTensor arrive(const DistContext& context, const Homeward& pending,
                             const at::Tensor& stepped, const at::Tensor& dense,
                             std::shared_ptr<const void> owner) const;
  /// Rows are about to change: reads what is still to be read of them.
  void read_unread() const { unread_->read_all(); }

 private:
  /// Where a block of rows from another rank, or from here, goes.
  struct Home {
    std::size_t source = 0;  // 0: the exchange; 1, 2: tables that stay here; 3: sums of hosts
    std::size_t place = 0;   // number of the block in its source
    std::size_t rank = 0;    // that looks it up; of the exchange
    std::size_t feature = 0;
    std::int64_t columns = 0;
    std::int64_t column = 0;
    bool is_added = false;
    bool is_divided = false;
  };
  /// A block of a source: its columns, its feature and the rank that looks it up.
  struct RowsOfFeature {
    std::int64_t columns = 0;
    std::size_t feature = 0;
    std::size_t rank = 0;
  };

  void find_homes();
  /// Numbers that come home from rank r, and from host h for all of its ranks.
  std::int64_t direct_size(const DistContext& context, std::size_t rank) const;
  std::int64_t hosted_size(const DistContext& context, std::size_t host) const;
  /// Whether the rows for this rank's own samples can be read while the others travel.
  bool keeps_own_rows() const;
  CombinePlan combine_plan(const DistContext& context) const;

  std::shared_ptr<const TableLayout> layout_;
  comm::Group group_;
  PooledHomeOptions options_;
  std::vector<std::string> names_;
  std::vector<std::int64_t> dims_;
  std::int64_t num_columns_ = 0;
  bool lends_ = false;  // rows and gradients are read where the rank that made them has them
  std::vector<Home> homes_;
  /// In the order in which a source has them.
  std::vector<std::vector<RowsOfFeature>> blocks_;
  std::optional<HostGroups> hosts_;  // if rows are summed inside hosts
  std::shared_ptr<UnreadRows> unread_ = std::make_shared<UnreadRows>();
};

}  // namespace tessera::sharding
