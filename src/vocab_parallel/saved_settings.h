// src/vocab_parallel/saved_settings.h — hands the settings of a pass from forward to backward.

#pragma once

#include <utility>

#include <torch/csrc/autograd/custom_function.h>

#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel::detail {

struct SavedSettings : torch::CustomClassHolder {
  explicit SavedSettings(PassSettings given) : settings(std::move(given)) {}
  PassSettings settings;
};

inline void save_settings(torch::autograd::AutogradContext* context, const PassSettings& settings) {
  context->saved_data["settings"] =
      c10::IValue::make_capsule(c10::make_intrusive<SavedSettings>(settings));
}

/// Valid as long as the context.
inline const PassSettings& saved_settings(torch::autograd::AutogradContext* context) {
  const auto capsule = context->saved_data["settings"].toCapsule();
  return c10::static_intrusive_pointer_cast<SavedSettings>(capsule)->settings;
}

}  // namespace tessera::vocab_parallel::detail
