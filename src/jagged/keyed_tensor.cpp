#include "tessera/jagged/keyed_tensor.h"

#include <numeric>

#include <ATen/Functions.h>

#include "jagged/text.h"
#include "tessera/core/check.h"

namespace tessera::jagged {

KeyedTensor::KeyedTensor(std::vector<std::string> keys, std::vector<std::int64_t> length_per_key,
                         at::Tensor values, std::int64_t key_dim)
    : keys_(std::move(keys)),
      length_per_key_(std::move(length_per_key)),
      offset_per_key_(length_per_key_.size() + 1, 0),
      values_(std::move(values)),
      key_dim_(key_dim) {
  TESSERA_CHECK_VALUE(keys_.size() == length_per_key_.size(), "jagged.keyed_tensor: there are ",
                      keys_.size(), " keys and ", length_per_key_.size(), " lengths.");
  std::partial_sum(length_per_key_.begin(), length_per_key_.end(), offset_per_key_.begin() + 1);
  TESSERA_CHECK_VALUE(key_dim_ >= 0 && key_dim_ < values_.dim(),
                      "jagged.keyed_tensor: there is no "
                      "dimension ",
                      key_dim_, " among ", values_.dim(), ".");
  TESSERA_CHECK_VALUE(offset_per_key_.back() == values_.size(key_dim_),
                      "jagged.keyed_tensor: the keys have ", offset_per_key_.back(),
                      " columns, the values ", values_.size(key_dim_), ".");
  for (std::size_t i = 0; i < keys_.size(); ++i) index_[keys_[i]] = i;
}

KeyedTensor KeyedTensor::from_tensor_list(std::vector<std::string> keys,
                                          const std::vector<at::Tensor>& tensors,
                                          std::int64_t key_dim, std::int64_t cat_dim) {
  TESSERA_CHECK_VALUE(!tensors.empty(), "jagged.keyed_tensor: there are no tensors.");
  std::vector<std::int64_t> lengths;
  lengths.reserve(tensors.size());
  for (const auto& tensor : tensors) lengths.push_back(tensor.size(key_dim));
  return KeyedTensor(std::move(keys), std::move(lengths), at::cat(tensors, cat_dim), key_dim);
}

std::int64_t KeyedTensor::size_in_bytes() const {
  return values_.numel() * static_cast<std::int64_t>(values_.element_size());
}

bool KeyedTensor::has_key(const std::string& key) const { return index_.contains(key); }

at::Tensor KeyedTensor::operator[](const std::string& key) const {
  const auto found = index_.find(key);
  TESSERA_CHECK_INDEX(found != index_.end(), "jagged.keyed_tensor: there is no key '", key, "'.");
  return values_.narrow(key_dim_, offset_per_key_[found->second], length_per_key_[found->second]);
}

std::vector<at::Tensor> KeyedTensor::regroup(const std::vector<KeyedTensor>& keyed_tensors,
                                             const std::vector<std::vector<std::string>>& groups) {
  // Cut once: the gradient of all parts of a tensor is put together once, too. Taken one by one,
  // each part would give a gradient of the size of the whole.
  std::map<std::string, at::Tensor> holder;
  for (const auto& keyed : keyed_tensors) {
    const auto parts = keyed.values_.split_with_sizes(keyed.length_per_key_, keyed.key_dim_);
    for (std::size_t i = 0; i < parts.size(); ++i) holder[keyed.keys_[i]] = parts[i];
  }
  std::vector<at::Tensor> grouped;
  grouped.reserve(groups.size());
  for (const auto& group : groups) {
    std::vector<at::Tensor> columns;
    columns.reserve(group.size());
    for (const auto& key : group) {
      const auto found = holder.find(key);
      TESSERA_CHECK_INDEX(found != holder.end(), "jagged.regroup: none of the ",
                          keyed_tensors.size(), " keyed tensors has a key '", key, "'.");
      columns.push_back(found->second);
    }
    TESSERA_CHECK_VALUE(!keyed_tensors.empty(), "jagged.regroup: there are no keyed tensors.");
    const KeyedTensor& first = keyed_tensors[0];
    grouped.push_back(columns.empty() ? first.values_.narrow(first.key_dim_, 0, 0)
                                      : at::cat(columns, first.key_dim_));
  }
  return grouped;
}

KeyedTensor KeyedTensor::to(c10::Device device, bool non_blocking) const {
  return KeyedTensor(keys_, length_per_key_,
                     values_.to(values_.options().device(device), non_blocking), key_dim_);
}

void KeyedTensor::record_stream(c10::Stream stream) const {
  at::Tensor(values_).record_stream(stream);
}

std::string KeyedTensor::str() const {
  if (keys_.empty()) return "KeyedTensor()\n";
  std::string text = "KeyedTensor({\n";
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    const at::Tensor columns =
        values_.narrow(key_dim_, offset_per_key_[i], length_per_key_[i]).cpu();
    if (i > 0) text.append(",\n");
    text.append("    \"").append(keys_[i]).append("\": ");
    text.append(detail::rows_text(columns, 0, columns.size(0)));
  }
  return text.append("\n})\n");
}

}  // namespace tessera::jagged
