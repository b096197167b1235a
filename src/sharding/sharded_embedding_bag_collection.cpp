#include "tessera/sharding/sharded_embedding_bag_collection.h"

#include <optional>
#include <sstream>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "sharding/module_parts.h"
#include "sharding/pooled_home.h"
#include "sharding/tables_state.h"
#include "tessera/core/check.h"

namespace tessera::sharding {

using embedding::TableBatch;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

namespace {

constexpr const char* kBagCollection = "sharding.embedding_bag_collection";

}  // namespace

struct ShardedEmbeddingBagCollection::State : TablesState {
  State(std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan, const comm::Group& own,
        bool weighted, const ShardedOptions& given)
      : TablesState(kBagCollection, std::move(tables), std::move(plan), own, given,
                    /*is_pooled=*/true),
        is_weighted(weighted),
        options(given) {
    options.device = numbered(options.device);
    InputDistOptions input;
    input.is_weighted = is_weighted;
    input.weights_come_later = is_weighted && options.weights_come_later;
    input.longest_bags = options.longest_bags;
    input.needs_one_batch = true;
    make_tables(options, std::move(input), options_text());
    home.emplace(layout, group,
                 PooledHomeOptions{.codecs = options.codecs,
                                   .device = options.device,
                                   .stepped_routes = local->stepped_routes(),
                                   .dense_routes = local->dense_routes()});
  }

  void read_unread() override { home->read_unread(); }
  std::string options_text() const;

  bool is_weighted;
  ShardedOptions options;
  std::optional<PooledHome> home;
};

using BagState = ShardedEmbeddingBagCollection::State;

// What must be the same on all ranks, for the passes to fit together.
std::string BagState::options_text() const {
  std::ostringstream text;
  const auto form = static_cast<int>(options.gradients);
  text << "options: " << embedding::name_of(options.optimizer.kind) << ", "
       << (form == 0   ? "dense"
           : form == 1 ? "sparse"
                       : "fused")
       << " gradients, " << (options.exact_row_norms ? "exact" : "local") << " row norms, "
       << (is_weighted ? "weighted" : "not weighted")
       << (options.weights_come_later ? " later" : "") << ", wire formats "
       << static_cast<int>(options.codecs.forward.format()) << " and "
       << static_cast<int>(options.codecs.backward.format()) << ", " << layout->topology.local_size
       << " ranks per host";
  return text.str();
}

ShardedEmbeddingBagCollection::ShardedEmbeddingBagCollection(
    std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan, const comm::Group& group,
    bool is_weighted, const ShardedOptions& options)
    : torch::nn::Module("ShardedEmbeddingBagCollection"),
      state_(std::make_shared<State>(std::move(tables), std::move(plan), group, is_weighted,
                                     options)) {
  tables_state_ = state_;
  register_shards(*this, "embedding_bags", state_->local->weights());
}

ShardedEmbeddingBagCollection::~ShardedEmbeddingBagCollection() = default;

KeyedTensor ShardedEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features).wait().wait()).wait();
}

comm::LazyAwaitable<KeyedTensor> ShardedEmbeddingBagCollection::compute_and_output_dist(
    const DistributedInput& input) {
  const bool is_later = state_->is_weighted && state_->options.weights_come_later;
  return compute_and_output_dist(
      input, is_later ? input.context->features.weights_or_none() : at::Tensor());
}

comm::LazyAwaitable<KeyedTensor> ShardedEmbeddingBagCollection::compute_and_output_dist(
    const DistributedInput& input, const at::Tensor& weights) {
  const std::shared_ptr<DistContext> context = input.context;
  const std::shared_ptr<State> state = state_;
  const bool is_later = state->is_weighted && state->options.weights_come_later;
  TESSERA_CHECK_VALUE(is_later || !weights.defined(), kBagCollection,
                      ": weights are given to the rows; ask for weights_come_later.");
  if (is_later) state->sender->send_weights(*context, weights);
  const TableBatch* routed = state->local->routed();
  const auto nothing = at::TensorOptions(at::kFloat).device(state->options.device);
  // A rank without rows still takes part, and so do the weights it was sent.
  embedding::PreparedRows looked_up;
  if (routed != nullptr) {
    looked_up = routed->pooled_ahead(context->lookup_input(), state->home->own_rows(),
                                     state->home->row_memory());
  } else {
    looked_up.rows = context->weights.defined() ? context->weights : at::empty({0}, nothing);
  }
  const Homeward pending = state->home->send(*context, looked_up);
  const auto look_up = [&](const TableBatch* batch, const std::vector<std::size_t>& local) {
    return batch == nullptr
               ? at::empty({0}, nothing)
               : batch->pooled(local_input(*state->layout, *context, local, state->is_weighted));
  };
  const at::Tensor stepped = look_up(state->local->local_stepped(), state->local->stepped_routes());
  const at::Tensor dense = look_up(state->local->local_dense(), state->local->dense_routes());
  const bool is_recorded = at::GradMode::is_enabled();
  return comm::LazyAwaitable<KeyedTensor>([=] {
    const at::AutoGradMode recorded(is_recorded);
    return state->home->arrive(*context, pending, stepped, dense, state);
  });
}

const std::vector<embedding::EmbeddingBagConfig>&
ShardedEmbeddingBagCollection::embedding_bag_configs() const noexcept {
  return state_->layout->tables;
}

ShardedEmbeddingBagCollection::NoSync::NoSync(std::shared_ptr<State> state)
    : state_(std::move(state)), was_kept_(state_->local->keep_local_gradients(true)) {}

ShardedEmbeddingBagCollection::NoSync::~NoSync() { state_->local->keep_local_gradients(was_kept_); }

}  // namespace tessera::sharding
