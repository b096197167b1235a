// All-reduce of sparse tensors.

#include <ATen/Functions.h>

#include "comm/backend.h"
#include "comm/tensor_memory.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

using Use = TensorMemory::Use;

// Brings every rank's rows to all; `rows[r]` is how many rank r has.
at::Tensor gather_rows(Transport& transport, Call& call, const at::Tensor& input,
                       const std::vector<std::int64_t>& rows) {
  auto shape = input.sizes().vec();
  shape[0] = 0;
  for (const std::int64_t num : rows) shape[0] += num;
  at::Tensor output = at::empty(shape, input.options());
  const TensorMemory source(input, Use::kRead);
  const TensorMemory target(output, Use::kWrite);
  std::vector<Piece> parts;
  std::int64_t first = 0;
  for (const std::int64_t num : rows) {
    parts.push_back(target.rows(first, num));
    first += num;
  }
  call.op = Operator::kAllGather;
  call.dtype = source.dtype();
  call.count = source.count();
  transport.all_gather(call, source.piece(), parts);
  return output;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> EngineBackend::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                               const c10d::AllreduceOptions& opts) {
  TESSERA_CHECK_VALUE(tensors.size() == 1, "comm.all_reduce: one tensor is expected, ",
                      tensors.size(), " were given.");
  TESSERA_CHECK_TYPE(tensors[0].is_sparse(), "comm.all_reduce: a sparse tensor is expected.");
  TESSERA_CHECK_VALUE(tensors[0].device().is_cpu(), "comm.all_reduce: the tensor is on ",
                      tensors[0].device().str(), ", but engine '", getBackendName(),
                      "' works on CPU tensors.");
  TESSERA_CHECK_TYPE(opts.reduceOp == c10d::ReduceOp::SUM,
                     "comm.all_reduce: sparse tensors can only be summed.");
  struct State {
    at::Tensor target;
    at::Tensor local;
    std::vector<std::int64_t> rows;
    at::Tensor indices;
  };
  auto state = std::make_shared<State>();
  state->target = tensors[0];
  state->local = tensors[0].detach().coalesce();
  const int size = size_;

  // Three collectives: how many entries each rank has, where they are, what they hold.
  Step counts = [state, size](Transport& transport, Call& call) {
    at::Tensor mine = at::full({1}, state->local._nnz(), at::kLong);
    const at::Tensor all = gather_rows(transport, call, mine, std::vector<std::int64_t>(size, 1));
    state->rows.assign(all.data_ptr<std::int64_t>(), all.data_ptr<std::int64_t>() + size);
  };
  Step indices = [state](Transport& transport, Call& call) {
    state->indices =
        gather_rows(transport, call, state->local._indices().t().contiguous(), state->rows);
  };
  Step values = [state](Transport& transport, Call& call) {
    const at::Tensor all =
        gather_rows(transport, call, state->local._values().contiguous(), state->rows);
    // Stable: entries of one place are added in rank order.
    const at::Tensor sum =
        at::sparse_coo_tensor(state->indices.t(), all, state->target.sizes()).coalesce();
    state->target.copy_(sum);
  };
  return submit({c10d::OpType::_ALLREDUCE_SPARSE, "sparse_all_reduce", tensors, opts.timeout,
                 opts.asyncOp, 3},
                {std::move(counts), std::move(indices), std::move(values)});
}

}  // namespace tessera::comm
