// src/regions/saved_cut.h — a Cut inside an autograd context.

#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "regions/agreement.h"

namespace tessera::regions::detail {

inline void save(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Cut>& cut) {
  context->saved_data["cut"] = c10::IValue::make_capsule(cut);
}

inline c10::intrusive_ptr<Cut> saved_cut(torch::autograd::AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Cut>(context->saved_data["cut"].toCapsule());
}

}  // namespace tessera::regions::detail
