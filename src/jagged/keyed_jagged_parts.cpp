// KeyedJaggedTensor cut, joined, reordered, and rebuilt after an exchange between ranks.

#include <algorithm>
#include <functional>
#include <numeric>

#include <ATen/Functions.h>

#include "jagged/keyed_jagged_state.h"
#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged {
namespace {

/// What `of_part` finds in every part, in one tensor.
template <typename OfPart>
at::Tensor joined(const std::vector<KeyedJaggedTensor>& parts, OfPart of_part) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(parts.size());
  for (const KeyedJaggedTensor& part : parts) tensors.push_back(std::invoke(of_part, part));
  return at::cat(tensors);
}

/// What `of_part` finds in every part, in one list.
template <typename Item, typename OfPart>
std::vector<Item> listed(const std::vector<KeyedJaggedTensor>& parts, OfPart of_part) {
  std::vector<Item> items;
  for (const KeyedJaggedTensor& part : parts) {
    const std::vector<Item>& own = std::invoke(of_part, part);
    items.insert(items.end(), own.begin(), own.end());
  }
  return items;
}

}  // namespace

KeyedJaggedTensor KeyedJaggedTensor::from_jt_dict(
    const std::vector<std::pair<std::string, JaggedTensor>>& features) {
  TESSERA_CHECK_VALUE(!features.empty(), "jagged.from_jt_dict: there are no features.");
  std::vector<std::string> keys;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> lengths;
  std::vector<at::Tensor> weights;
  std::vector<std::int64_t> strides;
  for (const auto& [key, feature] : features) {
    keys.push_back(key);
    values.push_back(feature.values());
    lengths.push_back(feature.lengths());
    strides.push_back(feature.lengths().numel());
    if (feature.weights_or_none().defined()) weights.push_back(feature.weights());
    TESSERA_CHECK_VALUE(weights.empty() || weights.size() == keys.size(),
                        "jagged.from_jt_dict: some features have weights and others have none, '",
                        key, "' among them. Give weights to all or to none.");
  }
  const bool is_equal = std::all_of(strides.begin(), strides.end(),
                                    [&](std::int64_t stride) { return stride == strides[0]; });
  KeyedJaggedFields fields;
  if (!weights.empty()) fields.weights = at::cat(weights);
  if (!is_equal) {
    fields.stride_per_key_per_rank = at::tensor(strides, at::TensorOptions(at::kLong)).unsqueeze(1);
  }
  return from_lengths_sync(std::move(keys), at::cat(values), at::cat(lengths), std::move(fields));
}

KeyedJaggedTensor KeyedJaggedTensor::concat(const std::vector<KeyedJaggedTensor>& parts) {
  TESSERA_CHECK_VALUE(!parts.empty(), "jagged.concat: there is nothing to put together.");
  const KeyedJaggedTensor& first = parts[0];
  const bool is_weighted = first.weights_or_none().defined();
  const bool is_variable = first.variable_stride_per_key();
  const bool has_inverse = first.inverse_indices_or_none().has_value();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const KeyedJaggedTensor& part = parts[i];
    TESSERA_CHECK_VALUE(part.weights_or_none().defined() == is_weighted, "jagged.concat: part ", i,
                        is_weighted ? " has no weights" : " has weights", ", unlike part 0.");
    TESSERA_CHECK_VALUE(part.variable_stride_per_key() == is_variable, "jagged.concat: part ", i,
                        is_variable ? " has no variable batch" : " has a variable batch",
                        ", unlike part 0.");
    TESSERA_CHECK_VALUE(is_variable || part.stride() == first.stride(), "jagged.concat: part ", i,
                        " has a batch of ", part.stride(), ", part 0 of ", first.stride(), ".");
    TESSERA_CHECK_VALUE(
        part.inverse_indices_or_none().has_value() == has_inverse, "jagged.concat: part ", i,
        has_inverse ? " has no inverse indices" : " has inverse indices", ", unlike part 0.");
  }
  KeyedJaggedFields fields;
  fields.lengths = joined(parts, [](const auto& part) { return part.lengths().reshape({-1}); });
  if (is_weighted) fields.weights = joined(parts, &KeyedJaggedTensor::weights);
  if (is_variable) {
    fields.stride_per_key_per_rank = joined(parts, &KeyedJaggedTensor::stride_per_key_per_rank);
  } else {
    fields.stride = first.stride();
  }
  if (has_inverse) {
    const auto names = [](const auto& part) -> const auto& { return part.inverse_indices().first; };
    const auto rows = [](const auto& part) { return part.inverse_indices().second; };
    fields.inverse_indices.emplace(listed<std::string>(parts, names), joined(parts, rows));
  }
  if (std::all_of(parts.begin(), parts.end(), std::mem_fn(&KeyedJaggedTensor::is_synced))) {
    fields.length_per_key = listed<std::int64_t>(parts, &KeyedJaggedTensor::length_per_key);
  }
  return KeyedJaggedTensor(listed<std::string>(parts, &KeyedJaggedTensor::keys),
                           joined(parts, &KeyedJaggedTensor::values), std::move(fields));
}

std::vector<KeyedJaggedTensor> KeyedJaggedTensor::split(
    const std::vector<std::int64_t>& segments) const {
  const State& state = *state_;
  const auto num_keys = static_cast<std::int64_t>(state.keys.size());
  const std::int64_t sum = std::accumulate(segments.begin(), segments.end(), std::int64_t{0});
  const bool is_negative =
      std::any_of(segments.begin(), segments.end(), [](std::int64_t size) { return size < 0; });
  TESSERA_CHECK_VALUE(!is_negative && sum <= num_keys, "jagged.split: the segments have ", sum,
                      " keys; there are ", num_keys, ".");
  std::vector<KeyedJaggedTensor> parts;
  parts.reserve(segments.size());
  std::size_t begin = 0;
  for (const std::int64_t size : segments) {
    const std::size_t end = begin + static_cast<std::size_t>(size);
    if (size == num_keys) {
      parts.push_back(*this);
    } else if (size == 0) {
      parts.push_back(empty_like(*this));
    } else {
      const std::int64_t from = offset_per_key()[begin];
      const std::int64_t count = offset_per_key()[end] - from;
      const std::int64_t first_length = state.lengths_offset_per_key[begin];
      KeyedJaggedFields fields;
      fields.lengths = lengths().reshape({-1}).narrow(
          0, first_length, state.lengths_offset_per_key[end] - first_length);
      if (state.weights.defined()) fields.weights = state.weights.narrow(0, from, count);
      if (variable_stride_per_key()) {
        fields.stride_per_key_per_rank =
            state.stride_per_key_per_rank.narrow(0, static_cast<std::int64_t>(begin), size);
      }
      fields.stride = state.stride;
      fields.length_per_key =
          std::vector<std::int64_t>(length_per_key().begin() + static_cast<std::ptrdiff_t>(begin),
                                    length_per_key().begin() + static_cast<std::ptrdiff_t>(end));
      parts.emplace_back(
          std::vector<std::string>(state.keys.begin() + static_cast<std::ptrdiff_t>(begin),
                                   state.keys.begin() + static_cast<std::ptrdiff_t>(end)),
          state.values.narrow(0, from, count), std::move(fields));
    }
    begin = end;
  }
  return parts;
}

KeyedJaggedTensor KeyedJaggedTensor::permute(const std::vector<std::int64_t>& indices) const {
  const State& state = *state_;
  const auto num_keys = static_cast<std::int64_t>(state.keys.size());
  std::vector<std::string> keys;
  std::vector<std::int64_t> per_key;
  for (const std::int64_t index : indices) {
    TESSERA_CHECK_INDEX(index >= 0 && index < num_keys, "jagged.permute: there is no key ", index,
                        " among ", num_keys, ".");
    keys.push_back(state.keys[static_cast<std::size_t>(index)]);
    per_key.push_back(length_per_key()[static_cast<std::size_t>(index)]);
  }
  KeyedJaggedFields fields;
  fields.lengths = permute_segments(lengths().reshape({-1}), state.stride_per_key, indices);
  if (state.weights.defined()) {
    fields.weights = permute_segments(state.weights, length_per_key(), indices);
  }
  if (variable_stride_per_key()) {
    fields.stride_per_key_per_rank = state.stride_per_key_per_rank.index_select(
        0, at::tensor(indices, at::TensorOptions(at::kLong)));
  }
  fields.stride = state.stride;
  fields.length_per_key = std::move(per_key);
  return KeyedJaggedTensor(std::move(keys),
                           permute_segments(state.values, length_per_key(), indices),
                           std::move(fields));
}

std::vector<std::string> KeyedJaggedTensor::dist_labels() const {
  std::vector<std::string> labels = {"lengths", "values"};
  if (variable_stride_per_key()) labels.emplace_back("strides");
  if (state_->weights.defined()) labels.emplace_back("weights");
  return labels;
}

std::vector<std::vector<std::int64_t>> KeyedJaggedTensor::dist_splits(
    const std::vector<std::int64_t>& key_splits) const {
  const std::int64_t sum = std::accumulate(key_splits.begin(), key_splits.end(), std::int64_t{0});
  TESSERA_CHECK_VALUE(sum == static_cast<std::int64_t>(state_->keys.size()),
                      "jagged.dist_splits: the destinations get ", sum, " keys; there are ",
                      state_->keys.size(), ".");
  std::vector<std::int64_t> strides;
  std::vector<std::int64_t> lengths;
  std::size_t key = 0;
  for (const std::int64_t count : key_splits) {
    const std::size_t end = key + static_cast<std::size_t>(count);
    strides.push_back(state_->lengths_offset_per_key[end] - state_->lengths_offset_per_key[key]);
    lengths.push_back(offset_per_key()[end] - offset_per_key()[key]);
    key = end;
  }
  std::vector<std::vector<std::int64_t>> splits = {strides, lengths};
  if (variable_stride_per_key()) splits.push_back(key_splits);
  if (state_->weights.defined()) splits.push_back(lengths);
  return splits;
}

std::vector<at::Tensor> KeyedJaggedTensor::dist_tensors() const {
  std::vector<at::Tensor> tensors = {lengths().reshape({-1}), state_->values};
  if (variable_stride_per_key()) {
    tensors.push_back(
        at::tensor(state_->stride_per_key, at::TensorOptions(at::kLong)).to(device()));
  }
  if (state_->weights.defined()) tensors.push_back(state_->weights);
  return tensors;
}

namespace {

// Sums of `lengths` over segments of `sizes` lengths, on the device of `lengths`.
at::Tensor segment_sums(const at::Tensor& lengths, const at::Tensor& sizes) {
  const at::Tensor offsets = lengths_to_offsets(lengths.to(at::kLong));
  const at::Tensor ends = sizes.to(at::kLong).cumsum(0).to(lengths.device());
  const at::Tensor begins = ends - sizes.to(at::kLong).to(lengths.device());
  return offsets.index_select(0, ends) - offsets.index_select(0, begins);
}

}  // namespace

KeyedJaggedTensor KeyedJaggedTensor::dist_init(std::vector<std::string> keys,
                                               const std::vector<at::Tensor>& tensors,
                                               const DistFields& fields) {
  const std::size_t num_plain = fields.variable_stride_per_key ? 3 : 2;
  TESSERA_CHECK_VALUE(tensors.size() == num_plain || tensors.size() == num_plain + 1,
                      "jagged.dist_init: there are ", tensors.size(), " tensors, not ", num_plain,
                      " or ", num_plain + 1, ".");
  at::Tensor lengths = tensors[0].reshape({-1});
  at::Tensor values = tensors[1];
  at::Tensor weights = tensors.size() > num_plain ? tensors.back() : at::Tensor();
  const auto num_keys = static_cast<std::int64_t>(keys.size());
  KeyedJaggedFields result;
  if (fields.variable_stride_per_key) {
    const at::Tensor& strides = tensors[2];
    TESSERA_CHECK_VALUE(strides.numel() == fields.num_workers * num_keys,
                        "jagged.dist_init: there are ", strides.numel(), " strides for ",
                        fields.num_workers, " ranks and ", num_keys, " keys.");
    at::Tensor per_rank = strides.view({fields.num_workers, num_keys}).t().cpu();
    if (fields.recat.defined() && num_keys > 0) {
      // Lengths move in segments of a rank's batch, values in segments of its elements.
      const at::Tensor sums = segment_sums(lengths, strides);
      values = permute_1d(fields.recat, sums, values, weights).values;
      if (weights.defined()) weights = permute_1d(fields.recat, sums, weights).values;
      lengths = permute_1d(fields.recat, strides, lengths).values;
    }
    if (per_rank.numel() == 0) {
      per_rank = at::zeros({num_keys, 1}, at::kLong);
    } else if (fields.stagger > 1) {
      const at::Tensor order =
          at::arange(fields.num_workers, at::kLong).view({fields.stagger, -1}).t().reshape({-1});
      per_rank = per_rank.index_select(1, order);
    }
    result.stride_per_key_per_rank = std::move(per_rank);
  } else {
    const auto& strides = fields.stride_per_rank;
    TESSERA_CHECK_VALUE(static_cast<int>(strides.size()) == fields.num_workers,
                        "jagged.dist_init: there are strides of ", strides.size(), " ranks, not ",
                        fields.num_workers, ".");
    const bool is_equal = std::all_of(strides.begin(), strides.end(),
                                      [&](std::int64_t stride) { return stride == strides[0]; });
    if (fields.recat.defined() && (!is_equal || strides[0] > 0)) {
      const JaggedParts moved =
          is_equal ? permute_2d(fields.recat, lengths.view({-1, strides[0]}), values, weights)
                   : permute_1d(fields.recat, lengths, values, weights);
      lengths = moved.lengths.reshape({-1});
      values = moved.values;
      weights = moved.weights;
    }
    result.stride = std::accumulate(strides.begin(), strides.end(), std::int64_t{0});
  }
  result.lengths = std::move(lengths);
  result.weights = std::move(weights);
  KeyedJaggedTensor made(std::move(keys), std::move(values), std::move(result));
  made.sync();
  return made;
}

}  // namespace tessera::jagged
