#include "tessera/data_parallel/hooks.h"

#include <map>
#include <utility>

#include "data_parallel/byte_message.h"
#include "data_parallel/hook_base.h"
#include "data_parallel/signed_message.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

void check_floating(c10::ScalarType dtype, const char* operation) {
  TESSERA_CHECK_VALUE(c10::isFloatingType(dtype), operation, ": ", dtype,
                      " is not a floating type. Use float16, bfloat16 or float32.");
}

class AllReduceHook final : public Sending<> {
 public:
  FuturePtr reduce(Bucket& bucket) override { return sender().average_plainly(bucket); }
  std::string name() const override { return "all_reduce"; }
};

class CompressHook final : public Sending<> {
 public:
  explicit CompressHook(c10::ScalarType dtype) : dtype_(dtype) {
    check_floating(dtype, "ddp.compress_hook");
  }

  FuturePtr reduce(Bucket& bucket) override {
    at::Tensor buffer = bucket.buffer();
    if (bucket.is_sparse() || buffer.is_complex() || buffer.scalar_type() == dtype_) {
      return sender().average_plainly(bucket);
    }
    const at::Tensor small = buffer.to(dtype_);
    return then(sender().start_average(small, bucket.group(), bucket.divisor())->getFuture(),
                buffer, [buffer](const at::Tensor& result) { return buffer.copy_(result); });
  }

  std::string name() const override {
    return std::string(c10::toString(dtype_)).append("_compress");
  }

 private:
  c10::ScalarType dtype_;
};

class NoopHook final : public CommHook {
 public:
  FuturePtr reduce(Bucket& bucket) override { return completed(bucket.buffer()); }
  std::string name() const override { return "noop"; }
};

class QuantizationHook final : public Sending<> {
 public:
  /// `channel_size` zero: one range for the whole bucket.
  explicit QuantizationHook(std::int64_t channel_size) : channel_size_(channel_size) {}

  FuturePtr reduce(Bucket& bucket) override {
    at::Tensor buffer = bucket.buffer();
    if (bucket.is_sparse() || buffer.is_complex() || buffer.numel() == 0) {
      return sender().average_plainly(bucket);
    }
    const std::int64_t row = channel_size_ > 0 ? channel_size_ : buffer.numel();
    at::Tensor all;
    const WorkPtr work =
        sender().start_gather(pack_bytes(buffer.to(at::kFloat), row), all, bucket.group());
    const double divisor = bucket.divisor();
    return then(work->getFuture(), buffer, [=](const at::Tensor&) {
      use_here(all);
      unpack_average(all, row, divisor, buffer);
      return buffer;
    });
  }

  std::string name() const override {
    return channel_size_ > 0
               ? std::string("quantization_per_channel_").append(std::to_string(channel_size_))
               : "quantization_per_tensor";
  }

 private:
  std::int64_t channel_size_;
};

class Int8ErrorFeedbackHook final : public Sending<> {
 public:
  FuturePtr reduce(Bucket& bucket) override {
    at::Tensor buffer = bucket.buffer();
    if (bucket.is_sparse() || buffer.is_complex() || buffer.numel() == 0) {
      return sender().average_plainly(bucket);
    }
    const auto slices = bucket.slices_of(buffer);
    std::vector<std::int64_t> lengths;
    std::vector<at::Tensor> losses;
    for (std::size_t i = 0; i < slices.size(); ++i) {
      lengths.push_back(slices[i].numel());
      const auto loss = losses_.find(bucket.names()[i]);
      const bool is_known = loss != losses_.end() && loss->second.numel() == lengths.back();
      losses.push_back(is_known ? loss->second.to(buffer.device(), at::kFloat).reshape({-1})
                                : at::Tensor());
    }
    at::Tensor all;
    const WorkPtr work = sender().start_gather(pack_signed(buffer.to(at::kFloat), lengths, losses),
                                               all, bucket.group());
    for (std::size_t i = 0; i < losses.size(); ++i) losses_[bucket.names()[i]] = losses[i];
    const double divisor = bucket.divisor();
    return then(work->getFuture(), buffer, [=](const at::Tensor&) {
      use_here(all);
      unpack_signed_average(all, lengths, divisor, buffer);
      return buffer;
    });
  }

  std::string name() const override { return "int8_error_feedback"; }

  HookState state() const override {
    HookState state;
    for (const auto& [name, loss] : losses_) {
      state.tensors["error/" + name] = loss.clone();  // the next step changes it
      state.local.insert("error/" + name);
    }
    return state;
  }

  void load_state(const HookState& state) override {
    losses_.clear();
    for (const auto& [key, tensor] : state.tensors) {
      TESSERA_CHECK_VALUE(key.rfind("error/", 0) == 0, "ddp.int8_error_feedback: '", key,
                          "' is not a key of its state. Keys are 'error/<parameter>'.");
      losses_[key.substr(6)] = tensor.clone();
    }
  }

 private:
  std::map<std::string, at::Tensor> losses_;  // float32, flat, in the gradient's memory order
};

class CompressWrapper final : public Wrapping<> {
 public:
  CompressWrapper(HookPtr inner, c10::ScalarType dtype)
      : Wrapping(std::move(inner), std::string(c10::toString(dtype)).append("_compress_wrapper")),
        dtype_(dtype) {
    check_floating(dtype, "ddp.compress_wrapper");
    TESSERA_CHECK_VALUE(!this->inner().consumes_gradients(), "ddp.compress_wrapper: '",
                        this->inner().name(),
                        "' steps parameters from the gradients it is given. Wrap the hook inside "
                        "it instead.");
  }

  FuturePtr reduce(Bucket& bucket) override {
    at::Tensor buffer = bucket.buffer();
    if (bucket.is_sparse() || buffer.is_complex() || buffer.scalar_type() == dtype_) {
      return inner().reduce(bucket);
    }
    bucket.set_buffer(buffer.to(dtype_));
    const FuturePtr future = inner().reduce(bucket);
    bucket.set_buffer(buffer);
    return then(future, buffer,
                [buffer](const at::Tensor& result) { return buffer.copy_(result); });
  }

 private:
  c10::ScalarType dtype_;
};

class CustomHook final : public CommHook {
 public:
  CustomHook(std::string name, std::function<FuturePtr(Bucket&)> reduce)
      : name_(std::move(name)), reduce_(std::move(reduce)) {
    TESSERA_CHECK_VALUE(reduce_ != nullptr, "ddp.custom_hook: '", name_, "' has no function.");
  }
  FuturePtr reduce(Bucket& bucket) override { return reduce_(bucket); }
  std::string name() const override { return name_; }

 private:
  std::string name_;
  std::function<FuturePtr(Bucket&)> reduce_;
};

}  // namespace

HookPtr all_reduce_hook() { return std::make_shared<AllReduceHook>(); }
HookPtr compress_hook(c10::ScalarType dtype) { return std::make_shared<CompressHook>(dtype); }
HookPtr fp16_compress_hook() { return compress_hook(at::kHalf); }
HookPtr bf16_compress_hook() { return compress_hook(at::kBFloat16); }
HookPtr noop_hook() { return std::make_shared<NoopHook>(); }
HookPtr quantization_per_tensor_hook() { return std::make_shared<QuantizationHook>(0); }

HookPtr quantization_per_channel_hook(std::int64_t channel_size) {
  TESSERA_CHECK_VALUE(channel_size > 0, "ddp.quantization_per_channel: a channel of ", channel_size,
                      " elements. It must have at least one.");
  return std::make_shared<QuantizationHook>(channel_size);
}

HookPtr int8_error_feedback_hook() { return std::make_shared<Int8ErrorFeedbackHook>(); }

HookPtr compress_wrapper(HookPtr inner, c10::ScalarType dtype) {
  return std::make_shared<CompressWrapper>(std::move(inner), dtype);
}
HookPtr fp16_compress_wrapper(HookPtr inner) {
  return compress_wrapper(std::move(inner), at::kHalf);
}
HookPtr bf16_compress_wrapper(HookPtr inner) {
  return compress_wrapper(std::move(inner), at::kBFloat16);
}

HookPtr custom_hook(std::string name, std::function<FuturePtr(Bucket&)> reduce) {
  return std::make_shared<CustomHook>(std::move(name), std::move(reduce));
}

}  // namespace tessera::data_parallel
