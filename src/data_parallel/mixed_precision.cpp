#include "tessera/data_parallel/mixed_precision.h"

#include <utility>

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/check.h"
#include "tessera/data_parallel/hooks.h"

namespace tessera::data_parallel {
namespace {

void check_type(const std::optional<c10::ScalarType>& dtype, const char* what) {
  TESSERA_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype), "ddp.mixed_precision: ", what, " is ",
                      dtype.value_or(at::kFloat),
                      ", which is not a floating type. Use float16, bfloat16 or float32.");
}

}  // namespace

MixedPrecision::MixedPrecision(ModelParts parts, const MixedPrecisionOptions& options)
    : options_(options), parts_(std::move(parts)) {
  check_type(options.param_dtype, "param_dtype");
  check_type(options.reduce_dtype, "reduce_dtype");
  check_type(options.buffer_dtype, "buffer_dtype");
  const c10::AutoGradMode no_grad(false);
  if (options.param_dtype) {
    for (NamedParameter& parameter : parts_.parameters) {
      at::Tensor lent = parameter.tensor;
      if (!lent.is_floating_point() || lent.scalar_type() == *options.param_dtype) continue;
      const bool requires_grad = lent.requires_grad();
      // The master takes the values over; the module's tensor gets new memory at each forward.
      at::Tensor ours = lent.detach();
      ours.set_requires_grad(requires_grad);
      lent.set_requires_grad(false);
      pairs_.push_back({ours, lent});
      parameter.tensor = ours;
    }
  }
  if (options.buffer_dtype && parts_.buffers) {
    for (NamedTensor& buffer : parts_.buffers()) {
      if (!buffer.tensor.is_floating_point()) continue;
      buffer.tensor.set_data(buffer.tensor.detach().to(*options.buffer_dtype));
    }
  }
}

MixedPrecision::~MixedPrecision() { restore(); }

std::vector<at::Tensor> MixedPrecision::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : parts_.parameters) {
    if (parameter.tensor.requires_grad()) tensors.push_back(parameter.tensor);
  }
  return tensors;
}

void MixedPrecision::before_forward() {
  for (Pair& pair : pairs_) {
    if (pair.lent.grad_fn()) pair.lent.detach_();
    pair.lent.set_requires_grad(false);
    // New memory and a version of its own, so that a graph of an earlier forward keeps what it
    // saved.
    const at::Tensor rounded = at::empty_like(
        pair.ours, pair.ours.options().dtype(options_.param_dtype).requires_grad(false));
    pair.lent.set_data(rounded);
    torch::autograd::impl::set_version_counter(pair.lent, c10::VariableVersion(0));
    pair.lent.copy_(pair.ours);
  }
}

at::Tensor MixedPrecision::cast_input(const at::Tensor& input) const {
  if (!options_.param_dtype || !options_.cast_forward_inputs || !input.defined() ||
      !input.is_floating_point()) {
    return input;
  }
  return input.to(*options_.param_dtype);
}

std::shared_ptr<CommHook> MixedPrecision::hook() const {
  return options_.reduce_dtype ? compress_hook(*options_.reduce_dtype) : all_reduce_hook();
}

void MixedPrecision::give_back() {
  for (Pair& pair : pairs_) {
    if (pair.lent.grad_fn()) pair.lent.detach_();
    pair.lent.set_requires_grad(false);
    pair.lent.set_data(pair.ours.detach());
  }
}

void MixedPrecision::restore() {
  give_back();
  for (Pair& pair : pairs_) pair.lent.set_requires_grad(pair.ours.requires_grad());
  pairs_.clear();
}

}  // namespace tessera::data_parallel
