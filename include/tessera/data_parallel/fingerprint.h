// tessera/data_parallel/fingerprint.h — notices replicas that have silently grown apart.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::data_parallel {

/// A number made of the tensor's bits, shape and dtype, in row-major order: equal tensors have
/// equal ones, whatever their strides and device. Not collective.
TESSERA_API std::uint64_t fingerprint(const at::Tensor& tensor);

/// Compares the replicas' parameters every `every` steps.
class TESSERA_API ReplicaFingerprint {
 public:
  ReplicaFingerprint(comm::Group group, std::int64_t every);

  /// Call once per step, with the same names in the same order on all ranks. Returns true if this
  /// step compared. Collective on the steps that do: one gather of eight bytes per rank.
  ///
  /// Throws c10::Error, on all ranks with the same text, naming the first parameter that differs
  /// and the ranks on each side.
  bool check(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters);

  std::int64_t step() const noexcept { return step_; }

 private:
  comm::Group group_;
  std::int64_t every_;
  std::int64_t step_ = 0;
};

}  // namespace tessera::data_parallel
