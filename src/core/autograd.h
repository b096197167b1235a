// src/core/autograd.h — what operators with a gradient of their own share: LibTorch's names for
// them, and state of C++ that goes from forward to backward.

#pragma once

#include <utility>

#include <torch/csrc/autograd/custom_function.h>

namespace tessera {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Keeps `state` for the backward pass; a function carries one. LibTorch frees it with the graph.
template <class State>
void carry(AutogradContext* context, c10::intrusive_ptr<State> state) {
  context->saved_data["state"] = c10::IValue::make_capsule(std::move(state));
}

/// What forward carried.
template <class State>
c10::intrusive_ptr<State> carried(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<State>(context->saved_data["state"].toCapsule());
}

}  // namespace tessera
