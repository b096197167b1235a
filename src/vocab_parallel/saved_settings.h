// src/vocab_parallel/saved_settings.h — hands the settings of a pass from forward to backward.

#pragma once

#include <utility>

#include "core/autograd.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel::detail {

struct SavedSettings : torch::CustomClassHolder {
  explicit SavedSettings(PassSettings given) : settings(std::move(given)) {}
  PassSettings settings;
};

inline void save_settings(AutogradContext* context, const PassSettings& settings) {
  carry(context, c10::make_intrusive<SavedSettings>(settings));
}

/// What a backward that computes without recording says to a caller who wants it recorded.
inline void check_first_gradient(const PassSettings& settings) {
  TORCH_CHECK(!at::GradMode::is_enabled(), settings.operation,
              ": gradients of gradients are not available. Call backward without create_graph.");
}

/// Valid as long as the context.
inline const PassSettings& saved_settings(AutogradContext* context) {
  return carried<SavedSettings>(context)->settings;
}

/// The same, for a backward that cannot be recorded.
inline const PassSettings& settings_for_gradient(AutogradContext* context) {
  const PassSettings& settings = saved_settings(context);
  check_first_gradient(settings);
  return settings;
}

}  // namespace tessera::vocab_parallel::detail
