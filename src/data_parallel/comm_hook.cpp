#include "tessera/data_parallel/comm_hook.h"

#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "data_parallel/hook_base.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

std::vector<c10::Device> devices_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return {};
  return {tensor.device()};
}

/// How many elements of a flat tensor one element of a parameter takes: complex parameters lie in
/// real buffers as pairs.
std::int64_t elements_per(const at::Tensor& parameter, const at::Tensor& flat) {
  return parameter.is_complex() && !flat.is_complex() ? 2 : 1;
}

}  // namespace

Bucket::Bucket(std::size_t index, bool is_last, at::Tensor buffer, std::vector<std::string> names,
               std::vector<at::Tensor> parameters, comm::Group group, double divisor)
    : index_(index),
      is_last_(is_last),
      buffer_(std::move(buffer)),
      names_(std::move(names)),
      parameters_(std::move(parameters)),
      group_(std::move(group)),
      divisor_(divisor) {
  TESSERA_CHECK_VALUE(names_.size() == parameters_.size(), "ddp.bucket: ", names_.size(),
                      " names for ", parameters_.size(), " parameters.");
  TESSERA_CHECK_VALUE(divisor_ > 0, "ddp.bucket: the divisor is ", divisor_,
                      ". It must be positive.");
  if (is_sparse()) return;
  std::int64_t length = 0;
  for (const at::Tensor& parameter : parameters_) {
    length += parameter.numel() * elements_per(parameter, buffer_);
  }
  TESSERA_CHECK_VALUE(buffer_.dim() == 1 && buffer_.numel() == length,
                      "ddp.bucket: the buffer has shape ", buffer_.sizes(),
                      ", but the parameters have ", length, " elements together.");
}

void Bucket::set_buffer(at::Tensor buffer) {
  TESSERA_CHECK_VALUE(buffer.numel() == buffer_.numel(), "ddp.bucket: a buffer of ", buffer.numel(),
                      " elements cannot replace one of ", buffer_.numel(), ".");
  buffer_ = std::move(buffer);
}

std::vector<at::Tensor> Bucket::gradients() const { return views_of(buffer_); }

std::vector<at::Tensor> Bucket::slices_of(const at::Tensor& flat) const {
  return data_parallel::slices_of(flat, parameters_);
}

std::vector<at::Tensor> Bucket::views_of(const at::Tensor& flat) const {
  return data_parallel::views_of(flat, parameters_);
}

std::vector<at::Tensor> slices_of(const at::Tensor& flat,
                                  const std::vector<at::Tensor>& parameters) {
  if (flat.is_sparse()) return {flat};
  std::vector<at::Tensor> slices;
  slices.reserve(parameters.size());
  std::int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    const std::int64_t length = parameter.numel() * elements_per(parameter, flat);
    slices.push_back(flat.narrow(0, offset, length));
    offset += length;
  }
  return slices;
}

std::vector<at::Tensor> views_of(const at::Tensor& flat,
                                 const std::vector<at::Tensor>& parameters) {
  if (flat.is_sparse()) return {flat};
  std::vector<at::Tensor> views = slices_of(flat, parameters);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (elements_per(parameter, flat) == 2) {
      views[i] = at::view_as_complex(views[i].view({parameter.numel(), 2}));
    }
    views[i] =
        parameter.is_non_overlapping_and_dense()
            ? views[i].as_strided(parameter.sizes(), parameter.strides(), views[i].storage_offset())
            : views[i].view(parameter.sizes());
  }
  return views;
}

void CommHook::load_state(const HookState& state) {
  TESSERA_CHECK_VALUE(state.tensors.empty() && state.numbers.empty(), "ddp.hook: '", name(),
                      "' keeps no state, but was given ",
                      state.tensors.size() + state.numbers.size(), " entries.");
}

FuturePtr pending(const at::Tensor& like) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices_of(like));
}

FuturePtr completed(const at::Tensor& value) {
  FuturePtr future = pending(value);
  future->markCompleted(c10::IValue(value));
  return future;
}

at::Tensor tensor_in(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    TESSERA_CHECK_VALUE(!list.empty(), "ddp.hook: a future holds an empty list of tensors.");
    return list.front();
  }
  TESSERA_CHECK_TYPE(false, "ddp.hook: a future holds ", value.tagKind(), ", not a tensor.");
}

FuturePtr then(const FuturePtr& future, const at::Tensor& /*like*/,
               std::function<at::Tensor(at::Tensor)> step) {
  // What the step holds, such as parameters, goes before anybody learns of the result: afterwards
  // the program may end while this thread would still be letting go of it.
  return future->then(
      [held = std::make_shared<decltype(step)>(std::move(step))](
          c10::ivalue::Future& done) -> c10::IValue {
        const auto now = std::exchange(*held, nullptr);
        return now(tensor_in(done.value()));
      },
      c10::TensorType::get());
}

void use_here(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  tensor.record_stream(
      c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
}

bool adds_in_rank_order(const comm::Group& group) { return group.engine() == "shm"; }

void Sender::count(const at::Tensor& tensor) {
  const std::int64_t elements = tensor.is_sparse() ? tensor._values().numel() : tensor.numel();
  bytes_.fetch_add(elements * static_cast<std::int64_t>(tensor.element_size()),
                   std::memory_order_relaxed);
}

WorkPtr Sender::start_sum(at::Tensor tensor, const comm::Group& group) {
  count(tensor);
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return group.process_group()->allreduce(tensors);
}

WorkPtr Sender::start_average(at::Tensor tensor, const comm::Group& group, double divisor) {
  // Dividing while adding saves a walk through memory.
  if (adds_in_rank_order(group) && divisor == group.size() && !tensor.is_sparse()) {
    count(tensor);
    std::vector<at::Tensor> tensors{std::move(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    return group.process_group()->allreduce(tensors, options);
  }
  if (divisor != 1) tensor.div_(divisor);
  return start_sum(std::move(tensor), group);
}

WorkPtr Sender::start_gather(at::Tensor tensor, at::Tensor& rows, const comm::Group& group) {
  count(tensor);
  rows = at::empty({group.size(), tensor.numel()}, tensor.options());
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.size(); ++rank) outputs[0].push_back(rows[rank]);
  std::vector<at::Tensor> inputs{std::move(tensor)};
  return group.process_group()->allgather(outputs, inputs);
}

FuturePtr Sender::average_plainly(const Bucket& bucket) {
  return then(start_average(bucket.buffer(), bucket.group(), bucket.divisor())->getFuture(),
              bucket.buffer(), [](at::Tensor result) { return result; });
}

FuturePtr Pipeline::add(std::vector<Step> steps, const at::Tensor& result) {
  Job job{{std::make_move_iterator(steps.begin()), std::make_move_iterator(steps.end())},
          result,
          pending(result)};
  FuturePtr future = job.future;
  const std::size_t earlier = jobs_.size();
  try {
    const Step first = std::move(job.steps.front());
    job.steps.pop_front();
    jobs_.push_back(std::move(job));
    first();
    advance(earlier);
  } catch (...) {
    reset();
    throw;
  }
  return future;
}

void Pipeline::flush() {
  try {
    while (!jobs_.empty()) advance(jobs_.size());
  } catch (...) {
    reset();
    throw;
  }
}

void Pipeline::reset() {
  const auto error = std::make_exception_ptr(
      std::runtime_error("ddp.hook: this step was given up; see the first error."));
  for (Job& job : jobs_) {
    if (!job.future->completed()) job.future->setError(error);
  }
  jobs_.clear();
}

void Pipeline::advance(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Job& job = jobs_[i];
    if (!job.steps.empty()) {
      const Step step = std::move(job.steps.front());
      job.steps.pop_front();
      step();
    }
    if (job.steps.empty() && !job.future->completed()) {
      job.future->markCompleted(c10::IValue(job.result));
    }
  }
  while (!jobs_.empty() && jobs_.front().future->completed()) jobs_.pop_front();
}

}  // namespace tessera::data_parallel
