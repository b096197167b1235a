#include "tessera/jagged/jagged_tensor.h"

#include <limits>

#include <ATen/Functions.h>

#include "jagged/composed.h"
#include "jagged/text.h"
#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged {

namespace {

std::vector<at::Tensor> cut(const at::Tensor& data, const at::Tensor& offsets) {
  const at::Tensor begins = offsets.cpu().to(at::kLong);
  const auto* at = begins.const_data_ptr<std::int64_t>();
  std::vector<at::Tensor> bags;
  for (std::int64_t bag = 0; bag + 1 < begins.numel(); ++bag) {
    bags.push_back(data.slice(0, at[bag], at[bag + 1]));
  }
  return bags;
}

at::Tensor first_of_rows(const at::Tensor& dense, const at::Tensor& offsets) {
  return padded_dense_to_jagged(dense, offsets, offsets[-1].item<std::int64_t>());
}

bool is_close(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         at::allclose(a, b, 1e-5, 1e-8, /*equal_nan=*/false);
}

}  // namespace

JaggedTensor::JaggedTensor(at::Tensor values, at::Tensor weights, at::Tensor lengths,
                           at::Tensor offsets)
    : values_(std::move(values)),
      weights_(std::move(weights)),
      lengths_(detail::integers_if_empty(std::move(lengths))),
      offsets_(detail::integers_if_empty(std::move(offsets))) {
  if (offsets_.defined() && offsets_.numel() == 0 && lengths_.defined()) offsets_.reset();
  TESSERA_CHECK_VALUE(values_.defined() && values_.dim() >= 1,
                      "jagged: the values must have at least one dimension.");
  TESSERA_CHECK_VALUE(lengths_.defined() || offsets_.defined(),
                      "jagged: neither lengths nor offsets are given.");
  if (lengths_.defined()) detail::check_integers(lengths_, "jagged", "the lengths");
  if (offsets_.defined()) detail::check_integers(offsets_, "jagged", "the offsets");
  TESSERA_CHECK_VALUE(!weights_.defined() || weights_.size(0) == values_.size(0),
                      "jagged: there are ", weights_.size(0), " weights for ", values_.size(0),
                      " values.");
  TESSERA_CHECK_VALUE(
      !lengths_.defined() || !offsets_.defined() || offsets_.numel() == lengths_.numel() + 1,
      "jagged: there are ", lengths_.numel(), " lengths and ", offsets_.numel(),
      " offsets; there must be one offset more.");
}

JaggedTensor JaggedTensor::empty(bool is_weighted, const at::TensorOptions& values,
                                 at::ScalarType weights_type, at::ScalarType lengths_type) {
  return JaggedTensor(at::empty({0}, values),
                      is_weighted ? at::empty({0}, values.dtype(weights_type)) : at::Tensor(),
                      at::empty({0}, values.dtype(lengths_type)));
}

JaggedTensor JaggedTensor::from_dense(const std::vector<at::Tensor>& values,
                                      const std::vector<at::Tensor>& weights) {
  TESSERA_CHECK_VALUE(!values.empty(), "jagged.from_dense: there are no tensors.");
  std::vector<int> lengths;
  lengths.reserve(values.size());
  for (const auto& bag : values) lengths.push_back(static_cast<int>(bag.size(0)));
  return JaggedTensor(at::cat(values), weights.empty() ? at::Tensor() : at::cat(weights),
                      at::tensor(lengths, at::TensorOptions(at::kInt)).to(values[0].device()));
}

JaggedTensor JaggedTensor::from_dense_lengths(const at::Tensor& values, const at::Tensor& lengths,
                                              const at::Tensor& weights) {
  detail::check_integers(lengths, "jagged.from_dense_lengths", "the lengths");
  TESSERA_CHECK_VALUE(values.dim() >= 2 && values.size(0) == lengths.numel(),
                      "jagged.from_dense_lengths: the values have shape ", values.sizes(), " for ",
                      lengths.numel(), " lengths.");
  const at::Tensor cut_lengths = lengths.clamp(0, values.size(1));
  const at::Tensor offsets = lengths_to_offsets(cut_lengths);
  return JaggedTensor(first_of_rows(values, offsets),
                      weights.defined() ? first_of_rows(weights, offsets) : at::Tensor(),
                      cut_lengths, offsets);
}

const at::Tensor& JaggedTensor::weights() const {
  TESSERA_CHECK_VALUE(weights_.defined(), "jagged: there are no weights.");
  return weights_;
}

const at::Tensor& JaggedTensor::lengths() const {
  if (!lengths_.defined()) lengths_ = offsets_to_lengths(offsets_);
  return lengths_;
}

const at::Tensor& JaggedTensor::offsets() const {
  if (!offsets_.defined()) offsets_ = lengths_to_offsets(lengths_);
  return offsets_;
}

std::int64_t JaggedTensor::size_in_bytes() const {
  return detail::bytes_of(values_) + detail::bytes_of(weights_) + detail::bytes_of(lengths_) +
         detail::bytes_of(offsets_);
}

std::vector<at::Tensor> JaggedTensor::to_dense() const { return cut(values_, offsets()); }

std::vector<at::Tensor> JaggedTensor::to_dense_weights() const { return cut(weights(), offsets()); }

namespace {

at::Tensor padded(const at::Tensor& data, const JaggedTensor& jagged,
                  std::optional<std::int64_t> desired_length, double padding_value) {
  std::int64_t length = 0;
  if (desired_length) {
    length = *desired_length;
  } else if (jagged.lengths().numel() > 0) {
    length = jagged.lengths().max().item<std::int64_t>();
  }
  return jagged_to_padded_dense(data, jagged.offsets(), length, padding_value);
}

}  // namespace

at::Tensor JaggedTensor::to_padded_dense(std::optional<std::int64_t> desired_length,
                                         double padding_value) const {
  return padded(values_, *this, desired_length, padding_value);
}

at::Tensor JaggedTensor::to_padded_dense_weights(std::optional<std::int64_t> desired_length,
                                                 double padding_value) const {
  return padded(weights(), *this, desired_length, padding_value);
}

JaggedTensor JaggedTensor::to(c10::Device device, bool non_blocking) const {
  const auto move = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(tensor.options().device(device), non_blocking) : tensor;
  };
  return JaggedTensor(move(values_), move(weights_), move(lengths_), move(offsets_));
}

JaggedTensor JaggedTensor::pin_memory() const {
  const auto pin = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.pin_memory() : tensor;
  };
  return JaggedTensor(pin(values_), pin(weights_), pin(lengths_), pin(offsets_));
}

void JaggedTensor::record_stream(c10::Stream stream) const {
  for (at::Tensor tensor : {values_, weights_, lengths_, offsets_}) {
    if (tensor.defined()) tensor.record_stream(stream);
  }
}

std::string JaggedTensor::str() const {
  const at::Tensor offsets = this->offsets().cpu().to(at::kLong);
  const std::int64_t bags = offsets.numel() - 1;
  std::string text = "JaggedTensor({\n    ";
  const std::string values = detail::bags_text(values_.cpu(), offsets, 0, bags);
  if (weights_.defined()) {
    text.append("\"values\": ").append(values);
    text.append(",\n    \"weights\": ");
    text.append(detail::bags_text(weights_.cpu(), offsets, 0, bags));
  } else {
    text.append(values);
  }
  return text.append("\n})\n");
}

bool jt_is_equal(const JaggedTensor& a, const JaggedTensor& b) {
  return is_close(a.values(), b.values()) && is_close(a.weights_or_none(), b.weights_or_none()) &&
         is_close(a.lengths().to(at::kLong), b.lengths().to(at::kLong));
}

}  // namespace tessera::jagged
