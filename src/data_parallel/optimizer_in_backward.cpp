#include "tessera/data_parallel/optimizer_in_backward.h"

#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "data_parallel/hook_base.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

/// What is remembered of one parameter. Flat tensors lie in the parameter's memory order.
struct Memory {
  at::Tensor step;
  std::map<std::string, at::Tensor> flat;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // empty: the parameter is not dense, memory is row-major
  bool is_new = true;
};

/// A parameter and its gradient as flat tensors.
struct Flat {
  at::Tensor parameter;
  at::Tensor gradient;
  at::Tensor write_back;  // defined if the parameter is not dense and was copied
  Memory* memory;
};

class FlatOptimizer : public BackwardOptimizer {
 public:
  FlatOptimizer(std::string name, double lr) : name_(std::move(name)), lr_(lr) {
    TESSERA_CHECK_VALUE(lr >= 0, "ddp.", name_, "_in_backward: a learning rate of ", lr,
                        ". It cannot be negative.");
  }

  void step(const Bucket& bucket, const at::Tensor& averaged,
            const std::optional<std::set<std::string>>& only) override {
    const c10::AutoGradMode no_grad(false);
    TESSERA_CHECK_TYPE(!averaged.is_sparse(), "ddp.", name_, "_in_backward: the gradient of '",
                       bucket.names().front(), "' is sparse. Leave it to an ordinary optimizer.");
    const auto slices = bucket.slices_of(averaged);
    std::vector<Flat> flats;
    for (std::size_t i = 0; i < slices.size(); ++i) {
      const std::string& name = bucket.names()[i];
      if ((only && !only->contains(name)) || slices[i].numel() == 0) continue;
      const at::Tensor parameter = bucket.parameters()[i].detach();
      TESSERA_CHECK_TYPE(!parameter.is_complex(), "ddp.", name_, "_in_backward: '", name,
                         "' is complex. Leave it to an ordinary optimizer.");
      Flat flat;
      if (parameter.is_non_overlapping_and_dense()) {
        flat.parameter = parameter.as_strided({parameter.numel()}, {1});
      } else {
        flat.parameter = parameter.contiguous().view(-1);
        flat.write_back = parameter;
      }
      flat.gradient = slices[i].to(parameter.scalar_type());
      flat.memory = &memory_of(name, parameter);
      flats.push_back(std::move(flat));
    }
    if (flats.empty()) return;
    apply(flats);
    for (Flat& flat : flats) {
      flat.memory->is_new = false;
      if (flat.write_back.defined()) {
        flat.write_back.copy_(flat.parameter.view(flat.write_back.sizes()));
      }
    }
  }

  std::string name() const override { return name_; }
  void set_learning_rate(double lr) override { lr_ = lr; }
  double learning_rate() const override { return lr_; }

  HookState state() const override {
    const std::lock_guard lock(mutex_);
    HookState state;
    // What was loaded and has not been asked for yet.
    for (const auto& [name, kept] : loaded_) {
      for (const auto& [key, tensor] : kept) state.tensors[name + "/" + key] = tensor;
    }
    for (const auto& [name, memory] : memories_) {
      if (memory.is_new) continue;
      state.tensors[name + "/step"] = memory.step;
      for (const auto& [key, flat] : memory.flat) {
        state.tensors[name + "/" + key] = memory.strides.empty()
                                              ? flat.view(memory.sizes)
                                              : flat.as_strided(memory.sizes, memory.strides);
      }
    }
    return state;
  }

  void load_state(const HookState& state) override {
    const std::lock_guard lock(mutex_);
    memories_.clear();
    loaded_.clear();
    for (const auto& [key, tensor] : state.tensors) {
      const std::size_t slash = key.rfind('/');
      TESSERA_CHECK_VALUE(slash != std::string::npos, "ddp.", name_, "_in_backward: '", key,
                          "' is not a key of its state. Keys are '<parameter>/<what>'.");
      loaded_[key.substr(0, slash)][key.substr(slash + 1)] = tensor.clone();
    }
  }

 protected:
  virtual void apply(std::vector<Flat>& flats) = 0;
  /// Names of the flat tensors that are kept.
  virtual std::vector<std::string> kept() const = 0;

 private:
  Memory& memory_of(const std::string& name, const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = memories_.try_emplace(name);
    Memory& memory = place->second;
    if (!is_new) return memory;
    memory.sizes = parameter.sizes().vec();
    if (parameter.is_non_overlapping_and_dense()) memory.strides = parameter.strides().vec();
    memory.step = at::zeros({}, parameter.options().dtype(at::kFloat));
    for (const std::string& key : kept()) {
      memory.flat[key] = at::zeros({parameter.numel()}, parameter.options());
    }
    const auto loaded = loaded_.find(name);
    if (loaded == loaded_.end()) return memory;
    for (const auto& [key, tensor] : loaded->second) {
      if (key == "step") {
        memory.step.copy_(tensor);
      } else if (const auto flat = memory.flat.find(key); flat != memory.flat.end()) {
        TESSERA_CHECK_VALUE(tensor.sizes() == parameter.sizes(), "ddp.", name_, "_in_backward: '",
                            name, "/", key, "' was saved with shape ", tensor.sizes(),
                            ", the parameter has ", parameter.sizes(), ".");
        (memory.strides.empty() ? flat->second.view(memory.sizes)
                                : flat->second.as_strided(memory.sizes, memory.strides))
            .copy_(tensor);
      }
    }
    memory.is_new = false;
    loaded_.erase(loaded);
    return memory;
  }

  std::string name_;
  double lr_;
  mutable std::mutex mutex_;                // of the maps; each entry has one bucket
  std::map<std::string, Memory> memories_;  // nodes do not move when others are added
  std::map<std::string, std::map<std::string, at::Tensor>> loaded_;
};

class Sgd final : public FlatOptimizer {
 public:
  explicit Sgd(const SgdOptions& options) : FlatOptimizer("sgd", options.lr), options_(options) {
    TESSERA_CHECK_VALUE(options.momentum >= 0, "ddp.sgd_in_backward: a momentum of ",
                        options.momentum, ". It cannot be negative.");
    TESSERA_CHECK_VALUE(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
                        "ddp.sgd_in_backward: Nesterov needs a momentum and no dampening.");
  }

 private:
  std::vector<std::string> kept() const override {
    if (options_.momentum == 0) return {};
    return {"momentum_buffer"};
  }

  void apply(std::vector<Flat>& flats) override {
    // The first step fills the momentum instead of adding to it; parameters can differ in that.
    for (const bool first : {true, false}) {
      std::vector<at::Tensor> parameters;
      std::vector<at::Tensor> gradients;
      std::vector<at::Tensor> momenta;
      for (Flat& flat : flats) {
        if (flat.memory->is_new != first) continue;
        parameters.push_back(flat.parameter);
        gradients.push_back(flat.gradient);
        if (options_.momentum != 0) momenta.push_back(flat.memory->flat.at("momentum_buffer"));
        flat.memory->step.add_(1);
      }
      if (parameters.empty()) continue;
      at::_fused_sgd_(parameters, gradients, momenta, options_.weight_decay, options_.momentum,
                      learning_rate(), options_.dampening, options_.nesterov, options_.maximize,
                      first);
    }
  }

  SgdOptions options_;
};

class Adam final : public FlatOptimizer {
 public:
  Adam(const AdamOptions& options, bool decoupled)
      : FlatOptimizer(decoupled ? "adamw" : "adam", options.lr),
        options_(options),
        decoupled_(decoupled) {
    for (const double beta : {options.beta1, options.beta2}) {
      TESSERA_CHECK_VALUE(beta >= 0 && beta < 1, "ddp.", name(), "_in_backward: a beta of ", beta,
                          ". It must be at least 0 and less than 1.");
    }
  }

 private:
  std::vector<std::string> kept() const override {
    if (options_.amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  }

  void apply(std::vector<Flat>& flats) override {
    const auto each = [&](auto of_flat) {
      std::vector<at::Tensor> tensors;
      for (const Flat& flat : flats) tensors.push_back(std::invoke(of_flat, flat));
      return tensors;
    };
    const auto remembered = [&](const char* key) {
      return each([&](const Flat& flat) { return flat.memory->flat.at(key); });
    };
    std::vector<at::Tensor> parameters = each(&Flat::parameter);
    std::vector<at::Tensor> gradients = each(&Flat::gradient);
    std::vector<at::Tensor> averages = remembered("exp_avg");
    std::vector<at::Tensor> squares = remembered("exp_avg_sq");
    std::vector<at::Tensor> largest;
    if (options_.amsgrad) largest = remembered("max_exp_avg_sq");
    std::vector<at::Tensor> steps = each([](const Flat& flat) { return flat.memory->step; });
    at::_foreach_add_(steps, 1);
    const auto update = [&](auto&& fused) {
      fused(parameters, gradients, averages, squares, largest, steps, learning_rate(),
            options_.beta1, options_.beta2, options_.weight_decay, options_.eps, options_.amsgrad,
            options_.maximize);
    };
    if (decoupled_) {
      update([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
    } else {
      update([](auto&&... arguments) { at::_fused_adam_(arguments...); });
    }
  }

  AdamOptions options_;
  bool decoupled_;
};

class HookThenOptimizer final : public Wrapping<> {
 public:
  HookThenOptimizer(std::shared_ptr<CommHook> inner, std::shared_ptr<BackwardOptimizer> optimizer,
                    std::optional<std::set<std::string>> only)
      : Wrapping(std::move(inner), "hook_then_optimizer"),
        optimizer_(std::move(optimizer)),
        only_(std::move(only)) {
    TESSERA_CHECK_VALUE(optimizer_ != nullptr, "ddp.hook_then_optimizer: no optimizer.");
    TESSERA_CHECK_VALUE(!this->inner().consumes_gradients(), "ddp.hook_then_optimizer: '",
                        this->inner().name(), "' steps the parameters already.");
  }

  FuturePtr reduce(Bucket& bucket) override {
    const at::Tensor buffer = bucket.buffer();
    return then(inner().reduce(bucket), buffer,
                [bucket, optimizer = optimizer_, only = only_](at::Tensor averaged) {
                  optimizer->step(bucket, averaged, only);
                  if (!only) {
                    // Nobody touches these gradients until the bucket's future is complete.
                    for (const at::Tensor& parameter : bucket.parameters()) {
                      parameter.mutable_grad().reset();
                    }
                  }
                  return averaged;
                });
  }

  std::string name() const override { return Wrapping::name() + "+" + optimizer_->name(); }
  bool consumes_gradients() const override { return !only_.has_value(); }

  HookState state() const override {
    HookState state = Wrapping::state();
    for (auto& [key, tensor] : optimizer_->state().tensors) {
      state.tensors["optimizer/" + key] = tensor;
    }
    state.tensors[kRate] = at::full({}, optimizer_->learning_rate(), at::kDouble);
    return state;
  }

  void load_state(const HookState& state) override {
    HookState inner_state{.tensors = {}, .numbers = state.numbers};
    HookState optimizer_state;
    for (const auto& [key, tensor] : state.tensors) {
      if (key == kRate) {
        optimizer_->set_learning_rate(tensor.item<double>());
      } else if (key.rfind("optimizer/", 0) == 0) {
        optimizer_state.tensors[key.substr(10)] = tensor;
      } else {
        inner_state.tensors[key] = tensor;
      }
    }
    Wrapping::load_state(inner_state);
    optimizer_->load_state(optimizer_state);
  }

 private:
  static constexpr const char* kRate = "optimizer/lr";

  std::shared_ptr<BackwardOptimizer> optimizer_;
  std::optional<std::set<std::string>> only_;
};

}  // namespace

std::shared_ptr<BackwardOptimizer> sgd_in_backward(const SgdOptions& options) {
  return std::make_shared<Sgd>(options);
}
std::shared_ptr<BackwardOptimizer> adam_in_backward(const AdamOptions& options) {
  return std::make_shared<Adam>(options, false);
}
std::shared_ptr<BackwardOptimizer> adamw_in_backward(const AdamOptions& options) {
  return std::make_shared<Adam>(options, true);
}

std::shared_ptr<CommHook> hook_then_optimizer(std::shared_ptr<CommHook> inner,
                                              std::shared_ptr<BackwardOptimizer> optimizer,
                                              std::optional<std::set<std::string>> only) {
  return std::make_shared<HookThenOptimizer>(std::move(inner), std::move(optimizer),
                                             std::move(only));
}

}  // namespace tessera::data_parallel
