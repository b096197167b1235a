// python/src/arguments.h — arguments that Python may leave out.

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
