// src/sharding/input_dist.h — ids to the ranks that own their rows.
//
// Nothing is put in another order after it has arrived: what rank r sent stays together, route by
// route, and a lookup treats every route of every rank as a feature of its own. The rows that come
// of it then lie rank by rank, ready to be sent back.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sharding/agreement.h"
#include "sharding/arrange.h"
#include "sharding/table_layout.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/feature_processor.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/sharding/sharded_module.h"

namespace tessera::sharding {

/// One batch of one module, between the steps.
struct DistContext {
  explicit DistContext(jagged::KeyedJaggedTensor given) : features(std::move(given)) {
    if (features.variable_stride_per_key()) inverse = features.inverse_indices_or_none();
  }

  // At home.
  jagged::KeyedJaggedTensor features;             // as given
  std::vector<std::size_t> places;                // of the layout's features among the keys
  Sizes strides;                                  // the batch of each feature of the layout
  std::optional<jagged::InverseIndices> inverse;  // of a variable batch
  ArrangedIds sent;
  Fault fault;
  std::string call;          // what this rank is about to do
  bool is_recorded = false;  // for backward
  bool wants_weight_gradient = false;

  // If ids are sent once: `features` then holds the different ids of the layout's features.
  std::optional<jagged::KeyedJaggedTensor> given;  // the layout's features with all their ids
  std::vector<std::size_t> space_of;               // which features share their ids
  at::Tensor place_in_space;                       // of every id given, among those of its space

  // Here, once it has arrived.
  std::vector<Sizes> batches;  // of each rank and route of this rank
  Sizes received_values;       // ids from each rank
  at::Tensor lengths;          // int32, rank by rank, route by route
  at::Tensor ids;
  at::Tensor weights;  // undefined if there are none

  /// The ids as a lookup of every route of every rank takes them.
  embedding::LookupInput lookup_input() const;
};

struct InputDistOptions {
  bool is_weighted = false;
  /// Weights are sent by `send_weights`, when the rows are read, and not with the ids.
  bool weights_come_later = false;
  embedding::LongestBags longest_bags = {};
  /// Keep where each id came from, for what is not pooled.
  bool needs_source = false;
  /// Of a variable batch, all features must become one batch by their inverse indices.
  bool needs_one_batch = false;
  /// Send an id once, however often a batch holds it. Weights are not read.
  bool sends_ids_once = false;
  embedding::BoundsCheckMode bounds_check = embedding::BoundsCheckMode::kFatal;
  at::Device device = at::kCPU;
};

/// Sends the ids of a layout's features to the ranks of a group.
class InputSender {
 public:
  InputSender(std::shared_ptr<const TableLayout> layout, const comm::Group& group,
              InputDistOptions options);

  /// Checks the features and puts them in order. Not collective: what is wrong becomes the fault of
  /// the context, and the error of all ranks when the ids are sent.
  std::shared_ptr<DistContext> prepare(const jagged::KeyedJaggedTensor& features) const;

  /// Numbers for each rank in the first message: who, how, how many ids, and the batch of every
  /// route.
  std::int64_t message_size() const noexcept;
  /// Row r of [ranks, columns] is for rank r; this module's numbers begin at `column`.
  void write_message(const DistContext& context, std::int64_t* message, std::int64_t columns,
                     std::int64_t column) const;
  /// Whether what all ranks say fits together and is without faults.
  bool read_message(DistContext& context, const std::int64_t* message, std::int64_t columns,
                    std::int64_t column) const;
  [[noreturn]] void raise(const DistContext& context) const;

  /// Sends the ids. Collective.
  comm::Awaitable<DistributedInput> send(const std::shared_ptr<DistContext>& context) const;

  /// Sends the weights of the context's features, if they come later; gradients come back.
  /// Collective.
  void send_weights(DistContext& context, const at::Tensor& weights) const;

  const comm::Group& group() const noexcept { return group_; }

 private:
  comm::Awaitable<at::Tensor> exchange_weights(const DistContext& context) const;
  Fault find_fault(DistContext& context) const;
  Fault find_batch_fault(const DistContext& context) const;
  bool has_bad_id(const DistContext& context) const;
  Fault find_id_fault(const DistContext& context) const;
  void remove_repeated_ids(DistContext& context) const;

  std::shared_ptr<const TableLayout> layout_;
  comm::Group group_;
  InputDistOptions options_;
  Arrangement arrangement_;
  std::int64_t most_routes_ = 0;
};

}  // namespace tessera::sharding
