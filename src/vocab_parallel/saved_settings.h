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

/// Valid as long as the context.
inline const PassSettings& saved_settings(AutogradContext* context) {
  return carried<SavedSettings>(context)->settings;
}

}  // namespace tessera::vocab_parallel::detail
