// src/regions/agreement.h — what the ranks say to each other before an operator runs.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "tessera/comm/group.h"
#include "tessera/regions/gather_scatter.h"

namespace tessera::regions::detail {

enum class Operator : std::uint8_t {
  kCopy,
  kReduce,
  kAllReduce,
  kGather,
  kScatter,
  kGatherShared,
  kReduceScatter,
};
const char* name_of(Operator op) noexcept;

/// How a tensor is cut over a group. What an operator saves for its backward, never derived again.
struct Cut : torch::CustomClassHolder {
  Cut(comm::Group group, std::int64_t dim, Sizes sizes)
      : group(std::move(group)), dim(dim), sizes(std::move(sizes)) {}

  comm::Group group;
  std::int64_t dim;
  Sizes sizes;
};

struct Agreed {
  at::Tensor input;  // requires a gradient if any rank's does
  c10::intrusive_ptr<Cut> cut;
};

/// Checks the arguments and compares them over the ranks.
///
/// Collective. Throws ValueError where an argument is wrong; on the other ranks, and everywhere if
/// the ranks differ, comm::Error(kMismatch).
Agreed agree(Operator op, const at::Tensor& x, const comm::Group& group);
Agreed agree(Operator op, const at::Tensor& x, const comm::Group& group, std::int64_t dim,
             const std::optional<Sizes>& sizes);

/// The same for a call out of a backward, whose arguments were agreed on before: only a graph of
/// higher order needs a word about gradients.
at::Tensor rejoin(Operator op, const at::Tensor& x, const Cut& cut);

}  // namespace tessera::regions::detail
