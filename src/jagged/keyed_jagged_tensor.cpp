#include "tessera/jagged/keyed_jagged_tensor.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <ATen/Functions.h>

#include "jagged/composed.h"
#include "jagged/keyed_jagged_state.h"
#include "jagged/text.h"
#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged {
namespace {

std::vector<std::int64_t> running_sums(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> sums(sizes.size() + 1, 0);
  std::partial_sum(sizes.begin(), sizes.end(), sums.begin() + 1);
  return sums;
}

std::vector<std::int64_t> to_vector(const at::Tensor& numbers) {
  const at::Tensor wide = numbers.cpu().to(at::kLong).contiguous();
  const auto* begin = wide.const_data_ptr<std::int64_t>();
  return {begin, begin + wide.numel()};
}

// The number of bags that lengths or offsets speak of.
std::int64_t num_bags(const KeyedJaggedFields& fields) {
  return fields.lengths.defined() ? fields.lengths.numel() : fields.offsets.numel() - 1;
}

KeyedJaggedTensor synced(KeyedJaggedTensor made) {
  made.sync();
  return made;
}

// Whether `tensor` is numbers in host memory, and not a stand-in for some that a trace follows.
bool is_readable(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.key_set().has_any(c10::python_ks) &&
         !tensor.key_set().has(c10::DispatchKey::Functionalize) && tensor.has_storage() &&
         (tensor.numel() == 0 || tensor.storage().data() != nullptr);
}

template <typename T>
bool are_good(const at::Tensor& numbers, bool are_offsets) {
  const T* const begin = numbers.const_data_ptr<T>();
  const T* const end = begin + numbers.numel();
  // From below zero, a difference may be more than a T holds.
  if (are_offsets) return begin != end && *begin >= 0 && std::is_sorted(begin, end);
  T smallest = 0;
  for (const T* number = begin; number != end; ++number) smallest = std::min(smallest, *number);
  return smallest >= 0;
}

}  // namespace

// See Note [Good lengths].
bool KeyedJaggedTensor::State::has_good_lengths() {
  const at::Tensor& told = told_lengths();
  if (told.is_same(good_lengths) && told._version() == good_version) return true;
  if (!is_readable(told)) return false;
  const bool are_offsets = !lengths.defined();
  return told.scalar_type() == at::kInt ? are_good<std::int32_t>(told, are_offsets)
                                        : are_good<std::int64_t>(told, are_offsets);
}

void KeyedJaggedTensor::State::note_good_lengths() {
  const at::Tensor& told = told_lengths();
  if (told.is_inference()) return;  // nobody would see that it is written to
  good_lengths = told;
  good_version = told._version();
}

KeyedJaggedTensor::KeyedJaggedTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}

KeyedJaggedTensor::KeyedJaggedTensor(std::vector<std::string> keys, at::Tensor values,
                                     KeyedJaggedFields fields)
    : state_(std::make_shared<State>()) {
  fields.lengths = detail::integers_if_empty(std::move(fields.lengths));
  fields.offsets = detail::integers_if_empty(std::move(fields.offsets));
  if (fields.offsets.defined() && fields.offsets.numel() == 0) {
    if (!fields.lengths.defined()) fields.lengths = at::empty({0}, fields.offsets.options());
    fields.offsets.reset();
  }
  TESSERA_CHECK_VALUE(values.defined() && values.dim() >= 1,
                      "jagged: the values must have at least one dimension.");
  TESSERA_CHECK_VALUE(fields.lengths.defined() || fields.offsets.defined(),
                      "jagged: neither lengths nor offsets are given.");
  if (fields.lengths.defined()) detail::check_integers(fields.lengths, "jagged", "the lengths");
  if (fields.offsets.defined()) detail::check_integers(fields.offsets, "jagged", "the offsets");
  TESSERA_CHECK_VALUE(!fields.weights.defined() || fields.weights.size(0) == values.size(0),
                      "jagged: there are ", fields.weights.size(0), " weights for ", values.size(0),
                      " values.");
  TESSERA_CHECK_VALUE(!fields.lengths.defined() || !fields.offsets.defined() ||
                          fields.offsets.numel() == fields.lengths.numel() + 1,
                      "jagged: there are ", fields.lengths.numel(), " lengths and ",
                      fields.offsets.numel(), " offsets; there must be one offset more.");
  const auto num_keys = static_cast<std::int64_t>(keys.size());
  const std::int64_t bags = num_bags(fields);
  State& state = *state_;
  if (fields.stride_per_key_per_rank.defined()) {
    const at::Tensor& strides = fields.stride_per_key_per_rank;
    TESSERA_CHECK_VALUE(
        !strides.is_floating_point() && strides.dim() == 2 && strides.size(0) == num_keys,
        "jagged: stride_per_key_per_rank must be integers, [keys, ranks]; it is ",
        strides.scalar_type(), " ", strides.sizes(), " for ", num_keys, " keys.");
    state.stride_per_key_per_rank = strides.cpu().to(at::kLong).contiguous();
    state.stride_per_key = to_vector(state.stride_per_key_per_rank.sum(1));
    const std::int64_t sum =
        std::accumulate(state.stride_per_key.begin(), state.stride_per_key.end(), std::int64_t{0});
    TESSERA_CHECK_VALUE(sum == bags, "jagged: the strides of the keys add up to ", sum,
                        ", but there are ", bags, " lengths.");
    const bool has_inverse = fields.inverse_indices && fields.inverse_indices->second.numel() > 0;
    if (has_inverse) {
      state.stride = fields.inverse_indices->second.size(-1);
    } else if (fields.stride) {
      state.stride = *fields.stride;
    } else if (num_keys > 0) {
      state.stride = *std::max_element(state.stride_per_key.begin(), state.stride_per_key.end());
    }
  } else {
    if (num_keys == 0) {
      TESSERA_CHECK_VALUE(bags <= 0, "jagged: there are ", bags, " lengths but no keys.");
      state.stride = fields.stride.value_or(0);
    } else {
      TESSERA_CHECK_VALUE(bags % num_keys == 0, "jagged: ", bags,
                          " lengths cannot be divided among ", num_keys, " keys.");
      state.stride = bags / num_keys;
      TESSERA_CHECK_VALUE(!fields.stride || *fields.stride == state.stride,
                          "jagged: the stride is ", *fields.stride, ", but ", bags, " lengths of ",
                          num_keys, " keys make it ", state.stride, ".");
    }
    state.stride_per_key.assign(keys.size(), state.stride);
  }
  if (fields.inverse_indices) {
    const auto& [names, rows] = *fields.inverse_indices;
    TESSERA_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == static_cast<std::int64_t>(names.size()),
                        "jagged: inverse indices of ", names.size(), " features have shape ",
                        rows.sizes(), ", not [features, batch].");
  }
  if (fields.length_per_key) {
    TESSERA_CHECK_VALUE(fields.length_per_key->size() == keys.size(), "jagged: there are ",
                        fields.length_per_key->size(), " lengths per key for ", num_keys, " keys.");
  }
  state.lengths_offset_per_key = running_sums(state.stride_per_key);
  for (std::size_t i = 0; i < keys.size(); ++i) state.index[keys[i]] = i;
  state.keys = std::move(keys);
  state.values = std::move(values);
  state.weights = std::move(fields.weights);
  state.lengths = std::move(fields.lengths);
  state.offsets = std::move(fields.offsets);
  state.inverse_indices = std::move(fields.inverse_indices);
  state.length_per_key = std::move(fields.length_per_key);
}

KeyedJaggedTensor KeyedJaggedTensor::from_lengths_sync(std::vector<std::string> keys,
                                                       at::Tensor values, at::Tensor lengths,
                                                       KeyedJaggedFields fields) {
  fields.lengths = std::move(lengths);
  return synced({std::move(keys), std::move(values), std::move(fields)});
}

KeyedJaggedTensor KeyedJaggedTensor::from_offsets_sync(std::vector<std::string> keys,
                                                       at::Tensor values, at::Tensor offsets,
                                                       KeyedJaggedFields fields) {
  fields.offsets = std::move(offsets);
  return synced({std::move(keys), std::move(values), std::move(fields)});
}

KeyedJaggedTensor KeyedJaggedTensor::empty(bool is_weighted, const at::TensorOptions& values,
                                           at::ScalarType weights_type,
                                           at::ScalarType lengths_type) {
  return KeyedJaggedTensor(
      {}, at::empty({0}, values),
      {.lengths = at::empty({0}, values.dtype(lengths_type)),
       .weights = is_weighted ? at::empty({0}, values.dtype(weights_type)) : at::Tensor()});
}

KeyedJaggedTensor KeyedJaggedTensor::empty_like(const KeyedJaggedTensor& other) {
  const State& state = *other.state_;
  KeyedJaggedFields fields;
  fields.lengths = at::empty({0}, other.lengths().options());
  if (state.weights.defined()) fields.weights = state.weights.narrow(0, 0, 0);
  fields.stride = state.stride;
  if (state.stride_per_key_per_rank.defined()) {
    fields.stride_per_key_per_rank = state.stride_per_key_per_rank.narrow(0, 0, 0);
  }
  return KeyedJaggedTensor({}, state.values.narrow(0, 0, 0), std::move(fields));
}

const std::vector<std::string>& KeyedJaggedTensor::keys() const noexcept { return state_->keys; }
const at::Tensor& KeyedJaggedTensor::values() const noexcept { return state_->values; }

const at::Tensor& KeyedJaggedTensor::weights() const {
  TESSERA_CHECK_VALUE(state_->weights.defined(), "jagged: there are no weights.");
  return state_->weights;
}

const at::Tensor& KeyedJaggedTensor::weights_or_none() const noexcept { return state_->weights; }

const at::Tensor& KeyedJaggedTensor::lengths() const {
  if (!state_->lengths.defined()) {
    const bool are_good = !state_->offsets.is_cpu() && state_->has_good_lengths();
    state_->lengths = offsets_to_lengths(state_->offsets);
    if (are_good) state_->note_good_lengths();
  }
  return state_->lengths;
}

const at::Tensor& KeyedJaggedTensor::lengths_or_none() const noexcept { return state_->lengths; }

const at::Tensor& KeyedJaggedTensor::offsets() const {
  if (!state_->offsets.defined()) {
    // On CUDA the sums themselves are not looked at; their last is the number of values.
    TESSERA_CHECK_VALUE(state_->lengths.scalar_type() != at::kInt ||
                            state_->values.size(0) <= std::numeric_limits<std::int32_t>::max(),
                        "jagged: ", state_->values.size(0),
                        " values are more than an int32 can count. Use int64 lengths.");
    state_->offsets = lengths_to_offsets(state_->lengths);
  }
  return state_->offsets;
}

const at::Tensor& KeyedJaggedTensor::offsets_or_none() const noexcept { return state_->offsets; }

c10::Device KeyedJaggedTensor::device() const { return state_->values.device(); }

std::int64_t KeyedJaggedTensor::size_in_bytes() const {
  return detail::bytes_of(state_->values) + detail::bytes_of(state_->weights) +
         detail::bytes_of(state_->lengths) + detail::bytes_of(state_->offsets) +
         (state_->inverse_indices ? detail::bytes_of(state_->inverse_indices->second) : 0);
}

std::int64_t KeyedJaggedTensor::stride() const { return state_->stride; }

const std::vector<std::int64_t>& KeyedJaggedTensor::stride_per_key() const {
  return state_->stride_per_key;
}

bool KeyedJaggedTensor::variable_stride_per_key() const noexcept {
  return state_->stride_per_key_per_rank.defined();
}

const at::Tensor& KeyedJaggedTensor::stride_per_key_per_rank() const noexcept {
  return state_->stride_per_key_per_rank;
}

const InverseIndices& KeyedJaggedTensor::inverse_indices() const {
  TESSERA_CHECK_VALUE(state_->inverse_indices, "jagged: there are no inverse indices.");
  return *state_->inverse_indices;
}

const std::optional<InverseIndices>& KeyedJaggedTensor::inverse_indices_or_none() const noexcept {
  return state_->inverse_indices;
}

const std::vector<std::int64_t>& KeyedJaggedTensor::length_per_key() const {
  State& state = *state_;
  if (!state.length_per_key) {
    const std::size_t num_keys = state.keys.size();
    std::vector<std::int64_t> per_key(num_keys, 0);
    if (state.values.is_meta()) {
      // Nobody can know them: the values are shared out evenly, so that shapes can be followed.
      const auto keys = static_cast<std::int64_t>(num_keys);
      for (std::int64_t k = 0; k < keys; ++k) {
        per_key[static_cast<std::size_t>(k)] =
            state.values.size(0) / keys + (k < state.values.size(0) % keys ? 1 : 0);
      }
    } else if (state.offsets.defined() || variable_stride_per_key()) {
      // Differences of the offsets where keys begin: a few numbers, not all lengths.
      const at::Tensor index =
          at::tensor(state.lengths_offset_per_key, at::TensorOptions(at::kLong));
      const auto begins = to_vector(offsets().index_select(0, index.to(offsets().device())));
      for (std::size_t k = 0; k < num_keys; ++k) per_key[k] = begins[k + 1] - begins[k];
    } else if (state.stride > 0 && num_keys > 0) {
      per_key = to_vector(state.lengths.reshape({static_cast<std::int64_t>(num_keys), state.stride})
                              .sum(1, false, at::kLong));
    }
    const std::int64_t total = std::accumulate(per_key.begin(), per_key.end(), std::int64_t{0});
    TESSERA_CHECK_VALUE(total == state.values.size(0), "jagged: the lengths add up to ", total,
                        ", but there are ", state.values.size(0), " values.");
    state.length_per_key = std::move(per_key);
  }
  return *state.length_per_key;
}

const std::vector<std::int64_t>& KeyedJaggedTensor::offset_per_key() const {
  if (!state_->offset_per_key) state_->offset_per_key = running_sums(length_per_key());
  return *state_->offset_per_key;
}

const std::vector<std::int64_t>& KeyedJaggedTensor::lengths_offset_per_key() const {
  return state_->lengths_offset_per_key;
}

bool KeyedJaggedTensor::is_synced() const noexcept { return state_->length_per_key.has_value(); }

const KeyedJaggedTensor& KeyedJaggedTensor::sync() const {
  offset_per_key();
  return *this;
}

const KeyedJaggedTensor& KeyedJaggedTensor::unsync() const {
  state_->length_per_key.reset();
  state_->offset_per_key.reset();
  return *this;
}

bool KeyedJaggedTensor::has_key(const std::string& key) const {
  return state_->index.contains(key);
}

std::size_t KeyedJaggedTensor::index_of(const std::string& key) const {
  const auto found = state_->index.find(key);
  TESSERA_CHECK_INDEX(found != state_->index.end(), "jagged: there is no key '", key, "' among ",
                      state_->keys.size(), " keys.");
  return found->second;
}

JaggedTensor KeyedJaggedTensor::operator[](const std::string& key) const {
  return feature(index_of(key));
}

JaggedTensor KeyedJaggedTensor::feature(std::size_t index) const {
  TESSERA_CHECK_INDEX(index < state_->keys.size(), "jagged: there is no key ", index, " among ",
                      state_->keys.size(), ".");
  const std::int64_t begin = offset_per_key()[index];
  const std::int64_t count = length_per_key()[index];
  return JaggedTensor(
      state_->values.narrow(0, begin, count),
      state_->weights.defined() ? state_->weights.narrow(0, begin, count) : at::Tensor(),
      lengths().reshape({-1}).narrow(0, state_->lengths_offset_per_key[index],
                                     state_->stride_per_key[index]));
}

std::vector<std::pair<std::string, JaggedTensor>> KeyedJaggedTensor::to_dict() const {
  std::vector<std::pair<std::string, JaggedTensor>> features;
  features.reserve(state_->index.size());
  for (std::size_t i = 0; i < state_->keys.size(); ++i) {
    const auto& key = state_->keys[i];
    const auto is_it = [&](const auto& entry) { return entry.first == key; };
    if (std::find_if(features.begin(), features.end(), is_it) == features.end()) {
      features.emplace_back(key, feature(state_->index.at(key)));
    }
  }
  return features;
}

KeyedJaggedTensor KeyedJaggedTensor::flatten_lengths() const {
  KeyedJaggedFields fields = state_->fields();
  fields.lengths = lengths().reshape({-1});
  return KeyedJaggedTensor(state_->keys, state_->values, std::move(fields));
}

KeyedJaggedTensor KeyedJaggedTensor::with_weights(at::Tensor weights) const {
  KeyedJaggedFields fields = state_->fields();
  fields.weights = std::move(weights);
  return KeyedJaggedTensor(state_->keys, state_->values, std::move(fields));
}

KeyedJaggedTensor KeyedJaggedTensor::with_values(at::Tensor values) const {
  TESSERA_CHECK_VALUE(values.size(0) == state_->values.size(0), "jagged: there are ",
                      values.size(0), " new values for ", state_->values.size(0), ".");
  return KeyedJaggedTensor(state_->keys, std::move(values), state_->fields());
}

namespace {

template <typename Move>
KeyedJaggedFields moved(KeyedJaggedFields fields, const Move& move) {
  if (fields.lengths.defined()) fields.lengths = move(fields.lengths);
  if (fields.offsets.defined()) fields.offsets = move(fields.offsets);
  if (fields.weights.defined()) fields.weights = move(fields.weights);
  if (fields.inverse_indices) fields.inverse_indices->second = move(fields.inverse_indices->second);
  return fields;
}

}  // namespace

KeyedJaggedTensor KeyedJaggedTensor::to(c10::Device device, bool non_blocking,
                                        std::optional<at::ScalarType> weights_type) const {
  const auto move = [&](const at::Tensor& tensor) {
    return tensor.to(tensor.options().device(device), non_blocking);
  };
  KeyedJaggedFields fields = moved(state_->fields(), move);
  if (weights_type && fields.weights.defined()) fields.weights = fields.weights.to(*weights_type);
  const bool are_good = !device.is_cpu() && state_->has_good_lengths();
  KeyedJaggedTensor there(state_->keys, move(state_->values), std::move(fields));
  if (are_good) there.state_->note_good_lengths();
  return there;
}

KeyedJaggedTensor KeyedJaggedTensor::pin_memory() const {
  const auto pin = [](const at::Tensor& tensor) { return tensor.pin_memory(); };
  return KeyedJaggedTensor(state_->keys, pin(state_->values), moved(state_->fields(), pin));
}

void KeyedJaggedTensor::record_stream(c10::Stream stream) const {
  const auto record = [&](const at::Tensor& tensor) {
    if (tensor.defined()) at::Tensor(tensor).record_stream(stream);
  };
  record(state_->values);
  record(state_->weights);
  record(state_->lengths);
  record(state_->offsets);
  if (state_->inverse_indices) record(state_->inverse_indices->second);
}

std::string KeyedJaggedTensor::str() const {
  if (state_->keys.empty()) return "KeyedJaggedTensor()\n";
  const at::Tensor offsets = this->offsets().cpu().to(at::kLong);
  const at::Tensor values = state_->values.cpu();
  const at::Tensor weights = state_->weights.defined() ? state_->weights.cpu() : at::Tensor();
  std::string text = "KeyedJaggedTensor({\n";
  for (std::size_t i = 0; i < state_->keys.size(); ++i) {
    const std::int64_t begin = state_->lengths_offset_per_key[i];
    const std::int64_t end = state_->lengths_offset_per_key[i + 1];
    if (i > 0) text.append(",\n");
    text.append("    \"").append(state_->keys[i]).append("\": ");
    if (weights.defined()) text.append("{\n        \"values\": ");
    text.append(detail::bags_text(values, offsets, begin, end));
    if (weights.defined()) {
      text.append(",\n        \"weights\": ");
      text.append(detail::bags_text(weights, offsets, begin, end)).append("\n    }");
    }
  }
  return text.append("\n})\n");
}

bool kjt_is_equal(const KeyedJaggedTensor& a, const KeyedJaggedTensor& b) {
  if (a.keys() != b.keys() || a.stride() != b.stride() ||
      a.stride_per_key() != b.stride_per_key()) {
    return false;
  }
  const auto whole = [](const KeyedJaggedTensor& kjt) {
    return JaggedTensor(kjt.values(), kjt.weights_or_none(), kjt.lengths().reshape({-1}));
  };
  return jt_is_equal(whole(a), whole(b));
}

}  // namespace tessera::jagged
