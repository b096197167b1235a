// The ids of one table of fixed size: policies that score them, and the module that keeps the best.

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "tessera/collision/id_table.h"
#include "tessera/collision/managed_collision.h"
#include "tessera/core/check.h"

namespace tessera::collision {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMostShards = 1024;
constexpr const char* kHistoryIds = "_tessera_history_ids";
constexpr const char* kHistoryIterations = "_tessera_history_iter";
constexpr const char* kNumIds = "_tessera_num_ids";

at::Tensor padded_segments(const std::vector<std::int64_t>& segments) {
  at::Tensor padded = at::full({kMostShards + 1}, -1, at::kLong);
  std::copy(segments.begin(), segments.end(), padded.data_ptr<std::int64_t>());
  return padded;
}

std::vector<std::int64_t> bounds_of(const MchOptions& options) {
  if (!options.output_segments.empty()) return options.output_segments;
  return {options.output_global_offset, options.output_global_offset + options.zch_size};
}

at::Tensor distance_to_the(double exponent, std::int64_t iteration, const at::Tensor& last) {
  return at::pow(iteration - last + 1, exponent);
}

}  // namespace

// ---- policies ----

std::pair<at::Tensor, at::Tensor> dynamic_threshold_filter(const at::Tensor& counts,
                                                           double threshold_skew_multiplier) {
  const auto size = static_cast<double>(std::max<std::int64_t>(counts.numel(), 1));
  const at::Tensor threshold = counts.sum() * (threshold_skew_multiplier / size);
  return {counts > threshold, threshold};
}

std::pair<at::Tensor, at::Tensor> average_threshold_filter(const at::Tensor& counts) {
  const at::Tensor threshold = counts.to(at::kFloat).mean();
  return {counts > threshold, threshold};
}

std::pair<at::Tensor, at::Tensor> probabilistic_threshold_filter(const at::Tensor& counts,
                                                                 double per_id_probability) {
  const at::Tensor miss = at::full_like(counts, 1 - per_id_probability, at::kFloat);
  const at::Tensor threshold = at::rand(counts.sizes(), at::kFloat);
  return {1 - at::pow(miss, counts) > threshold, threshold};
}

MCHEvictionPolicy::~MCHEvictionPolicy() = default;

at::Tensor LfuEvictionPolicy::scores(std::int64_t /*iteration*/,
                                     const MchMetadata& metadata) const {
  return metadata.counts;
}

at::Tensor LruEvictionPolicy::scores(std::int64_t iteration, const MchMetadata& metadata) const {
  return -distance_to_the(decay_exponent_, iteration, metadata.last_access_iter);
}

at::Tensor DistanceLfuEvictionPolicy::scores(std::int64_t iteration,
                                             const MchMetadata& metadata) const {
  return metadata.counts / distance_to_the(decay_exponent_, iteration, metadata.last_access_iter);
}

// ---- the module ----

at::Tensor ManagedCollisionModule::forward(const at::Tensor& ids) {
  const at::Tensor known = preprocess(ids);
  profile(known, {});
  return remap(known);
}

MCHManagedCollisionModule::MCHManagedCollisionModule(MchOptions options)
    : options_(std::move(options)),
      unknown_row_(options_.output_global_offset + options_.zch_size - 1) {
  TESSERA_CHECK_VALUE(options_.zch_size >= 1 && options_.eviction_interval >= 1,
                      "collision.mch: zch_size ", options_.zch_size, " and eviction_interval ",
                      options_.eviction_interval, " must be at least 1.");
  TESSERA_CHECK_VALUE(options_.eviction_policy != nullptr, "collision.mch: there is no policy.");
  const auto bounds = bounds_of(options_);
  TESSERA_CHECK_VALUE(static_cast<std::int64_t>(bounds.size()) <= kMostShards + 1,
                      "collision.mch: limited to ", kMostShards, " shards; ", bounds.size() - 1,
                      " given.");
  const auto whole = at::TensorOptions().dtype(at::kLong);
  ids_ = register_buffer("_mch_sorted_raw_ids", at::full({options_.zch_size}, kLargest, whole));
  rows_ = register_buffer("_mch_remapped_ids_mapping",
                          at::arange(options_.zch_size, whole) + options_.output_global_offset);
  if (options_.eviction_policy->keeps_counts()) {
    counts_ = register_buffer("_mch_counts", at::zeros({options_.zch_size}, whole));
  }
  if (options_.eviction_policy->keeps_iterations()) {
    last_access_iter_ =
        register_buffer("_mch_last_access_iter", at::zeros({options_.zch_size}, whole));
  }
  segments_ = register_buffer("_output_segments_tensor", padded_segments(bounds));
  iteration_ = register_buffer("_current_iter_tensor", at::zeros({1}, whole));
}

MCHManagedCollisionModule::~MCHManagedCollisionModule() = default;

void MCHManagedCollisionModule::begin(const std::string& table) {
  if (options_.name.empty()) options_.name = table;
}

MchSlots MCHManagedCollisionModule::slots() const {
  MchSlots slots{ids_, rows_, {}};
  for (const at::Tensor& one : {counts_, last_access_iter_}) {
    if (one.defined()) slots.metadata.push_back(one);
  }
  return slots;
}

at::Tensor MCHManagedCollisionModule::preprocess(const at::Tensor& ids) const {
  const std::int64_t size = options_.input_hash_size;
  if (options_.input_hash_func) return options_.input_hash_func(ids, size);
  if (size == kLargest) return ids;
  const at::Tensor is_wrong = (ids < 0).logical_or_(ids >= size);
  if (!is_wrong.any().item<bool>()) return ids;
  if (!options_.folds_out_of_range) {
    const auto position = is_wrong.nonzero()[0].item<std::int64_t>();
    TESSERA_CHECK_VALUE(false, "collision.mch: id ", ids[position].item<std::int64_t>(),
                        " at position ", position, " of '", options_.name, "' is not within 0 to ",
                        size - 1, ". Leave input_hash_size out to allow all ids, or fold them.");
  }
  at::Tensor hashed = ids.to(at::kLong).contiguous().clone();
  auto* hash = hashed.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < hashed.numel(); ++i) {
    hash[i] = static_cast<std::int64_t>(id_hash(hash[i]));
  }
  return at::where(is_wrong, hashed.remainder(size), ids);
}

void MCHManagedCollisionModule::profile(const at::Tensor& ids, const at::Tensor& counts) {
  if (!is_training()) return;
  const at::NoGradGuard no_grad;
  iteration_ += 1;
  const auto iteration = iteration_.item<std::int64_t>();
  if (ids.numel() > 0) {
    const at::Tensor own = ids.to(at::kCPU, at::kLong).clone();
    history_.push_back({iteration, own, counts.defined() ? counts.clone() : at::ones_like(own)});
  }
  if (iteration % options_.eviction_interval == 0) admit(iteration);
}

void MCHManagedCollisionModule::admit(std::int64_t iteration) {
  const std::vector<Waiting> history = std::exchange(history_, {});
  if (history.empty()) return;
  follow_buffers();
  std::vector<at::Tensor> all_ids;
  std::vector<at::Tensor> all_counts;
  std::vector<at::Tensor> all_iterations;
  for (const Waiting& waiting : history) {
    all_ids.push_back(waiting.ids);
    all_counts.push_back(waiting.counts);
    all_iterations.push_back(at::full_like(waiting.ids, waiting.iteration));
  }
  auto [ids, inverse, unused] =
      at::_unique2(at::cat(all_ids), /*sorted=*/true, /*return_inverse=*/true);
  at::Tensor counts = at::zeros_like(ids).scatter_add_(0, inverse, at::cat(all_counts));
  at::Tensor newest = at::zeros_like(ids).scatter_reduce_(0, inverse, at::cat(all_iterations),
                                                          "amax", /*include_self=*/false);
  const MCHEvictionPolicy& policy = *options_.eviction_policy;
  if (policy.filter()) {
    const at::Tensor chosen = policy.filter()(counts).first;
    ids = at::index(ids, {chosen});
    counts = at::index(counts, {chosen});
    newest = at::index(newest, {chosen});
  }
  // The most frequent first, then by id.
  const at::Tensor order = at::argsort(counts, /*stable=*/true, /*dim=*/0, /*descending=*/true);
  ids = ids.index_select(0, order);
  const auto [is_known, places] = mch_match(ids_, num_ids_, ids);
  const at::Tensor is_new = is_known.logical_not();

  // Known ids are counted; the last slot, which is that of unknown ids, is never given up.
  const std::int64_t last = options_.zch_size - 1;
  MchMetadata fresh;
  MchMetadata merged;
  if (counts_.defined()) {
    const at::Tensor seen = counts.index_select(0, order);
    counts_.index_add_(0, places, seen.masked_select(is_known));
    counts_[last] = kLargest;
    fresh.counts = seen.masked_select(is_new);
    merged.counts = at::cat({counts_, fresh.counts});
  }
  if (last_access_iter_.defined()) {
    const at::Tensor seen = newest.index_select(0, order);
    last_access_iter_.index_copy_(0, places, seen.masked_select(is_known));
    last_access_iter_[last] = iteration;
    fresh.last_access_iter = seen.masked_select(is_new);
    merged.last_access_iter = at::cat({last_access_iter_, fresh.last_access_iter});
  }
  const auto [leaving, coming] = mch_select(policy.scores(iteration, merged), options_.zch_size);
  if (counts_.defined()) counts_.index_copy_(0, leaving, fresh.counts.index_select(0, coming));
  if (last_access_iter_.defined()) {
    last_access_iter_.index_copy_(0, leaving, fresh.last_access_iter.index_select(0, coming));
  }
  const at::Tensor rows = rows_.index_select(0, leaving);
  evicted_ = evicted_ ? std::get<0>(at::_unique2(at::cat({*evicted_, rows}))) : rows;
  if (leaving.numel() == 0) return;
  MchSlots own = slots();
  num_ids_ =
      index_.replace(own, num_ids_, leaving, ids.masked_select(is_new).index_select(0, coming));
  indexed_ = version();
}

std::vector<std::int64_t> MCHManagedCollisionModule::version() const {
  const auto place = [](const at::Tensor& buffer) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(buffer.data_ptr()));
  };
  return {num_ids_, place(ids_), ids_._version(), place(rows_), rows_._version()};
}

void MCHManagedCollisionModule::follow_buffers() {
  if (indexed_ == version()) return;
  order_slots(0);
  index_.rebuild(slots(), num_ids_);
  indexed_ = version();
}

void MCHManagedCollisionModule::order_slots(std::int64_t least_ids) {
  const at::NoGradGuard no_grad;
  const at::Tensor ids = ids_.clone();
  at::Tensor is_id = ids != kLargest;
  std::int64_t count = is_id.sum().item<std::int64_t>();
  if (least_ids > count) {  // 2^63 - 1 is one of the ids
    const at::Tensor free = is_id.logical_not().nonzero().flatten();
    is_id.index_fill_(0, free.slice(0, 0, least_ids - count), true);
    count = least_ids;
  }
  const at::Tensor ascending = at::argsort(ids, /*stable=*/true, /*dim=*/0);
  const at::Tensor is_taken = is_id.index_select(0, ascending);
  const at::Tensor order =
      at::cat({ascending.masked_select(is_taken), ascending.masked_select(is_taken.logical_not())});
  const MchSlots own = slots();
  ids_.copy_(ids.index_select(0, order));
  rows_.copy_(rows_.index_select(0, order));
  for (const at::Tensor& one : own.metadata) at::Tensor(one).copy_(one.index_select(0, order));
  num_ids_ = count;
}

at::Tensor MCHManagedCollisionModule::remap(const at::Tensor& ids) {
  follow_buffers();
  return index_.remap(ids, unknown_row_);
}

std::optional<at::Tensor> MCHManagedCollisionModule::evict() {
  return std::exchange(evicted_, std::nullopt);
}

std::int64_t MCHManagedCollisionModule::open_slots() const {
  return options_.zch_size - 1 - num_ids_;
}

std::shared_ptr<ManagedCollisionModule> MCHManagedCollisionModule::rebuild_with_output_id_range(
    std::int64_t first, std::int64_t end, const std::vector<std::int64_t>& segments) const {
  MchOptions options = options_;
  options.zch_size = end - first;
  options.output_global_offset = first;
  options.output_segments = segments;
  options.buckets = static_cast<std::int64_t>(segments.size()) - 1;
  return std::make_shared<MCHManagedCollisionModule>(options);
}

// ---- state ----

namespace {

/// Throws unless rows [first, end) begin and end where saved shards do.
void check_segments(const at::Tensor& saved, std::int64_t first, std::int64_t end) {
  const auto* bound = saved.const_data_ptr<std::int64_t>();
  const auto has = [&](std::int64_t row) {
    return std::find(bound, bound + saved.numel(), row) != bound + saved.numel();
  };
  std::string bounds;
  for (std::int64_t i = 0; i < saved.numel() && bound[i] >= 0; ++i) {
    bounds += (i == 0 ? "" : ", ") + std::to_string(bound[i]);
  }
  TESSERA_CHECK_VALUE(has(first) && has(end), "collision.mch: rows ", first, " to ", end - 1,
                      " are not a union of the saved shards, whose bounds are ", bounds, ".");
}

}  // namespace

void MCHManagedCollisionModule::validate_state() {
  const std::int64_t first = options_.output_global_offset;
  check_segments(segments_, first, first + options_.zch_size);
  segments_.copy_(padded_segments(bounds_of(options_)));
  order_slots(num_ids_);
  evicted_.reset();
  index_.rebuild(slots(), num_ids_);
  indexed_ = version();
}

std::map<std::string, at::Tensor> MCHManagedCollisionModule::state_dict() const {
  std::map<std::string, at::Tensor> state;
  for (const auto& buffer : named_buffers()) state[buffer.key()] = buffer.value().clone();
  if (!history_.empty()) {
    std::vector<at::Tensor> ids;
    std::vector<at::Tensor> iterations;
    for (const Waiting& waiting : history_) {
      ids.push_back(at::repeat_interleave(waiting.ids, waiting.counts));
      iterations.push_back(at::full_like(ids.back(), waiting.iteration));
    }
    state[kHistoryIds] = at::cat(ids);
    state[kHistoryIterations] = at::cat(iterations);
  }
  if (num_ids_ > 0 && ids_[num_ids_ - 1].item<std::int64_t>() == kLargest) {
    state[kNumIds] = at::full({1}, num_ids_, at::kLong);
  }
  return state;
}

void MCHManagedCollisionModule::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard no_grad;
  for (const auto& buffer : named_buffers()) {
    const auto given = state.find(buffer.key());
    TESSERA_CHECK_VALUE(given != state.end(), "collision.mch: the state of '", options_.name,
                        "' has no ", buffer.key(), ".");
    TESSERA_CHECK_VALUE(given->second.sizes() == buffer.value().sizes(),
                        "collision.mch: ", buffer.key(), " of '", options_.name, "' has ",
                        given->second.sizes(), " numbers; here it has ", buffer.value().sizes(),
                        ".");
  }
  const std::int64_t first = options_.output_global_offset;
  check_segments(state.at("_output_segments_tensor").to(at::kCPU, at::kLong).contiguous(), first,
                 first + options_.zch_size);
  for (const auto& buffer : named_buffers())
    at::Tensor(buffer.value()).copy_(state.at(buffer.key()));
  const auto count = state.find(kNumIds);
  num_ids_ = count == state.end() ? 0 : count->second.item<std::int64_t>();
  validate_state();
  history_.clear();
  const auto ids = state.find(kHistoryIds);
  const auto iterations = state.find(kHistoryIterations);
  if (ids == state.end() || iterations == state.end()) return;
  const at::Tensor different = std::get<0>(at::unique_consecutive(iterations->second));
  for (std::int64_t i = 0; i < different.numel(); ++i) {
    const auto iteration = different[i].item<std::int64_t>();
    const at::Tensor own = ids->second.masked_select(iterations->second == iteration).clone();
    history_.push_back({iteration, own, at::ones_like(own)});
  }
}

}  // namespace tessera::collision
