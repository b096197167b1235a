// src/collision/growing_state.h — what growing collections keep: ids, rows, and who owns them.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collision/growing_tensor.h"
#include "collision/unknown_rows.h"
#include "sharding/pooled_home.h"
#include "sharding/tables_state.h"
#include "tessera/collision/growing_tables.h"

namespace tessera::collision {

inline std::size_t index(std::int64_t number) { return static_cast<std::size_t>(number); }

/// Ids that are worth a thread.
inline constexpr std::int64_t kIdGrain = 4096;

/// Calls `each` for 0 to count - 1, on several threads if there are ids enough in all. What is
/// thrown is the error of the first that has one, after all are done.
void for_all(std::size_t count, std::int64_t num_ids, const std::function<void(std::size_t)>& each);

/// A table's ids and rows on this rank. Row r of the id table is row r + 1 of the tensors; row 0 is
/// read by ids that have none, and what it holds is replaced.
struct GrowingPart {
  GrowingPart(std::size_t number, const GrowingTable& table, int first_bucket, int end_bucket);

  /// Memory for so many ids; false if it cannot be had.
  [[nodiscard]] bool reserve(std::int64_t ids) noexcept;
  /// Plans the admission of a batch, with memory for its rows. Throws IdMemoryError, and nothing
  /// has changed, if there is none.
  IdChanges plan(const std::vector<std::int64_t>& batch, std::int64_t step,
                 std::vector<std::int64_t>& rows);
  /// As many rows as the id table has, and one.
  void resize();
  /// What the rows of these ids begin with, one behind the other.
  void draw(std::span<const std::int64_t> ids, float* values) const;
  /// The same as a tensor, float32.
  at::Tensor first_values(const std::vector<std::int64_t>& ids) const;
  /// Begins the rows of new ids.
  void fill(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& rows);
  /// Takes the place of what is here: row i is that of id i. False if there is no memory.
  [[nodiscard]] bool take(IdTable loaded, const at::Tensor& rows,
                          const std::map<std::string, at::Tensor>& states);
  std::int64_t bytes() const;
  std::int64_t row_bytes() const;

  std::size_t table;  // its number
  const GrowingTable* config;
  IdTable ids;
  std::unique_ptr<GrowingTensor> weight;
  std::map<std::string, std::unique_ptr<GrowingTensor>> state;  // "momentum1", "momentum2"
  double first_state = 0;                                       // of "momentum1"
  std::vector<std::size_t> routes;                              // of this rank's, by feature
  Growth growth;
};

/// What takes the place of a part's ids and rows, whose memory is there already.
struct PreparedRows {
  GrowingPart* part;
  IdTable ids;
  at::Tensor weight;
  std::map<std::string, at::Tensor> states;
};

struct GrowingState : sharding::TablesState {
  GrowingState(std::vector<GrowingTable> tables, const std::map<std::string, sharding::Placement>&,
               const comm::Group& group, const GrowingOptions& options, bool is_pooled);

  std::vector<sharding::LocalShard> shards() const override;
  std::vector<std::shared_ptr<embedding::RowOptimizer>> optimizers() const override;
  void set_learning_rate(double learning_rate) override;
  void read_unread() override {
    if (pooled_home) pooled_home->read_unread();
  }

  /// Finds the rows of a batch that has arrived, reads them and starts sending them home: the sums
  /// of bags, or a row for every id. Collective.
  struct Sent {
    std::optional<sharding::Homeward> pooled = {};
    std::optional<comm::Awaitable<at::Tensor>> rows = {};
    sharding::Sizes ids = {};  // of every segment of `routes`, with `rows`
  };
  Sent look_up(const sharding::DistContext& context, bool admits);
  /// Where the rows of one output begin among those that arrived, in order of its ids.
  std::vector<std::int64_t> places_of(const sharding::DistContext& context, std::size_t output,
                                      const sharding::Sizes& ids) const;

  GrowingPart* part_of(const std::string& table);
  /// What is here now is the base of all who follow changes.
  void forget_changes();
  std::size_t number_of(const std::string& table) const;

  std::vector<GrowingTable> tables;
  GrowingOptions options;
  std::vector<std::unique_ptr<GrowingPart>> parts;  // on this rank, in order of the tables
  std::vector<PreparedRows> prepared;               // of a load that is to come
  std::shared_ptr<UnknownRows> unknown_rows;        // null if no table trains one
  std::unique_ptr<embedding::TableBatch> batch;     // null without parts
  /// Where every bag lies on one rank, its sum is made there: the same bits as at home.
  std::optional<sharding::PooledHome> pooled_home;
  std::vector<sharding::Route> routes;  // all that is sent, rank by rank
  std::int64_t num_calls = 0;
  std::vector<std::weak_ptr<GrowingChanges>> followers;  // of changes
  /// Whether training calls may leave ids without a row that trains, on any rank.
  bool trains_unknown = false;
  /// Features share tables: segments are looked up by route, then by rank, as one rank would.
  bool is_by_route = false;

 private:
  struct Segments;
  struct Numbered;
  void check_tables() const;
  void make_parts();
  void make_pooled_home();
  Segments segments_of(const sharding::DistContext& context) const;
  Numbered number_ids(const sharding::DistContext& context, const Segments& segments, bool admits);
  at::Tensor read_unknown(const GrowingPart& part, const std::vector<std::int64_t>& ids) const;
  bool pools(const Numbered& numbered, bool admits) const;
  void admit(std::vector<std::vector<std::int64_t>>& ids,
             std::vector<std::vector<std::int64_t>>& rows, bool admits);
  void keep(const std::vector<IdChanges>& changes);
  at::Tensor sequence_by_route(const sharding::DistContext& context,
                               const at::Tensor& numbers) const;
};

}  // namespace tessera::collision
