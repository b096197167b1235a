#include "sharding/input_dist.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <set>
#include <sstream>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "comm/agreement.h"
#include "jagged/keyed_jagged_state.h"
#include "sharding/flat_exchange.h"
#include "sharding/sizes.h"
#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"
#include "tessera/jagged/validate.h"

namespace tessera::sharding {
namespace {

using comm::Awaitable;
using embedding::BoundsCheckMode;
using jagged::KeyedJaggedTensor;

// The numbers of a message before the batches.
enum Header : std::int64_t { kCall, kStatus, kNumValues, kHeader };

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

bool is_integer(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

// The first key with a negative length, or the number of keys.
std::size_t negative_length(const KeyedJaggedTensor& features) {
  const std::size_t num_keys = features.keys().size();
  if (features.lengths().numel() == 0 || has_good_lengths(features) ||
      features.lengths().min().item<std::int64_t>() >= 0) {
    return num_keys;
  }
  const auto& begins = features.lengths_offset_per_key();
  for (std::size_t key = 0; key < num_keys; ++key) {
    const at::Tensor own =
        features.lengths().reshape({-1}).narrow(0, begins[key], begins[key + 1] - begins[key]);
    if (own.numel() > 0 && own.min().item<std::int64_t>() < 0) return key;
  }
  return num_keys;
}

}  // namespace

embedding::LookupInput DistContext::lookup_input() const {
  embedding::LookupInput input;
  input.ids = ids;
  input.offsets = jagged::lengths_to_offsets(lengths);
  input.weights = weights;
  for (const Sizes& rank : batches) {
    input.batch_sizes.insert(input.batch_sizes.end(), rank.begin(), rank.end());
  }
  return input;
}

InputSender::InputSender(std::shared_ptr<const TableLayout> layout, const comm::Group& group,
                         InputDistOptions options)
    : layout_(std::move(layout)),
      group_(group),
      options_(std::move(options)),
      arrangement_(*layout_) {
  for (const auto& routes : layout_->routes) {
    most_routes_ = std::max(most_routes_, static_cast<std::int64_t>(routes.size()));
  }
}

Fault InputSender::find_fault(DistContext& context) const {
  const KeyedJaggedTensor& features = context.features;
  for (std::size_t place = 0; place < features.keys().size(); ++place) {
    // Only the last would be sent, and the ids of the others lost without a word.
    if (features.index_of(features.keys()[place]) != place) {
      return {Fault::Kind::kValue, text_of("the keys must be unique, and '", features.keys()[place],
                                           "' is there twice.")};
    }
  }
  for (const auto& name : layout_->features) {
    if (!features.has_key(name)) {
      return {Fault::Kind::kValue, text_of("there is no feature '", name, "' among the ",
                                           features.keys().size(), " keys of the batch.")};
    }
    context.places.push_back(features.index_of(name));
    context.strides.push_back(features.stride_per_key()[context.places.back()]);
  }
  if (features.device() != options_.device) {
    return {Fault::Kind::kValue, text_of("the features are on ", features.device(),
                                         ", the tables are on ", options_.device, ".")};
  }
  if (!is_integer(features.values()) || features.values().dim() != 1) {
    return {
        Fault::Kind::kType,
        text_of("the ids are ", features.values().scalar_type(), ", of ", features.values().dim(),
                " dimensions; they must be int32 or int64, of one dimension.")};
  }
  if (options_.is_weighted && !options_.weights_come_later &&
      !features.weights_or_none().defined()) {
    return {Fault::Kind::kValue, "the collection is weighted, but the features have no weights."};
  }
  const std::size_t negative = negative_length(features);
  if (negative < features.keys().size()) {
    return {Fault::Kind::kValue,
            text_of("feature '", features.keys()[negative], "' has a negative length.")};
  }
  if (features.offset_per_key().back() != features.values().numel()) {
    return {Fault::Kind::kValue, text_of("the lengths add up to ", features.offset_per_key().back(),
                                         ", but there are ", features.values().numel(), " ids.")};
  }
  embedding::check_positions(features, options_.longest_bags);
  Fault fault = find_batch_fault(context);
  return fault.kind == Fault::Kind::kNone ? find_id_fault(context) : fault;
}

Fault InputSender::find_batch_fault(const DistContext& context) const {
  const KeyedJaggedTensor& features = context.features;
  if (!features.variable_stride_per_key()) return {};
  const auto& inverse = features.inverse_indices_or_none();
  if (!inverse && !options_.needs_one_batch) return {};
  for (std::size_t f = 0; f < layout_->features.size(); ++f) {
    const std::string& name = layout_->features[f];
    if (!inverse) {
      if (context.strides[f] == context.strides[0]) continue;
      return {Fault::Kind::kValue,
              text_of("feature '", name, "' has a batch of ", context.strides[f], ", feature '",
                      layout_->features[0], "' of ", context.strides[0],
                      ". Give inverse indices with a variable batch.")};
    }
    const auto found = std::find(inverse->first.rbegin(), inverse->first.rend(), name);
    if (found == inverse->first.rend()) {
      return {Fault::Kind::kValue,
              text_of("there are no inverse indices for feature '", name, "'.")};
    }
    const at::Tensor own = inverse->second[inverse->first.rend() - found - 1];
    if (own.numel() > 0 && (own.min().item<std::int64_t>() < 0 ||
                            own.max().item<std::int64_t>() >= context.strides[f])) {
      return {Fault::Kind::kIndex,
              text_of("the inverse indices of feature '", name, "' go from ",
                      own.min().item<std::int64_t>(), " to ", own.max().item<std::int64_t>(),
                      ", but it has ", context.strides[f], " samples.")};
    }
  }
  return {};
}

// Waits for the device once; the ids themselves are fetched only to say which one is bad.
bool InputSender::has_bad_id(const DistContext& context) const {
  at::Tensor is_bad = at::zeros({}, context.features.values().options().dtype(at::kBool));
  for (std::size_t f = 0; f < layout_->features.size(); ++f) {
    const at::Tensor ids = context.features.feature(context.places[f]).values();
    const std::int64_t rows = layout_->tables[layout_->smallest_table[f]].num_embeddings;
    is_bad.logical_or_(ids.lt(0).logical_or_(ids.ge(rows)).any());
  }
  return is_bad.item<bool>();
}

Fault InputSender::find_id_fault(const DistContext& context) const {
  static std::atomic<bool> has_warned{false};
  const BoundsCheckMode mode = options_.bounds_check;
  if (mode == BoundsCheckMode::kIgnore) return {};
  if (mode == BoundsCheckMode::kWarning && has_warned) return {};
  if (!context.features.values().is_cpu() && !has_bad_id(context)) return {};
  for (std::size_t f = 0; f < layout_->features.size(); ++f) {
    const auto& table = layout_->tables[layout_->smallest_table[f]];
    const auto bad = jagged::find_bad_id(context.features, context.places[f], table.num_embeddings);
    if (!bad) continue;
    const std::string text =
        text_of("feature '", bad->feature, "', sample ", bad->sample, " has id ", bad->id,
                ", but table '", table.name, "' has ", table.num_embeddings, " rows");
    if (mode == BoundsCheckMode::kFatal) return {Fault::Kind::kIndex, text + "."};
    if (!has_warned.exchange(true)) {
      TORCH_WARN(layout_->operation, ": on rank ", group_.rank(), ", ", text,
                 "; row 0 is used. Further ids outside their tables are not reported.");
    }
    break;
  }
  return {};
}

// Note [Ids once]
// Features that are looked up in the same tables share one space of ids. Its different ids are
// spread over the bags of those features, so that they travel as any batch does; the rows come back
// in that order, and place_in_space deals them out again.
void InputSender::remove_repeated_ids(DistContext& context) const {
  std::vector<std::set<std::size_t>> tables(layout_->features.size());
  for (const Output& output : layout_->outputs) tables[output.feature].insert(output.table);
  const std::vector<std::int64_t> order(context.places.begin(), context.places.end());
  const KeyedJaggedTensor given = context.features.permute(order);
  std::vector<std::int64_t> bags;
  for (std::size_t f = 0; f < tables.size(); ++f) {
    const bool is_new = f == 0 || tables[f] != tables[f - 1];
    if (is_new) bags.push_back(0);
    bags.back() += context.strides[f];
    context.space_of.push_back(bags.size() - 1);
  }
  const jagged::UniqueIds unique = jagged::unique_ids(given.lengths(), given.values(), bags);
  jagged::KeyedJaggedFields fields;
  fields.lengths = unique.lengths;
  fields.stride_per_key_per_rank = given.stride_per_key_per_rank();
  if (!given.variable_stride_per_key()) fields.stride = given.stride();
  context.features = KeyedJaggedTensor(given.keys(), unique.ids, fields);
  std::vector<std::int64_t> first(bags.size(), 0);  // id of each space
  for (std::size_t f = tables.size(); f-- > 0;) {
    first[context.space_of[f]] = context.features.offset_per_key()[f];
  }
  std::vector<at::Tensor> places;
  for (std::size_t f = 0; f < tables.size(); ++f) {
    places.push_back(
        unique.reverse_index.narrow(0, given.offset_per_key()[f], given.length_per_key()[f]) -
        first[context.space_of[f]]);
  }
  context.place_in_space = at::cat(places);
  context.given = given;
  std::iota(context.places.begin(), context.places.end(), 0);
}

std::shared_ptr<DistContext> InputSender::prepare(const KeyedJaggedTensor& features) const {
  auto context = std::make_shared<DistContext>(features);
  try {
    context->fault = find_fault(*context);
  } catch (const c10::Error& error) {  // features that do not hold what they should
    context->fault = {Fault::Kind::kValue, error.what_without_backtrace()};
  }
  if (context->fault.kind != Fault::Kind::kNone) {
    context->fault.text =
        text_of(layout_->operation, ": on rank ", group_.rank(), ", ", context->fault.text);
  }
  const bool is_good = context->fault.kind == Fault::Kind::kNone;
  const bool has_weights = options_.is_weighted && !options_.weights_come_later;
  context->is_recorded = at::GradMode::is_enabled();
  context->wants_weight_gradient =
      is_good && has_weights && context->is_recorded && features.weights().requires_grad();
  context->call =
      text_of(layout_->operation, " of table '", layout_->tables[0].name, "' and ",
              layout_->tables.size() - 1, " more, ids of ", features.values().scalar_type(), ", ",
              context->is_recorded ? "with" : "without", " a record for backward",
              context->wants_weight_gradient ? " and gradients of the weights" : "");
  context->sent.values_per_rank.assign(static_cast<std::size_t>(group_.size()), 0);
  context->sent.lengths_per_rank = context->sent.values_per_rank;
  if (is_good) {
    if (options_.sends_ids_once) remove_repeated_ids(*context);
    const bool needs_source =
        options_.needs_source || options_.weights_come_later || context->wants_weight_gradient;
    context->sent =
        arrangement_.arrange(context->features, context->places, has_weights, needs_source);
  }
  return context;
}

std::int64_t InputSender::message_size() const noexcept { return kHeader + most_routes_; }

void InputSender::write_message(const DistContext& context, std::int64_t* message,
                                std::int64_t columns, std::int64_t column) const {
  // A batch with a fault has no sizes, or not all.
  const bool is_good = context.fault.kind == Fault::Kind::kNone;
  for (std::size_t rank = 0; rank < layout_->routes.size(); ++rank) {
    std::int64_t* row = message + static_cast<std::int64_t>(rank) * columns + column;
    row[kCall] = static_cast<std::int64_t>(comm::detail::hash_of(context.call));
    row[kStatus] = static_cast<std::int64_t>(context.fault.kind);
    row[kNumValues] = context.sent.values_per_rank[rank];
    row += kHeader;
    for (const Route& route : layout_->routes[rank]) {
      *row++ = is_good ? context.strides[route.feature] : 0;
    }
  }
}

bool InputSender::read_message(DistContext& context, const std::int64_t* message,
                               std::int64_t columns, std::int64_t column) const {
  bool is_good = true;
  const auto num_routes =
      static_cast<std::ptrdiff_t>(layout_->routes[static_cast<std::size_t>(group_.rank())].size());
  for (int rank = 0; rank < group_.size(); ++rank) {
    const std::int64_t* row = message + rank * columns + column;
    is_good &= row[kCall] == message[column + kCall] && row[kStatus] == 0;
    context.received_values.push_back(row[kNumValues]);
    context.batches.emplace_back(row + kHeader, row + kHeader + num_routes);
  }
  return is_good;
}

void InputSender::raise(const DistContext& context) const {
  raise_together(layout_->operation, context.fault, context.call, group_);
}

Awaitable<at::Tensor> InputSender::exchange_weights(const DistContext& context) const {
  // Rows bring gradients that are divided already; those of the weights are not to be.
  const double factor = 1.0 / gradient_factor(group_);
  at::Tensor own = context.features.weights().to(at::kFloat);
  if (context.sent.source.defined()) own = own.index_select(0, context.sent.source);
  return exchange_flat(own, context.sent.values_per_rank, context.received_values, group_, {},
                       factor);
}

void InputSender::send_weights(DistContext& context, const at::Tensor& weights) const {
  TESSERA_CHECK_VALUE(weights.defined() && weights.numel() == context.features.values().numel(),
                      layout_->operation, ": there are ", weights.defined() ? weights.numel() : 0,
                      " weights for ", context.features.values().numel(), " ids.");
  const at::AutoGradMode recorded(context.is_recorded);
  context.features = context.features.with_weights(weights);
  if (layout_->has_routes) context.weights = exchange_weights(context).wait();
}

Awaitable<DistributedInput> InputSender::send(const std::shared_ptr<DistContext>& context) const {
  if (!layout_->has_routes) {
    context->lengths = context->sent.lengths;
    context->ids = context->sent.values;
    return comm::NoWait<DistributedInput>(DistributedInput{context});
  }
  Sizes received_lengths;
  for (const Sizes& rank : context->batches) received_lengths.push_back(total(rank));
  const ArrangedIds& sent = context->sent;
  const auto lengths = exchange_rows(sent.lengths, sent.lengths_per_rank, group_, received_lengths);
  const auto ids =
      exchange_rows(sent.values, sent.values_per_rank, group_, context->received_values);
  std::vector<Awaitable<at::Tensor>> weights;
  if (context->wants_weight_gradient) {
    const at::AutoGradMode recorded(true);
    weights.push_back(exchange_weights(*context));
  } else if (options_.is_weighted && !options_.weights_come_later) {
    weights.push_back(
        exchange_rows(sent.weights, sent.values_per_rank, group_, context->received_values));
  }
  return Awaitable<DistributedInput>([context, lengths, ids, weights] {
    const at::AutoGradMode recorded(context->is_recorded);
    context->lengths = lengths.wait();
    context->ids = ids.wait();
    if (!weights.empty()) context->weights = weights[0].wait();
    return DistributedInput{context};
  });
}

}  // namespace tessera::sharding
