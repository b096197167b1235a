// The collectives of an engine: what c10d asks, checked and put into steps for the transport.

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include "comm/backend.h"
#include "comm/tensor_memory.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

using Use = TensorMemory::Use;

// Note [Tensors that share memory]
// A step reads its inputs while it writes its outputs, piece by piece. Outputs that share memory
// with each other, or with an input, are therefore written apart and copied back in order at the
// end: what is read is what was there before, and of several outputs the last one stays.
std::vector<TensorMemory> memories(const std::vector<at::Tensor>& tensors, Use use,
                                   bool is_apart = false) {
  std::vector<TensorMemory> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) result.emplace_back(tensor, use, is_apart);
  return result;
}

std::vector<at::Tensor> joined(std::vector<at::Tensor> tensors,
                               const std::vector<at::Tensor>& others) {
  tensors.insert(tensors.end(), others.begin(), others.end());
  return tensors;
}

std::vector<Piece> pieces(const std::vector<TensorMemory>& memories) {
  std::vector<Piece> result;
  result.reserve(memories.size());
  for (const TensorMemory& memory : memories) result.push_back(memory.piece());
  return result;
}

void write_back(const std::vector<TensorMemory>& memories) {
  for (const TensorMemory& memory : memories) memory.write_back();
}

// The rows of `memory` cut as `counts` says; evenly if it is empty.
std::vector<Piece> cut_rows(const TensorMemory& memory, const std::vector<std::int64_t>& counts,
                            int size) {
  if (counts.empty()) return memory.even_parts(size);
  std::vector<Piece> result;
  std::int64_t first = 0;
  for (const std::int64_t num : counts) {
    result.push_back(memory.rows(first, num));
    first += num;
  }
  return result;
}

// Whether `part` is exactly the part of `whole` that belongs to this rank: that works in place.
bool is_own_part(const at::Tensor& whole, const at::Tensor& part, int rank) {
  return whole.is_contiguous() && part.is_contiguous() &&
         static_cast<const char*>(whole.const_data_ptr()) + rank * part.nbytes() ==
             static_cast<const char*>(part.const_data_ptr());
}

// Whether `output` shares memory with one of `inputs`, other than being input `except` itself.
bool shares_with_any(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int except) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool may_be_same = static_cast<int>(i) == except;
    if (may_be_same ? share_memory({inputs[i]}, output, 0)
                    : share_memory(std::vector<at::Tensor>{inputs[i], output})) {
      return true;
    }
  }
  return false;
}

// Whether an input of one of several steps shares memory with the output of another.
bool share_in_turn(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (std::size_t j = i + 1; j < inputs.size(); ++j) {
      if (share_memory(std::vector<at::Tensor>{outputs[i], inputs[j]})) return true;
    }
  }
  return false;
}

void check_single(std::string_view op, std::size_t num_tensors) {
  TESSERA_CHECK_VALUE(num_tensors == 1, "comm.", op, ": one tensor is expected, ", num_tensors,
                      " were given.");
}

void check_root(std::string_view op, std::int64_t root, int size) {
  TESSERA_CHECK_VALUE(root >= 0 && root < size, "comm.", op, ": root ", root,
                      " is not a rank of a group of ", size, " (0 to ", size - 1, ").");
}

void check_list(std::string_view op, std::size_t num_tensors, int size) {
  TESSERA_CHECK_VALUE(num_tensors == static_cast<std::size_t>(size), "comm.", op, ": ", num_tensors,
                      " tensors were given for a group of ", size, ".");
}

void check_same_type(std::string_view op, const at::Tensor& output, const at::Tensor& input) {
  TESSERA_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "comm.", op, ": the output is ",
                     output.scalar_type(), ", the input ", input.scalar_type(), ".");
}

// Several tensors per call, as torch's older interface has them: one shape, one type, one device.
void check_alike(std::string_view op, const std::vector<at::Tensor>& tensors,
                 std::string_view engine) {
  TESSERA_CHECK_VALUE(!tensors.empty(), "comm.", op, ": no tensor was given.");
  check_tensors(op, tensors, engine);
  for (const at::Tensor& tensor : tensors) {
    TESSERA_CHECK_VALUE(tensor.sizes() == tensors[0].sizes(), "comm.", op, ": tensors of shape ",
                        tensors[0].sizes(), " and ", tensor.sizes(), " in one call.");
  }
}

// Reduces `other` into `tensor`, of one rank.
void reduce_into(at::Tensor tensor, const at::Tensor& other, ReduceOp reduction) {
  switch (reduction) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      tensor.add_(other);
      break;
    case ReduceOp::kProduct:
      tensor.mul_(other);
      break;
    case ReduceOp::kMin:
      tensor.copy_(at::minimum(tensor, other));
      break;
    case ReduceOp::kMax:
      tensor.copy_(at::maximum(tensor, other));
      break;
    case ReduceOp::kBand:
      tensor.bitwise_and_(other);
      break;
    case ReduceOp::kBor:
      tensor.bitwise_or_(other);
      break;
    case ReduceOp::kBxor:
      tensor.bitwise_xor_(other);
      break;
  }
}

bool is_scaled(const c10d::ReduceOp& reduction) {
  return static_cast<c10d::ReduceOp::RedOpType>(reduction) == c10d::ReduceOp::PREMUL_SUM;
}

// What a scaled sum adds up: `tensor` times this rank's factor; for other reductions `tensor`.
at::Tensor scaled(const at::Tensor& tensor, const c10d::ReduceOp& reduction) {
  if (!is_scaled(reduction)) return tensor;
  const auto* supplement =
      dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(reduction.supplement_.get());
  TESSERA_CHECK_VALUE(supplement != nullptr, "comm: a scaled sum without a factor.");
  const at::Tensor values = tensor.detach();
  return supplement->tensor_factor.defined()
             ? values.mul(supplement->tensor_factor.to(values.options()))
             : values.mul(supplement->double_factor);
}

void check_cut(std::string_view op, const char* what, const std::vector<std::int64_t>& counts,
               const at::Tensor& tensor, int size) {
  const std::int64_t rows = num_rows_of(tensor);
  if (counts.empty()) {
    TESSERA_CHECK_VALUE(rows % size == 0, "comm.", op, ": ", rows, " ", what,
                        " rows cannot be cut evenly for ", size,
                        " ranks. Give the number of rows per rank.");
    return;
  }
  TESSERA_CHECK_VALUE(counts.size() == static_cast<std::size_t>(size), "comm.", op, ": ",
                      counts.size(), " ", what, " row counts were given for a group of ", size,
                      ".");
  std::int64_t total = 0;
  for (const std::int64_t count : counts) {
    TESSERA_CHECK_VALUE(count >= 0, "comm.", op, ": a negative number of ", what, " rows, ", count,
                        ".");
    total += count;
  }
  TESSERA_CHECK_VALUE(total == rows, "comm.", op, ": the ", what, " row counts add up to ", total,
                      ", the tensor has ", rows, " rows.");
}

}  // namespace

c10::intrusive_ptr<c10d::Work> EngineBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1) {
    if (tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
    return allreduce_coalesced(tensors, static_cast<const c10d::AllreduceCoalescedOptions&>(opts));
  }
  // One result over all tensors of all ranks, in each of them.
  check_alike("all_reduce", tensors, getBackendName());
  const ReduceOp reduction = check_reduction("all_reduce", opts.reduceOp, tensors[0].scalar_type());
  TESSERA_CHECK_VALUE(reduction != ReduceOp::kAvg, "comm.all_reduce: the average of ",
                      tensors.size(), " tensors per rank is not defined.");
  at::Tensor whole = scaled(tensors[0], opts.reduceOp).detach().clone();
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    reduce_into(whole, scaled(tensors[i], opts.reduceOp).detach(), reduction);
  }
  Step step = [memory = TensorMemory(whole, Use::kReadWrite), whole, tensors, reduction](
                  Transport& transport, Call& call) {
    call.op = Operator::kAllReduce;
    call.dtype = memory.dtype();
    call.reduce = reduction;
    call.count = memory.count();
    transport.all_reduce(call, memory.piece());
    memory.write_back();
    for (const at::Tensor& tensor : tensors) tensor.detach().copy_(whole);
  };
  return submit({c10d::OpType::ALLREDUCE, "all_reduce", tensors, opts.timeout, opts.asyncOp},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Step> steps;
  std::optional<Call> plan;
  for (const at::Tensor& tensor : tensors) check_tensor("all_reduce", tensor, getBackendName());
  const bool is_apart = share_memory(tensors);
  for (const at::Tensor& tensor : tensors) {
    const ReduceOp reduction = check_reduction("all_reduce", opts.reduceOp, tensor.scalar_type());
    if (is_scaled(opts.reduceOp)) {
      TESSERA_CHECK_VALUE(!is_apart,
                          "comm.all_reduce: tensors that share memory cannot be scaled "
                          "one by one. Pass each of them once.");
      tensor.detach().copy_(scaled(tensor, opts.reduceOp));
    }
    TensorMemory memory(tensor, Use::kReadWrite, is_apart);
    const auto describe = [reduction](Call& call, const TensorMemory& memory) {
      call.op = Operator::kAllReduce;
      call.dtype = memory.dtype();
      call.reduce = reduction;
      call.count = memory.count();
    };
    if (tensors.size() == 1) describe(plan.emplace(), memory);
    steps.push_back([memory = std::move(memory), describe](Transport& transport, Call& call) {
      describe(call, memory);
      transport.all_reduce(call, memory.piece());
      memory.write_back();
    });
  }
  const int num_sequence = static_cast<int>(tensors.size());
  return submit({c10d::OpType::ALLREDUCE, "all_reduce", tensors, opts.timeout, opts.asyncOp,
                 num_sequence, plan},
                std::move(steps));
}

c10::intrusive_ptr<c10d::Work> EngineBackend::reduce(std::vector<at::Tensor>& tensors,
                                                     const c10d::ReduceOptions& opts) {
  check_single("reduce", tensors.size());
  check_tensor("reduce", tensors[0], getBackendName());
  check_root("reduce", opts.rootRank, size_);
  const ReduceOp reduction = check_reduction("reduce", opts.reduceOp, tensors[0].scalar_type());
  const int root = static_cast<int>(opts.rootRank);
  const Use use = rank_ == root ? Use::kReadWrite : Use::kRead;
  const at::Tensor brought = scaled(tensors[0], opts.reduceOp);
  Step step = [memory = TensorMemory(brought, use), brought, target = tensors[0], reduction, root,
               is_root = rank_ == root](Transport& transport, Call& call) {
    call.op = Operator::kReduce;
    call.dtype = memory.dtype();
    call.reduce = reduction;
    call.root = root;
    call.count = memory.count();
    transport.reduce(call, memory.piece());
    memory.write_back();
    if (is_root && !brought.is_same(target)) target.detach().copy_(brought);
  };
  return submit({c10d::OpType::REDUCE, "reduce", tensors, opts.timeout, opts.asyncOp},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                        const c10d::BroadcastOptions& opts) {
  check_alike("broadcast", tensors, getBackendName());
  check_root("broadcast", opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  TESSERA_CHECK_VALUE(
      opts.rootTensor >= 0 && opts.rootTensor < static_cast<std::int64_t>(tensors.size()),
      "comm.broadcast: root tensor ", opts.rootTensor, " of ", tensors.size(), ".");
  const at::Tensor source = tensors[static_cast<std::size_t>(opts.rootTensor)];
  const Use use = rank_ == root ? Use::kRead : Use::kWrite;
  Step step = [memory = TensorMemory(source, use), source, tensors, root](Transport& transport,
                                                                          Call& call) {
    call.op = Operator::kBroadcast;
    call.dtype = memory.dtype();
    call.root = root;
    call.count = memory.count();
    transport.broadcast(call, memory.piece());
    memory.write_back();
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.is_same(source)) tensor.detach().copy_(source);
    }
  };
  return submit({c10d::OpType::BROADCAST, "broadcast", tensors, opts.timeout, opts.asyncOp},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  TESSERA_CHECK_VALUE(outputs.size() == inputs.size(), "comm.all_gather: ", outputs.size(),
                      " lists of outputs for ", inputs.size(), " inputs.");
  if (inputs.size() == 1) return gather_lists(outputs, inputs, {}, opts);
  // Every list gets all tensors of all ranks, rank by rank.
  check_alike("all_gather", inputs, getBackendName());
  const std::size_t num_tensors = inputs.size();
  std::vector<std::vector<at::Tensor>> lists(num_tensors);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (std::size_t k = 0; k < num_tensors; ++k) {
    check_list("all_gather", outputs[k].size(), size_ * static_cast<int>(num_tensors));
    check_tensors("all_gather", outputs[k], getBackendName());
    for (std::size_t j = 0; j < outputs[k].size(); ++j) {
      if (k == 0) {
        lists[j % num_tensors].push_back(outputs[0][j]);
      } else {
        copies.emplace_back(outputs[k][j], outputs[0][j]);
      }
    }
  }
  return gather_lists(lists, inputs, std::move(copies), opts);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  // One list per rank, with all of that rank's tensors.
  check_list("all_gather_coalesced", output_lists.size(), size_);
  std::vector<std::vector<at::Tensor>> lists(inputs.size());
  for (const auto& outputs : output_lists) {
    TESSERA_CHECK_VALUE(outputs.size() == inputs.size(), "comm.all_gather_coalesced: a list of ",
                        outputs.size(), " outputs for ", inputs.size(), " inputs.");
    for (std::size_t i = 0; i < inputs.size(); ++i) lists[i].push_back(outputs[i]);
  }
  return gather_lists(lists, inputs, {}, opts);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::gather_lists(
    const std::vector<std::vector<at::Tensor>>& lists, const std::vector<at::Tensor>& inputs,
    std::vector<std::pair<at::Tensor, at::Tensor>> copies, const c10d::AllgatherOptions& opts) {
  std::vector<Step> steps;
  std::vector<at::Tensor> results;
  const bool is_in_turn = inputs.size() > 1;  // a later input must not see an earlier output
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto& outputs = lists[i];
    check_tensor("all_gather", inputs[i], getBackendName());
    check_list("all_gather", outputs.size(), size_);
    check_tensors("all_gather", outputs, getBackendName());
    check_same_type("all_gather", outputs[0], inputs[i]);
    results.insert(results.end(), outputs.begin(), outputs.end());
    auto last = i + 1 == inputs.size() ? std::move(copies) : decltype(copies){};
    const bool is_apart = share_memory(outputs, inputs[i], rank_);
    const bool is_late = is_in_turn && share_memory(joined(results, {inputs[i]}));
    steps.push_back([input = TensorMemory(inputs[i], Use::kRead, is_late),
                     targets = memories(outputs, Use::kWrite, is_apart),
                     last = std::move(last)](Transport& transport, Call& call) {
      call.op = Operator::kAllGather;
      call.dtype = input.dtype();
      call.count = input.count();
      transport.all_gather(call, input.piece(), pieces(targets));
      write_back(targets);
      for (const auto& [target, source] : last) target.detach().copy_(source);
    });
  }
  const int num_sequence = static_cast<int>(inputs.size());
  return submit({c10d::OpType::ALLGATHER, "all_gather", std::move(results), opts.timeout,
                 opts.asyncOp, num_sequence, std::nullopt, inputs},
                std::move(steps));
}

c10::intrusive_ptr<c10d::Work> EngineBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                              const c10d::AllgatherOptions& opts) {
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  TESSERA_CHECK_VALUE(outputs.size() == inputs.size(), "comm.all_gather: ", outputs.size(),
                      " outputs for ", inputs.size(), " inputs.");
  std::vector<Step> steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("all_gather", inputs[i], getBackendName());
    check_tensor("all_gather", outputs[i], getBackendName());
    check_same_type("all_gather", outputs[i], inputs[i]);
    TESSERA_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_,
                        "comm.all_gather: the output has ", outputs[i].numel(), " elements, but ",
                        size_, " ranks bring ", inputs[i].numel(), " each.");
  }
  const bool share = share_in_turn(outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool is_apart = !is_own_part(outputs[i], inputs[i], rank_) &&
                          share_memory(std::vector<at::Tensor>{outputs[i], inputs[i]});
    steps.push_back([this, input = TensorMemory(inputs[i], Use::kRead, share),
                     output = TensorMemory(outputs[i], Use::kWrite, is_apart)](Transport& transport,
                                                                               Call& call) {
      call.op = Operator::kAllGather;
      call.dtype = input.dtype();
      call.count = input.count();
      transport.all_gather(call, input.piece(), output.even_parts(size_));
      output.write_back();
    });
  }
  const int num_sequence = static_cast<int>(inputs.size());
  return submit({c10d::OpType::_ALLGATHER_BASE, "all_gather", outputs, opts.timeout, opts.asyncOp,
                 num_sequence, std::nullopt, inputs},
                std::move(steps));
}

c10::intrusive_ptr<c10d::Work> EngineBackend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::GatherOptions& opts) {
  check_single("gather", inputs.size());
  check_tensor("gather", inputs[0], getBackendName());
  check_root("gather", opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  std::vector<at::Tensor> results;
  if (rank_ == root) {
    check_single("gather", outputs.size());
    check_list("gather", outputs[0].size(), size_);
    check_tensors("gather", outputs[0], getBackendName());
    check_same_type("gather", outputs[0][0], inputs[0]);
    results = outputs[0];
  } else {
    TESSERA_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "comm.gather: only the root, rank ",
                        root, ", takes outputs.");
  }
  const bool is_apart = rank_ == root && share_memory(results, inputs[0], rank_);
  Step step = [input = TensorMemory(inputs[0], Use::kRead),
               targets = memories(results, Use::kWrite, is_apart),
               root](Transport& transport, Call& call) {
    call.op = Operator::kGather;
    call.dtype = input.dtype();
    call.root = root;
    call.count = input.count();
    transport.gather(call, input.piece(), pieces(targets));
    write_back(targets);
  };
  return submit({c10d::OpType::GATHER, "gather", results, opts.timeout, opts.asyncOp, 1,
                 std::nullopt, inputs},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::scatter(std::vector<at::Tensor>& outputs,
                                                      std::vector<std::vector<at::Tensor>>& inputs,
                                                      const c10d::ScatterOptions& opts) {
  check_single("scatter", outputs.size());
  check_tensor("scatter", outputs[0], getBackendName());
  check_root("scatter", opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  std::vector<at::Tensor> sources;
  if (rank_ == root) {
    check_single("scatter", inputs.size());
    check_list("scatter", inputs[0].size(), size_);
    check_tensors("scatter", inputs[0], getBackendName());
    check_same_type("scatter", outputs[0], inputs[0][0]);
    sources = inputs[0];
  } else {
    TESSERA_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "comm.scatter: only the root, rank ",
                        root, ", takes inputs.");
  }
  const bool is_apart = rank_ == root && shares_with_any(outputs[0], sources, rank_);
  Step step = [output = TensorMemory(outputs[0], Use::kWrite, is_apart),
               parts = memories(sources, Use::kRead), root](Transport& transport, Call& call) {
    call.op = Operator::kScatter;
    call.dtype = output.dtype();
    call.root = root;
    call.count = output.count();
    transport.scatter(call, pieces(parts), output.piece());
    output.write_back();
  };
  return submit({c10d::OpType::SCATTER, "scatter", outputs, opts.timeout, opts.asyncOp},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  check_single("reduce_scatter", outputs.size());
  check_single("reduce_scatter", inputs.size());
  check_tensor("reduce_scatter", outputs[0], getBackendName());
  check_list("reduce_scatter", inputs[0].size(), size_);
  check_tensors("reduce_scatter", inputs[0], getBackendName());
  check_same_type("reduce_scatter", outputs[0], inputs[0][0]);
  TESSERA_CHECK_VALUE(outputs[0].numel() == inputs[0][rank_].numel(),
                      "comm.reduce_scatter: the output has ", outputs[0].numel(),
                      " elements, this rank's input ", inputs[0][rank_].numel(), ".");
  const ReduceOp reduction =
      check_reduction("reduce_scatter", opts.reduceOp, outputs[0].scalar_type());
  std::vector<at::Tensor> brought;
  for (const at::Tensor& input : inputs[0]) brought.push_back(scaled(input, opts.reduceOp));
  const bool is_apart = shares_with_any(outputs[0], brought, rank_);
  Step step = [output = TensorMemory(outputs[0], Use::kWrite, is_apart),
               parts = memories(brought, Use::kRead), reduction](Transport& transport, Call& call) {
    call.op = Operator::kReduceScatter;
    call.dtype = output.dtype();
    call.reduce = reduction;
    call.count = output.count();
    transport.reduce_scatter(call, pieces(parts), output.piece());
    output.write_back();
  };
  return submit({c10d::OpType::REDUCE_SCATTER, "reduce_scatter", outputs, opts.timeout,
                 opts.asyncOp, 1, std::nullopt, inputs[0]},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  TESSERA_CHECK_VALUE(outputs.size() == inputs.size(), "comm.reduce_scatter: ", outputs.size(),
                      " outputs for ", inputs.size(), " inputs.");
  std::vector<Step> steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("reduce_scatter", inputs[i], getBackendName());
    check_tensor("reduce_scatter", outputs[i], getBackendName());
    check_same_type("reduce_scatter", outputs[i], inputs[i]);
    TESSERA_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_,
                        "comm.reduce_scatter: the input has ", inputs[i].numel(), " elements, but ",
                        size_, " ranks take ", outputs[i].numel(), " each.");
  }
  const bool share = share_in_turn(outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const ReduceOp reduction =
        check_reduction("reduce_scatter", opts.reduceOp, inputs[i].scalar_type());
    const bool is_apart = !is_own_part(inputs[i], outputs[i], rank_) &&
                          share_memory(std::vector<at::Tensor>{outputs[i], inputs[i]});
    steps.push_back([this, output = TensorMemory(outputs[i], Use::kWrite, is_apart),
                     input = TensorMemory(scaled(inputs[i], opts.reduceOp), Use::kRead, share),
                     reduction](Transport& transport, Call& call) {
      call.op = Operator::kReduceScatter;
      call.dtype = output.dtype();
      call.reduce = reduction;
      call.count = output.count();
      transport.reduce_scatter(call, input.even_parts(size_), output.piece());
      output.write_back();
    });
  }
  const int num_sequence = static_cast<int>(inputs.size());
  return submit({c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", outputs, opts.timeout,
                 opts.asyncOp, num_sequence, std::nullopt, inputs},
                std::move(steps));
}

c10::intrusive_ptr<c10d::Work> EngineBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                            std::vector<std::int64_t>& output_rows,
                                                            std::vector<std::int64_t>& input_rows,
                                                            const c10d::AllToAllOptions& opts) {
  check_tensor("all_to_all", output, getBackendName());
  check_tensor("all_to_all", input, getBackendName());
  check_same_type("all_to_all", output, input);
  check_cut("all_to_all", "output", output_rows, output, size_);
  check_cut("all_to_all", "input", input_rows, input, size_);
  const bool is_apart = share_memory(std::vector<at::Tensor>{output, input});
  Step step = [this, source = TensorMemory(input, Use::kRead),
               target = TensorMemory(output, Use::kWrite, is_apart), output_rows,
               input_rows](Transport& transport, Call& call) {
    call.op = Operator::kAllToAll;
    call.dtype = source.dtype();
    call.count = source.count();
    transport.all_to_all(call, cut_rows(source, input_rows, size_),
                         cut_rows(target, output_rows, size_));
    target.write_back();
  };
  return submit({c10d::OpType::ALLTOALL_BASE,
                 "all_to_all",
                 {output},
                 opts.timeout,
                 opts.asyncOp,
                 1,
                 std::nullopt,
                 {input}},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::alltoall(std::vector<at::Tensor>& outputs,
                                                       std::vector<at::Tensor>& inputs,
                                                       const c10d::AllToAllOptions& opts) {
  check_list("all_to_all", outputs.size(), size_);
  check_list("all_to_all", inputs.size(), size_);
  check_tensors("all_to_all", outputs, getBackendName());
  check_tensors("all_to_all", inputs, getBackendName());
  check_same_type("all_to_all", outputs[0], inputs[0]);
  bool is_apart = share_memory(outputs);
  for (const at::Tensor& output : outputs) {
    is_apart = is_apart || shares_with_any(output, inputs, /*except=*/-1);
  }
  Step step = [sources = memories(inputs, Use::kRead),
               targets = memories(outputs, Use::kWrite, is_apart)](Transport& transport,
                                                                   Call& call) {
    call.op = Operator::kAllToAll;
    call.dtype = sources[0].dtype();
    for (const TensorMemory& source : sources) call.count += source.count();
    transport.all_to_all(call, pieces(sources), pieces(targets));
    write_back(targets);
  };
  return submit({c10d::OpType::ALLTOALL, "all_to_all", outputs, opts.timeout, opts.asyncOp, 1,
                 std::nullopt, inputs},
                {std::move(step)});
}

c10::intrusive_ptr<c10d::Work> EngineBackend::barrier(const c10d::BarrierOptions& opts) {
  Step step = [](Transport& transport, Call& call) {
    call.op = Operator::kBarrier;
    transport.barrier(call);
  };
  return submit({c10d::OpType::BARRIER, "barrier", {}, opts.timeout, opts.asyncOp},
                {std::move(step)});
}

// A barrier whose timeout names all missing ranks, whether asked to or not, and also says so in the
// words that programs look for in torch's.
void EngineBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  if (getSize() > 1 && opts.timeout != c10d::kUnsetTimeout && opts.timeout.count() <= 0) {
    const std::string rank = std::to_string(getRank());
    throw Error(ErrorKind::kTimeout, {},
                "comm.barrier: a limit of " + std::to_string(opts.timeout.count()) +
                    " ms leaves no time to wait for anyone. Rank " + rank +
                    " timed out in monitoredBarrier after " + std::to_string(opts.timeout.count()) +
                    " ms.");
  }
  c10d::BarrierOptions now = opts;
  now.asyncOp = false;
  try {
    barrier(now)->wait();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout || error.ranks().empty()) throw;
    std::string late;
    for (const int rank : error.ranks()) late += (late.empty() ? "" : ", ") + std::to_string(rank);
    throw Error(ErrorKind::kTimeout, error.ranks(),
                std::string(error.what_without_backtrace()) +
                    (error.ranks().size() > 1 ? " Ranks " : " Rank ") + late +
                    " failed to pass monitoredBarrier.");
  }
}

}  // namespace tessera::comm
