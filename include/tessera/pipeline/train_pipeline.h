// tessera/pipeline/train_pipeline.h — training loops that send the ids of later batches while an
// earlier one computes.
//
// A pipeline is told what to do with a batch (Steps) and which sharded modules take which features
// of it (PipelinedModule). Then `progress` trains on one batch at a time:
//
//   pipeline::TrainPipelineSparseDist<Batch> pipe(steps, {{"ebc", ebc, features_of}});
//   while (auto output = pipe.progress([&] { return source.next(); })) { … }
//
// with `forward` taking the inputs of its modules from what it is given:
//
//   steps.forward = [&](const Batch& batch, const pipeline::SparseInputs& inputs) {
//     auto rows = ebc->compute_and_output_dist(inputs.of(*ebc)).wait();
//     …
//     return pipeline::Result{losses, logits};
//   };
//
// A thread's core::StepRecorder sees data, input dist, backward and optimizer; spans inside forward
// are the caller's.
//
// The same steps on the same batches give the same bits in every pipeline, because what is done
// ahead (ids) does not depend on what is trained (rows and layers).
//
// Every rank makes the same pipeline and has the same number of batches. After an exception a
// pipeline refuses to go on.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "tessera/core/check.h"
#include "tessera/core/step_recorder.h"
#include "tessera/pipeline/copy_stream.h"
#include "tessera/pipeline/loop.h"
#include "tessera/pipeline/sparse_inputs.h"

namespace tessera::pipeline {

/// What a forward gives: losses of any shape (backward runs on their sum), and an output for the
/// caller.
struct Result {
  at::Tensor losses;
  at::Tensor output;
};

/// What is done with a batch. Undefined functions are left out.
template <class Batch>
struct Steps {
  std::function<Result(const Batch&, const SparseInputs&)> forward;
  std::function<void()> zero_grad;
  std::function<void()> step;
};

/// A sharded module and the features of a batch that it takes. The features must be a function of
/// the batch alone.
template <class Batch>
struct PipelinedModule {
  std::string name;
  std::shared_ptr<sharding::ShardedTables> tables;
  std::function<jagged::KeyedJaggedTensor(const Batch&)> features;
};

/// Gives the next batch, nothing at the end.
template <class Batch>
using Source = std::function<std::optional<Batch>()>;

struct PipelineOptions {
  /// Batches that have a member `to(device, non_blocking)` are copied there: to a GPU, if they also
  /// have `record_stream(stream)`, on a stream of their own, beside what computes. The host goes on
  /// at once only if they come from pinned memory.
  std::optional<at::Device> device;
  /// Train on the batches in flight when the source has ended.
  bool execute_all_batches = true;
  /// Read a batch in the step that starts its input dist, not in the step before: one batch less in
  /// memory, for sources that read ahead themselves (ReadAhead).
  bool reads_late = false;
};

namespace detail {

/// A batch where it is wanted, and its copy if that may still be on its way.
template <class Batch>
struct Moved {
  Batch batch;
  std::optional<CopyStream::Copy> copy = std::nullopt;
};

template <class Batch>
Moved<Batch> on_device(Batch batch, const PipelineOptions& options,
                       std::optional<CopyStream>& stream) {
  if constexpr (requires { Batch(batch.to(at::Device(at::kCPU), true)); }) {
    if (!options.device) return {std::move(batch)};
    if constexpr (requires(c10::Stream used) { batch.record_stream(used); }) {
      if (options.device->is_cuda()) {
        if (!stream) stream.emplace(*options.device);
        std::optional<Batch> moved;
        auto copy = stream->run([&] { moved.emplace(batch.to(*options.device, true)); });
        moved->record_stream(stream->user());
        return {std::move(*moved), std::move(copy)};
      }
    }
    return {batch.to(*options.device, true)};
  }
  return {std::move(batch)};
}

/// A batch in flight and the ids it has sent.
template <class Batch>
struct BatchFlight final : Flight {
  explicit BatchFlight(Moved<Batch> moved)
      : batch(std::move(moved.batch)), copy(std::move(moved.copy)) {}
  Batch batch;
  std::optional<CopyStream::Copy> copy;  // of the batch, until it is used
  std::unique_ptr<SparseInputs> inputs;
  Result result;
};

/// What the loop does with the batches of one type.
template <class Batch>
class Pipeline : private Stages {
 public:
  Pipeline(Steps<Batch> steps, std::vector<PipelinedModule<Batch>> modules,
           const PipelineOptions& options, std::size_t lead, bool trains,
           std::function<void(const SparseInputs&)> prefetch = nullptr)
      : steps_(std::move(steps)),
        modules_(std::move(modules)),
        options_(options),
        trains_(trains),
        prefetch_(std::move(prefetch)),
        loop_({.lead = lead,
               .needed = options.execute_all_batches ? 1 : lead + 1,
               .reads_late = options.reads_late,
               .prefetches = static_cast<bool>(prefetch_)}) {
    TESSERA_CHECK_VALUE(steps_.forward, "pipeline: forward is missing.");
    std::vector<Registration> registrations;
    for (const auto& module : modules_) {
      registrations.push_back(
          {module.name, module.tables.get(), static_cast<bool>(module.features)});
    }
    check_registrations(registrations);
  }

  std::optional<at::Tensor> progress(const Source<Batch>& source) {
    source_ = &source;
    const std::unique_ptr<Flight> done = loop_.progress(*this);
    if (done == nullptr) return std::nullopt;
    const Result& result = of(*done).result;
    losses_ = result.losses;
    return result.output;
  }

  /// Of the last step.
  const StepReport& report() const noexcept { return loop_.report(); }
  const at::Tensor& losses() const noexcept { return losses_; }
  /// Batches that were read and not yet trained on: what a saved position of the source must be
  /// moved back by.
  std::int64_t num_in_flight() const noexcept { return loop_.num_in_flight(); }

 protected:
  ~Pipeline() override = default;

 private:
  static BatchFlight<Batch>& of(Flight& batch) { return static_cast<BatchFlight<Batch>&>(batch); }

  std::unique_ptr<Flight> read() override {
    std::optional<Batch> batch = (*source_)();
    if (!batch) return nullptr;
    return std::make_unique<BatchFlight<Batch>>(
        on_device(std::move(*batch), options_, copy_stream_));
  }

  std::int64_t start(Flight& batch) override {
    BatchFlight<Batch>& own = of(batch);
    if (own.copy) own.copy->wait();
    own.copy.reset();
    std::vector<SparseInput> inputs;
    for (const auto& module : modules_) {
      inputs.push_back({module.name, module.tables, module.features(own.batch)});
    }
    own.inputs = std::make_unique<SparseInputs>(std::move(inputs));
    return own.inputs->num_bytes();
  }

  void wait_sizes(Flight& batch) override { of(batch).inputs->wait_sizes(); }
  void wait_ids(Flight& batch) override { of(batch).inputs->wait_ids(); }
  void prefetch(Flight& batch) override { prefetch_(*of(batch).inputs); }

  void forward(Flight& batch) override {
    BatchFlight<Batch>& own = of(batch);
    const at::AutoGradMode grad_mode(trains_ && at::GradMode::is_enabled());
    own.result = steps_.forward(own.batch, *own.inputs);
    own.inputs->check_all_used();
  }

  bool trains() override { return trains_; }
  void zero_grad() override { call(steps_.zero_grad); }
  void backward(Flight& batch) override { of(batch).result.losses.sum().backward(); }
  void step() override { call(steps_.step); }

  static void call(const std::function<void()>& function) {
    if (!function) return;
    const core::Span span(core::Phase::kOptimizer);
    function();
  }

  Steps<Batch> steps_;
  std::vector<PipelinedModule<Batch>> modules_;
  PipelineOptions options_;
  bool trains_;
  std::function<void(const SparseInputs&)> prefetch_;
  std::optional<CopyStream> copy_stream_;
  const Source<Batch>* source_ = nullptr;  // of the call
  Loop loop_;
  at::Tensor losses_;
};

}  // namespace detail

/// One batch after the other; the next one is read before the current one computes. The judge of
/// the others. The last batch is trained on.
template <class Batch>
class TrainPipelineBase : public detail::Pipeline<Batch> {
 public:
  /// Throws ValueError for modules that cannot be pipelined.
  explicit TrainPipelineBase(Steps<Batch> steps, std::vector<PipelinedModule<Batch>> modules = {},
                             const PipelineOptions& options = {})
      : detail::Pipeline<Batch>(std::move(steps), std::move(modules), options, 0, true) {}
};

/// Three batches in flight: while batch i computes, the ids of i+1 travel and i+2 is read. The
/// order of a step: zero_grad; wait for the ids of i; start the input dist of i+1; read i+2;
/// forward of i; wait for the sizes of i+1 and send its ids; backward; step. Collective.
template <class Batch>
class TrainPipelineSparseDist : public detail::Pipeline<Batch> {
 public:
  TrainPipelineSparseDist(Steps<Batch> steps, std::vector<PipelinedModule<Batch>> modules,
                          const PipelineOptions& options = {})
      : detail::Pipeline<Batch>(std::move(steps), std::move(modules), options, 1, true) {}
};

/// Four batches in flight: after the forward of i, the ids of i+1 are waited for and given to
/// `prefetch` (to touch rows, or to bring them nearer), while those of i+2 travel. Collective.
template <class Batch>
class PrefetchTrainPipelineSparseDist : public detail::Pipeline<Batch> {
 public:
  PrefetchTrainPipelineSparseDist(
      Steps<Batch> steps, std::vector<PipelinedModule<Batch>> modules,
      const PipelineOptions& options = {},
      std::function<void(const SparseInputs&)> prefetch = [](const SparseInputs&) {})
      : detail::Pipeline<Batch>(std::move(steps), std::move(modules), options, 2, true,
                                std::move(prefetch)) {}
};

/// As TrainPipelineSparseDist, without gradients: forward alone is called. Collective.
template <class Batch>
class EvalPipelineSparseDist : public detail::Pipeline<Batch> {
 public:
  EvalPipelineSparseDist(Steps<Batch> steps, std::vector<PipelinedModule<Batch>> modules,
                         const PipelineOptions& options = {})
      : detail::Pipeline<Batch>(std::move(steps), std::move(modules), options, 1, false) {}
};

}  // namespace tessera::pipeline
