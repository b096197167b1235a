// tessera/comm/collectives.h — what the ranks of a group do together.
//
// Everything here is collective: all ranks of the group call it, in the same order, except send and
// recv, which concern two ranks. A trailing underscore means in place; otherwise inputs are left
// untouched and the result is new. "Rows" are slices along the first dimension; a tensor without
// dimensions counts as one row. Tensors may be non-contiguous and may be empty.
//
// Each function has an `_async` twin that returns at once. Until its result is waited for, its
// arguments must not be written, and an in-place tensor must not be read.
//
// Types: float16/32/64, bfloat16, int8/16/32/64, uint8, bool, and complex for what moves or sums.
// Reductions run in rank order, so all ranks get the same bits; 16-bit floats are summed in
// float32.
//
// Errors: ValueError or TypeError before anything is sent when an argument is wrong; comm::Error,
// the same on all ranks, when the ranks disagree, a rank is lost or the group's limit passes.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/awaitable.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// kAvg is for floating types, the bit operations for integers and bool. On bool, kSum and kMax are
/// "or", kProduct and kMin are "and".
enum class Reduction { kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor };

/// Reduces over the ranks; every rank gets the result.
TESSERA_API at::Tensor all_reduce(const at::Tensor& input, const Group& group,
                                  Reduction reduction = Reduction::kSum);
TESSERA_API Awaitable<at::Tensor> all_reduce_async(const at::Tensor& input, const Group& group,
                                                   Reduction reduction = Reduction::kSum);
TESSERA_API void all_reduce_(at::Tensor& tensor, const Group& group,
                             Reduction reduction = Reduction::kSum);
TESSERA_API Awaitable<at::Tensor> all_reduce_async_(at::Tensor& tensor, const Group& group,
                                                    Reduction reduction = Reduction::kSum);

/// Reduces over the ranks; rank `root` gets the result, the others get back their input.
TESSERA_API at::Tensor reduce(const at::Tensor& input, int root, const Group& group,
                              Reduction reduction = Reduction::kSum);
TESSERA_API Awaitable<at::Tensor> reduce_async(const at::Tensor& input, int root,
                                               const Group& group,
                                               Reduction reduction = Reduction::kSum);

/// Overwrites `tensor` with rank `root`'s.
TESSERA_API void broadcast_(at::Tensor& tensor, int root, const Group& group);
TESSERA_API Awaitable<at::Tensor> broadcast_async_(at::Tensor& tensor, int root,
                                                   const Group& group);

/// Stacks the ranks' rows in rank order. All inputs have the same shape.
TESSERA_API at::Tensor all_gather(const at::Tensor& input, const Group& group);
TESSERA_API Awaitable<at::Tensor> all_gather_async(const at::Tensor& input, const Group& group);

/// Stacks the ranks' rows in rank order; the number of rows may differ. `rows[r]` is rank r's;
/// without it, one more small message learns them.
TESSERA_API at::Tensor all_gather_v(
    const at::Tensor& input, const Group& group,
    const std::optional<std::vector<std::int64_t>>& rows = std::nullopt);
TESSERA_API Awaitable<at::Tensor> all_gather_v_async(
    const at::Tensor& input, const Group& group,
    const std::optional<std::vector<std::int64_t>>& rows = std::nullopt);

/// Cuts the rows evenly over the ranks and reduces each part on the rank that keeps it.
/// Throws ValueError if the group's size does not divide the number of rows.
TESSERA_API at::Tensor reduce_scatter(const at::Tensor& input, const Group& group,
                                      Reduction reduction = Reduction::kSum);
TESSERA_API Awaitable<at::Tensor> reduce_scatter_async(const at::Tensor& input, const Group& group,
                                                       Reduction reduction = Reduction::kSum);

/// As reduce_scatter, with `rows[r]` rows for rank r. The rows must add up to the input's.
TESSERA_API at::Tensor reduce_scatter_v(const at::Tensor& input,
                                        const std::vector<std::int64_t>& rows, const Group& group,
                                        Reduction reduction = Reduction::kSum);
TESSERA_API Awaitable<at::Tensor> reduce_scatter_v_async(const at::Tensor& input,
                                                         const std::vector<std::int64_t>& rows,
                                                         const Group& group,
                                                         Reduction reduction = Reduction::kSum);

/// Cuts the rows evenly, sends part r to rank r, and stacks what arrives in rank order.
TESSERA_API at::Tensor all_to_all(const at::Tensor& input, const Group& group);
TESSERA_API Awaitable<at::Tensor> all_to_all_async(const at::Tensor& input, const Group& group);

/// inputs[r] goes to rank r, outputs[r] comes from it: contiguous tensors of one type, wherever
/// they lie, of any sizes that fit the other ranks'. The inputs must not change before it is waited
/// for.
TESSERA_API Awaitable<std::vector<at::Tensor>> all_to_all_pieces_async(
    std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs, const Group& group);

/// As all_to_all: `send_rows[r]` rows go to rank r, `recv_rows[r]` come from it. Without
/// `recv_rows`, one more small message learns them.
TESSERA_API at::Tensor all_to_all_v(
    const at::Tensor& input, const std::vector<std::int64_t>& send_rows, const Group& group,
    const std::optional<std::vector<std::int64_t>>& recv_rows = std::nullopt);
TESSERA_API Awaitable<at::Tensor> all_to_all_v_async(
    const at::Tensor& input, const std::vector<std::int64_t>& send_rows, const Group& group,
    const std::optional<std::vector<std::int64_t>>& recv_rows = std::nullopt);

/// Stacks the ranks' rows on rank `root`, in rank order; the other ranks get an empty tensor. The
/// number of rows may differ; `rows` as in all_gather_v.
TESSERA_API at::Tensor gather(const at::Tensor& input, int root, const Group& group,
                              const std::optional<std::vector<std::int64_t>>& rows = std::nullopt);
TESSERA_API Awaitable<at::Tensor> gather_async(
    const at::Tensor& input, int root, const Group& group,
    const std::optional<std::vector<std::int64_t>>& rows = std::nullopt);

/// Cuts rank `root`'s rows into `rows[r]` for rank r and returns this rank's part. Every rank gives
/// `rows`, and an `input` of the same trailing shape and type; only the root's values are read.
TESSERA_API at::Tensor scatter(const at::Tensor& input, const std::vector<std::int64_t>& rows,
                               int root, const Group& group);
TESSERA_API Awaitable<at::Tensor> scatter_async(const at::Tensor& input,
                                                const std::vector<std::int64_t>& rows, int root,
                                                const Group& group);

/// Sends to one rank; the receiver calls recv_ with the same shape, type and tag.
TESSERA_API void send(const at::Tensor& tensor, int destination, const Group& group, int tag = 0);
TESSERA_API Awaitable<at::Tensor> send_async(const at::Tensor& tensor, int destination,
                                             const Group& group, int tag = 0);
/// Overwrites `tensor` with what rank `source` sends.
TESSERA_API void recv_(at::Tensor& tensor, int source, const Group& group, int tag = 0);
TESSERA_API Awaitable<at::Tensor> recv_async_(at::Tensor& tensor, int source, const Group& group,
                                              int tag = 0);

/// Returns when all ranks have called it.
TESSERA_API void barrier(const Group& group);
TESSERA_API Awaitable<at::Tensor> barrier_async(const Group& group);

}  // namespace tessera::comm
