// tessera/data_parallel/outputs.h — the tensors inside whatever a forward returns.

#pragma once

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "tessera/core/export.h"

namespace tessera::data_parallel {

/// Says where the tensors of a `T` are: `static void visit(T& value, Visitor&& visitor)` calls
/// `visitor(at::Tensor&)` for each, in the same order every time; the visitor may replace them.
///
/// Known are tensors, optionals, pairs, tuples, arrays, vectors, maps, c10::IValue, numbers, bools
/// and strings, nested in any way. For a type of your own specialise this, or give the type a
/// member `template <class Visitor> void visit_tensors(Visitor&& visitor)`.
template <class T>
struct Outputs {
  template <class Visitor>
  static void visit(T& value, Visitor&& visitor) {
    if constexpr (requires { value.visit_tensors(visitor); }) {
      value.visit_tensors(visitor);
    } else {
      static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>,
                    "Tell tessera::data_parallel where the tensors of this type are: specialise "
                    "Outputs<T> or add a member visit_tensors(visitor).");
    }
  }
};

/// Calls `visitor` for every tensor of `value`.
template <class T, class Visitor>
void for_each_tensor(T& value, Visitor&& visitor) {
  Outputs<T>::visit(value, visitor);
}

template <>
struct Outputs<at::Tensor> {
  template <class Visitor>
  static void visit(at::Tensor& value, Visitor&& visitor) {
    visitor(value);
  }
};

template <>
struct Outputs<std::string> {
  template <class Visitor>
  static void visit(std::string&, Visitor&&) {}
};

template <class T>
struct Outputs<std::optional<T>> {
  template <class Visitor>
  static void visit(std::optional<T>& value, Visitor&& visitor) {
    if (value) for_each_tensor(*value, visitor);
  }
};

template <class T, class Allocator>
struct Outputs<std::vector<T, Allocator>> {
  template <class Visitor>
  static void visit(std::vector<T, Allocator>& value, Visitor&& visitor) {
    for (T& element : value) for_each_tensor(element, visitor);
  }
};

template <class T, std::size_t size>
struct Outputs<std::array<T, size>> {
  template <class Visitor>
  static void visit(std::array<T, size>& value, Visitor&& visitor) {
    for (T& element : value) for_each_tensor(element, visitor);
  }
};

template <class A, class B>
struct Outputs<std::pair<A, B>> {
  template <class Visitor>
  static void visit(std::pair<A, B>& value, Visitor&& visitor) {
    for_each_tensor(value.first, visitor);
    for_each_tensor(value.second, visitor);
  }
};

template <class... T>
struct Outputs<std::tuple<T...>> {
  template <class Visitor>
  static void visit(std::tuple<T...>& value, Visitor&& visitor) {
    std::apply([&](T&... elements) { (for_each_tensor(elements, visitor), ...); }, value);
  }
};

template <class K, class T, class... Rest>
struct Outputs<std::map<K, T, Rest...>> {
  template <class Visitor>
  static void visit(std::map<K, T, Rest...>& value, Visitor&& visitor) {
    for (auto& [key, element] : value) for_each_tensor(element, visitor);
  }
};

template <class K, class T, class... Rest>
struct Outputs<std::unordered_map<K, T, Rest...>> {
  template <class Visitor>
  static void visit(std::unordered_map<K, T, Rest...>& value, Visitor&& visitor) {
    for (auto& [key, element] : value) for_each_tensor(element, visitor);
  }
};

/// Rebuilds `value` with every tensor passed through `visitor`: tensors, lists, tuples and
/// dictionaries. Other values, objects among them, stay as they are.
TESSERA_API void visit_ivalue(c10::IValue& value, const std::function<void(at::Tensor&)>& visitor);

template <>
struct Outputs<c10::IValue> {
  template <class Visitor>
  static void visit(c10::IValue& value, Visitor&& visitor) {
    visit_ivalue(value, visitor);
  }
};

}  // namespace tessera::data_parallel
