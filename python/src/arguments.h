// python/src/arguments.h — arguments that Python may leave out, and groups as torch has them.

#pragma once

#include <optional>

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/comm/group.h"

namespace tessera::python {

using MaybeGroup = std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>;
using MaybeTensor = std::optional<at::Tensor>;

inline std::optional<comm::Group> maybe_group(const MaybeGroup& group) {
  return group ? std::optional<comm::Group>(comm::Group(*group)) : std::nullopt;
}

inline at::Tensor tensor_of(const MaybeTensor& tensor) { return tensor.value_or(at::Tensor()); }

}  // namespace tessera::python

/// Lets functions that take a comm::Group be bound as they are: Python gives torch's groups.
template <>
struct pybind11::detail::type_caster<tessera::comm::Group> {
  using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
  static constexpr auto name = const_name("ProcessGroup");
  template <typename>
  using cast_op_type = tessera::comm::Group&;

  bool load(handle source, bool convert) {
    make_caster<ProcessGroup> torchs;
    if (!torchs.load(source, convert)) return false;
    group_.emplace(cast_op<ProcessGroup&>(torchs));
    return true;
  }
  explicit operator tessera::comm::Group&() { return *group_; }

 private:
  std::optional<tessera::comm::Group> group_;
};
