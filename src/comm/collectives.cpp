#include "tessera/comm/collectives.h"

#include <numeric>

#include <ATen/Functions.h>

#include "comm/backend.h"
#include "comm/engines.h"
#include "comm/executor.h"
#include "comm/tensor_memory.h"
#include "core/kept_memory.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

using c10d::Backend;
using Rows = std::vector<std::int64_t>;

// The engine for this tensor's device, without the detour over the dispatcher.
c10::intrusive_ptr<Backend> engine_for(const char* op, const at::Tensor& tensor,
                                       const Group& group) {
  TESSERA_CHECK_VALUE(tensor.defined(), "comm.", op, ": the tensor is undefined.");
  const auto device = tensor.device().type();
  TESSERA_CHECK_VALUE(has_engine_for(*group.process_group(), device), "comm.", op,
                      ": the tensor is on ", tensor.device().str(), ", but group '", group.name(),
                      "' (engine ", group.engine(),
                      ") has no engine for that device. Move the tensor, or use another group.");
  return group.process_group()->getBackend(device);
}

c10d::ReduceOp::RedOpType reduce_op(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return c10d::ReduceOp::SUM;
    case Reduction::kAvg:
      return c10d::ReduceOp::AVG;
    case Reduction::kMin:
      return c10d::ReduceOp::MIN;
    case Reduction::kMax:
      return c10d::ReduceOp::MAX;
    case Reduction::kProduct:
      return c10d::ReduceOp::PRODUCT;
    case Reduction::kBand:
      return c10d::ReduceOp::BAND;
    case Reduction::kBor:
      return c10d::ReduceOp::BOR;
    case Reduction::kBxor:
      return c10d::ReduceOp::BXOR;
  }
  TESSERA_INTERNAL_ASSERT(false, "an unknown reduction");
}

// Whether waiting for it would not have to wait for other ranks.
bool is_here(c10d::Work& work) {
  auto* own = dynamic_cast<EngineWork*>(&work);
  return own != nullptr ? own->is_ready() : work.isCompleted();
}

Awaitable<at::Tensor> pending(const c10::intrusive_ptr<c10d::Work>& work, at::Tensor result) {
  return Awaitable<at::Tensor>(
      [work, result = std::move(result)] {
        if (work) work->wait();
        return result;
      },
      [work] { return !work || is_here(*work); });
}

// NCCL returns no work for an operation that already is in the order of the current stream.
at::Tensor finished(const c10::intrusive_ptr<c10d::Work>& work, at::Tensor result) {
  if (work) work->wait();
  return result;
}

// A tensor like `tensor` with another number of rows.
at::Tensor with_rows(const at::Tensor& tensor, std::int64_t rows) {
  auto shape = tensor.sizes().vec();
  if (shape.empty()) shape.push_back(1);
  shape[0] = rows;
  return core::empty_kept(shape, tensor.options());
}

std::int64_t sum_of(const Rows& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

void check_rows(const char* op, const Rows& rows, const Group& group) {
  TESSERA_CHECK_VALUE(rows.size() == static_cast<std::size_t>(group.size()), "comm.", op, ": ",
                      rows.size(), " row counts were given for a group of ", group.size(), ".");
  for (std::size_t r = 0; r < rows.size(); ++r) {
    TESSERA_CHECK_VALUE(rows[r] >= 0, "comm.", op, ": rank ", r, " cannot have ", rows[r],
                        " rows.");
  }
}

void check_total(const char* op, const Rows& rows, const at::Tensor& input) {
  TESSERA_CHECK_VALUE(sum_of(rows) == num_rows_of(input), "comm.", op,
                      ": the row counts add up to ", sum_of(rows), ", the input has ",
                      num_rows_of(input), " rows.");
}

void check_even(const char* op, const at::Tensor& input, const Group& group) {
  TESSERA_CHECK_VALUE(num_rows_of(input) % group.size() == 0, "comm.", op, ": ", num_rows_of(input),
                      " rows cannot be cut evenly for ", group.size(), " ranks. Use ", op,
                      "_v with the number of rows per rank.");
}

// Every rank's word, on every rank.
Rows exchange_counts(const char* op, std::int64_t mine, const at::Tensor& like,
                     const Group& group) {
  at::Tensor input = at::full({1}, mine, like.options().dtype(at::kLong).requires_grad(false));
  at::Tensor output = at::empty({group.size()}, input.options());
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  finished(engine_for(op, input, group)->_allgather_base(output, input, options), output);
  const at::Tensor counts = output.cpu();
  return {counts.data_ptr<std::int64_t>(), counts.data_ptr<std::int64_t>() + group.size()};
}

// Cuts `tensor` into one view per rank.
std::vector<at::Tensor> split_rows(const at::Tensor& tensor, const Rows& rows) {
  std::vector<at::Tensor> parts;
  std::int64_t first = 0;
  for (const std::int64_t num : rows) {
    parts.push_back(tensor.narrow(0, first, num));
    first += num;
  }
  return parts;
}

at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? tensor.detach().reshape({1}) : tensor.detach();
}

struct Started {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor result;
};

// Other engines gather and scatter equal parts only; all of them know uneven all-to-all.
bool takes_uneven_parts(const c10::intrusive_ptr<Backend>& engine) {
  return dynamic_cast<EngineBackend*>(engine.get()) != nullptr;
}

Started start_exchange(const c10::intrusive_ptr<Backend>& engine, at::Tensor output,
                       const at::Tensor& input, Rows recv_rows, Rows send_rows, bool is_async) {
  at::Tensor rows = input.contiguous();
  c10d::AllToAllOptions options;
  options.asyncOp = is_async;
  auto work = engine->alltoall_base(output, rows, recv_rows, send_rows, options);
  return {std::move(work), std::move(output)};
}

void check_root(const char* op, int root, const Group& group) {
  TESSERA_CHECK_VALUE(root >= 0 && root < group.size(), "comm.", op, ": root ", root,
                      " is not a rank of a group of ", group.size(), " (0 to ", group.size() - 1,
                      ").");
}

at::Tensor wait(const Started& started) { return finished(started.work, started.result); }
Awaitable<at::Tensor> later(Started started) {
  return pending(std::move(started.work), std::move(started.result));
}

Started start_all_reduce(at::Tensor tensor, const Group& group, Reduction reduction,
                         bool is_async) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(reduction);
  options.asyncOp = is_async;
  std::vector<at::Tensor> tensors{tensor};
  auto work = engine_for("all_reduce", tensor, group)->allreduce(tensors, options);
  return {std::move(work), std::move(tensor)};
}

at::Tensor fresh_copy(const char* op, const at::Tensor& input) {
  TESSERA_CHECK_VALUE(input.defined(), "comm.", op, ": the tensor is undefined.");
  if (input.layout() != at::kStrided) return input.detach().clone();
  return core::empty_kept(input.sizes(), input.options()).copy_(input.detach());
}

Started start_reduce(const at::Tensor& input, int root, const Group& group, Reduction reduction,
                     bool is_async) {
  c10d::ReduceOptions options;
  options.reduceOp = reduce_op(reduction);
  options.rootRank = root;
  options.asyncOp = is_async;
  std::vector<at::Tensor> tensors{fresh_copy("reduce", input)};
  auto work = engine_for("reduce", input, group)->reduce(tensors, options);
  return {std::move(work), tensors[0]};
}

Started start_broadcast(at::Tensor tensor, int root, const Group& group, bool is_async) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = is_async;
  std::vector<at::Tensor> tensors{tensor};
  auto work = engine_for("broadcast", tensor, group)->broadcast(tensors, options);
  return {std::move(work), std::move(tensor)};
}

Started start_all_gather(const at::Tensor& input, const Group& group, bool is_async) {
  const auto engine = engine_for("all_gather", input, group);
  at::Tensor rows = as_rows(input);
  at::Tensor output = with_rows(rows, rows.size(0) * group.size());
  c10d::AllgatherOptions options;
  options.asyncOp = is_async;
  auto work = engine->_allgather_base(output, rows, options);
  return {std::move(work), std::move(output)};
}

Started start_all_gather_v(const at::Tensor& input, const Group& group,
                           const std::optional<Rows>& given, bool is_async) {
  const auto engine = engine_for("all_gather_v", input, group);
  at::Tensor mine = as_rows(input);
  if (given) check_rows("all_gather_v", *given, group);
  const Rows rows = given ? *given : exchange_counts("all_gather_v", mine.size(0), input, group);
  TESSERA_CHECK_VALUE(rows[group.rank()] == mine.size(0), "comm.all_gather_v: rank ", group.rank(),
                      " holds ", mine.size(0), " rows, the sizes say ", rows[group.rank()], ".");
  at::Tensor output = with_rows(mine, sum_of(rows));
  if (takes_uneven_parts(engine)) {
    std::vector<std::vector<at::Tensor>> outputs{split_rows(output, rows)};
    std::vector<at::Tensor> inputs{mine};
    c10d::AllgatherOptions options;
    options.asyncOp = is_async;
    auto work = engine->allgather(outputs, inputs, options);
    return {std::move(work), std::move(output)};
  }
  return start_exchange(engine, std::move(output),
                        at::cat(std::vector<at::Tensor>(group.size(), mine)), rows,
                        Rows(group.size(), mine.size(0)), is_async);
}

Started start_reduce_scatter(const at::Tensor& input, const Group& group, Reduction reduction,
                             bool is_async) {
  const auto engine = engine_for("reduce_scatter", input, group);
  check_even("reduce_scatter", input, group);
  at::Tensor rows = as_rows(input);
  at::Tensor output = with_rows(rows, rows.size(0) / group.size());
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(reduction);
  options.asyncOp = is_async;
  auto work = engine->_reduce_scatter_base(output, rows, options);
  return {std::move(work), std::move(output)};
}

Started start_reduce_scatter_v(const at::Tensor& input, const Rows& rows, const Group& group,
                               Reduction reduction, bool is_async) {
  const auto engine = engine_for("reduce_scatter_v", input, group);
  check_rows("reduce_scatter_v", rows, group);
  check_total("reduce_scatter_v", rows, input);
  at::Tensor whole = as_rows(input);
  at::Tensor output = with_rows(whole, rows[group.rank()]);
  std::vector<at::Tensor> outputs{output};
  std::vector<std::vector<at::Tensor>> inputs{split_rows(whole, rows)};
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(reduction);
  options.asyncOp = is_async;
  auto work = engine->reduce_scatter(outputs, inputs, options);
  return {std::move(work), std::move(output)};
}

Started start_all_to_all(const at::Tensor& input, const Group& group, bool is_async) {
  const auto engine = engine_for("all_to_all", input, group);
  check_even("all_to_all", input, group);
  at::Tensor rows = as_rows(input);
  at::Tensor output = core::empty_kept(rows.sizes(), rows.options());
  Rows even;
  c10d::AllToAllOptions options;
  options.asyncOp = is_async;
  auto work = engine->alltoall_base(output, rows, even, even, options);
  return {std::move(work), std::move(output)};
}

Started start_all_to_all_v(const at::Tensor& input, const Rows& send_rows, const Group& group,
                           const std::optional<Rows>& given, bool is_async) {
  const auto engine = engine_for("all_to_all_v", input, group);
  check_rows("all_to_all_v", send_rows, group);
  check_total("all_to_all_v", send_rows, input);
  if (given) check_rows("all_to_all_v", *given, group);
  Rows recv_rows;
  if (given) {
    recv_rows = *given;
  } else {
    at::Tensor counts = at::tensor(send_rows, at::kLong).to(input.device());
    const at::Tensor arrived = wait(start_all_to_all(counts, group, false)).cpu();
    recv_rows.assign(arrived.data_ptr<std::int64_t>(),
                     arrived.data_ptr<std::int64_t>() + group.size());
  }
  at::Tensor rows = as_rows(input);
  at::Tensor output = with_rows(rows, sum_of(recv_rows));
  Rows sent = send_rows;
  c10d::AllToAllOptions options;
  options.asyncOp = is_async;
  auto work = engine->alltoall_base(output, rows, recv_rows, sent, options);
  return {std::move(work), std::move(output)};
}

Started start_gather(const at::Tensor& input, int root, const Group& group,
                     const std::optional<Rows>& given, bool is_async) {
  const auto engine = engine_for("gather", input, group);
  check_root("gather", root, group);
  if (given) check_rows("gather", *given, group);
  at::Tensor mine = as_rows(input);
  const Rows rows = given ? *given : exchange_counts("gather", mine.size(0), input, group);
  TESSERA_CHECK_VALUE(rows[group.rank()] == mine.size(0), "comm.gather: rank ", group.rank(),
                      " holds ", mine.size(0), " rows, the sizes say ", rows[group.rank()], ".");
  const bool is_root = group.rank() == root;
  at::Tensor output = with_rows(mine, is_root ? sum_of(rows) : 0);
  if (!takes_uneven_parts(engine)) {
    Rows send_rows(group.size(), 0);
    send_rows[root] = mine.size(0);
    return start_exchange(engine, std::move(output), mine, is_root ? rows : Rows(group.size(), 0),
                          std::move(send_rows), is_async);
  }
  std::vector<std::vector<at::Tensor>> outputs;
  if (is_root) outputs.push_back(split_rows(output, rows));
  std::vector<at::Tensor> inputs{mine};
  c10d::GatherOptions options;
  options.rootRank = root;
  options.asyncOp = is_async;
  auto work = engine->gather(outputs, inputs, options);
  return {std::move(work), std::move(output)};
}

Started start_scatter(const at::Tensor& input, const Rows& rows, int root, const Group& group,
                      bool is_async) {
  const auto engine = engine_for("scatter", input, group);
  check_root("scatter", root, group);
  check_rows("scatter", rows, group);
  const bool is_root = group.rank() == root;
  at::Tensor whole = as_rows(input);
  if (is_root) check_total("scatter", rows, input);
  std::vector<at::Tensor> outputs{with_rows(whole, rows[group.rank()])};
  if (!takes_uneven_parts(engine)) {
    Rows recv_rows(group.size(), 0);
    recv_rows[root] = rows[group.rank()];
    return start_exchange(engine, outputs[0], is_root ? whole : with_rows(whole, 0),
                          std::move(recv_rows), is_root ? rows : Rows(group.size(), 0), is_async);
  }
  std::vector<std::vector<at::Tensor>> inputs;
  if (is_root) inputs.push_back(split_rows(whole, rows));
  c10d::ScatterOptions options;
  options.rootRank = root;
  options.asyncOp = is_async;
  auto work = engine->scatter(outputs, inputs, options);
  return {std::move(work), outputs[0]};
}

Started start_send(const at::Tensor& tensor, int destination, const Group& group, int tag) {
  std::vector<at::Tensor> tensors{tensor.detach()};
  auto work = engine_for("send", tensor, group)->send(tensors, destination, tag);
  return {std::move(work), tensor};
}

Started start_recv(at::Tensor tensor, int source, const Group& group, int tag) {
  TESSERA_CHECK_VALUE(source >= 0, "comm.recv: ", source, " is not a rank.");
  std::vector<at::Tensor> tensors{tensor};
  auto work = engine_for("recv", tensor, group)->recv(tensors, source, tag);
  return {std::move(work), std::move(tensor)};
}

Started start_barrier(const Group& group, bool is_async) {
  const auto device = message_device(*group.process_group()).type();
  c10d::BarrierOptions options;
  options.asyncOp = is_async;
  return {group.process_group()->getBackend(device)->barrier(options), at::Tensor()};
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& input, const Group& group, Reduction reduction) {
  return wait(start_all_reduce(fresh_copy("all_reduce", input), group, reduction, false));
}
Awaitable<at::Tensor> all_reduce_async(const at::Tensor& input, const Group& group,
                                       Reduction reduction) {
  return later(start_all_reduce(fresh_copy("all_reduce", input), group, reduction, true));
}
void all_reduce_(at::Tensor& tensor, const Group& group, Reduction reduction) {
  wait(start_all_reduce(tensor, group, reduction, false));
}
Awaitable<at::Tensor> all_reduce_async_(at::Tensor& tensor, const Group& group,
                                        Reduction reduction) {
  return later(start_all_reduce(tensor, group, reduction, true));
}

at::Tensor reduce(const at::Tensor& input, int root, const Group& group, Reduction reduction) {
  return wait(start_reduce(input, root, group, reduction, false));
}
Awaitable<at::Tensor> reduce_async(const at::Tensor& input, int root, const Group& group,
                                   Reduction reduction) {
  return later(start_reduce(input, root, group, reduction, true));
}

void broadcast_(at::Tensor& tensor, int root, const Group& group) {
  wait(start_broadcast(tensor, root, group, false));
}
Awaitable<at::Tensor> broadcast_async_(at::Tensor& tensor, int root, const Group& group) {
  return later(start_broadcast(tensor, root, group, true));
}

at::Tensor all_gather(const at::Tensor& input, const Group& group) {
  return wait(start_all_gather(input, group, false));
}
Awaitable<at::Tensor> all_gather_async(const at::Tensor& input, const Group& group) {
  return later(start_all_gather(input, group, true));
}
at::Tensor all_gather_v(const at::Tensor& input, const Group& group,
                        const std::optional<Rows>& rows) {
  return wait(start_all_gather_v(input, group, rows, false));
}
Awaitable<at::Tensor> all_gather_v_async(const at::Tensor& input, const Group& group,
                                         const std::optional<Rows>& rows) {
  return later(start_all_gather_v(input, group, rows, true));
}

at::Tensor reduce_scatter(const at::Tensor& input, const Group& group, Reduction reduction) {
  return wait(start_reduce_scatter(input, group, reduction, false));
}
Awaitable<at::Tensor> reduce_scatter_async(const at::Tensor& input, const Group& group,
                                           Reduction reduction) {
  return later(start_reduce_scatter(input, group, reduction, true));
}
at::Tensor reduce_scatter_v(const at::Tensor& input, const Rows& rows, const Group& group,
                            Reduction reduction) {
  return wait(start_reduce_scatter_v(input, rows, group, reduction, false));
}
Awaitable<at::Tensor> reduce_scatter_v_async(const at::Tensor& input, const Rows& rows,
                                             const Group& group, Reduction reduction) {
  return later(start_reduce_scatter_v(input, rows, group, reduction, true));
}

at::Tensor all_to_all(const at::Tensor& input, const Group& group) {
  return wait(start_all_to_all(input, group, false));
}
Awaitable<at::Tensor> all_to_all_async(const at::Tensor& input, const Group& group) {
  return later(start_all_to_all(input, group, true));
}
Awaitable<std::vector<at::Tensor>> all_to_all_pieces_async(std::vector<at::Tensor> outputs,
                                                           const std::vector<at::Tensor>& inputs,
                                                           const Group& group) {
  const auto num_ranks = static_cast<std::size_t>(group.size());
  TESSERA_CHECK_VALUE(inputs.size() == num_ranks && outputs.size() == num_ranks,
                      "comm.all_to_all_pieces: ", inputs.size(), " inputs and ", outputs.size(),
                      " outputs for ", num_ranks, " ranks; there must be one of each per rank.");
  const auto engine = engine_for("all_to_all_pieces", inputs[0], group);
  if (takes_uneven_parts(engine)) {
    std::vector<at::Tensor> sources;
    for (const at::Tensor& input : inputs) sources.push_back(input.detach());
    c10d::AllToAllOptions options;
    options.asyncOp = true;
    const auto work = engine->alltoall(outputs, sources, options);
    return Awaitable<std::vector<at::Tensor>>(
        [work, outputs] {
          work->wait();
          return outputs;
        },
        [work] { return is_here(*work); });
  }
  // Other engines send from one tensor into one.
  Rows sent;
  Rows received;
  std::vector<at::Tensor> flat;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    sent.push_back(inputs[r].numel());
    received.push_back(outputs[r].numel());
    flat.push_back(inputs[r].detach().reshape({-1}));
  }
  const auto arriving = all_to_all_v_async(at::cat(flat), sent, group, received);
  return Awaitable<std::vector<at::Tensor>>(
      [arriving, outputs, received] {
        const auto parts = split_rows(arriving.wait(), received);
        for (std::size_t r = 0; r < parts.size(); ++r) {
          outputs[r].copy_(parts[r].view(outputs[r].sizes()));
        }
        return outputs;
      },
      [arriving] { return arriving.is_ready(); });
}
at::Tensor all_to_all_v(const at::Tensor& input, const Rows& send_rows, const Group& group,
                        const std::optional<Rows>& recv_rows) {
  return wait(start_all_to_all_v(input, send_rows, group, recv_rows, false));
}
Awaitable<at::Tensor> all_to_all_v_async(const at::Tensor& input, const Rows& send_rows,
                                         const Group& group, const std::optional<Rows>& recv_rows) {
  return later(start_all_to_all_v(input, send_rows, group, recv_rows, true));
}

at::Tensor gather(const at::Tensor& input, int root, const Group& group,
                  const std::optional<Rows>& rows) {
  return wait(start_gather(input, root, group, rows, false));
}
Awaitable<at::Tensor> gather_async(const at::Tensor& input, int root, const Group& group,
                                   const std::optional<Rows>& rows) {
  return later(start_gather(input, root, group, rows, true));
}
at::Tensor scatter(const at::Tensor& input, const Rows& rows, int root, const Group& group) {
  return wait(start_scatter(input, rows, root, group, false));
}
Awaitable<at::Tensor> scatter_async(const at::Tensor& input, const Rows& rows, int root,
                                    const Group& group) {
  return later(start_scatter(input, rows, root, group, true));
}

void send(const at::Tensor& tensor, int destination, const Group& group, int tag) {
  wait(start_send(tensor, destination, group, tag));
}
Awaitable<at::Tensor> send_async(const at::Tensor& tensor, int destination, const Group& group,
                                 int tag) {
  return later(start_send(tensor, destination, group, tag));
}
void recv_(at::Tensor& tensor, int source, const Group& group, int tag) {
  wait(start_recv(tensor, source, group, tag));
}
Awaitable<at::Tensor> recv_async_(at::Tensor& tensor, int source, const Group& group, int tag) {
  return later(start_recv(tensor, source, group, tag));
}

void barrier(const Group& group) { wait(start_barrier(group, false)); }
Awaitable<at::Tensor> barrier_async(const Group& group) {
  return later(start_barrier(group, true));
}

}  // namespace tessera::comm
