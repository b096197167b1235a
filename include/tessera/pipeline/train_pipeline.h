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

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
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

/// Where the time of a step went, in seconds of this rank. `wait_ids` and `wait_sizes` are the part
/// of the input dist that nothing hid; the rest of the communication is inside forward (output
/// dist) and backward.
struct StepReport {
  double read = 0;        // the source, and the copy to the device
  double start_dist = 0;  // extractors, and starting the input dist of a later batch
  double wait_ids = 0;    // for the ids of this batch (prefetch: of the next)
  double wait_sizes = 0;  // for the sizes of a later batch
  double prefetch = 0;    // what PrefetchTrainPipelineSparseDist was given to do
  double zero_grad = 0;
  double forward = 0;
  double backward = 0;
  double step = 0;
  double total = 0;
  /// Bytes of the features of this batch, before they were sent.
  std::int64_t feature_bytes = 0;

  double exposed_input_dist() const noexcept { return wait_ids + wait_sizes; }
};

namespace detail {

/// Adds the time until the end of the scope.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Timed() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point begin_;
};

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

/// The one loop: input dists are started `lead` batches ahead. Lead 0 starts and waits in place.
template <class Batch>
class Pipeline {
 public:
  Pipeline(Steps<Batch> steps, std::vector<PipelinedModule<Batch>> modules,
           const PipelineOptions& options, std::size_t lead, bool trains)
      : steps_(std::move(steps)),
        modules_(std::move(modules)),
        options_(options),
        lead_(lead),
        trains_(trains) {
    TESSERA_CHECK_VALUE(steps_.forward, "pipeline: forward is missing.");
    std::vector<Registration> registrations;
    for (const auto& module : modules_) {
      registrations.push_back(
          {module.name, module.tables.get(), static_cast<bool>(module.features)});
    }
    check_registrations(registrations);
  }

  std::optional<at::Tensor> progress(const Source<Batch>& source) {
    TORCH_CHECK(!has_failed_,
                "pipeline: an earlier step threw an exception, so the batches in flight are in an "
                "unknown state. Make a new pipeline.");
    has_failed_ = true;
    std::optional<at::Tensor> output = advance(source);
    has_failed_ = false;
    return output;
  }

  /// Of the last step.
  const StepReport& report() const noexcept { return report_; }
  const at::Tensor& losses() const noexcept { return losses_; }
  /// Batches that were read and not yet trained on: what a saved position of the source must be
  /// moved back by.
  std::int64_t num_in_flight() const noexcept { return static_cast<std::int64_t>(slots_.size()); }

 protected:
  ~Pipeline() = default;
  /// Called with the inputs of every batch once, when they are here: of the first before its
  /// forward, of the others after the forward of the batch before.
  std::function<void(const SparseInputs&)> prefetch_;

 private:
  struct Slot {
    Batch batch;
    std::optional<CopyStream::Copy> copy;  // of the batch, until it is used
    std::unique_ptr<SparseInputs> inputs = nullptr;
    bool is_prefetched = false;
  };

  std::optional<at::Tensor> advance(const Source<Batch>& source) {
    StepReport report;
    Result result;
    {
      const Timed total(report.total);
      fill(source, report);
      if (slots_.empty() || (has_ended_ && !options_.execute_all_batches)) {
        slots_.clear();
        has_ended_ = false;  // the next call begins anew
        return std::nullopt;
      }
      result = run(source, report);
      report.feature_bytes = slots_.front().inputs->num_bytes();
      slots_.pop_front();
    }
    report_ = report;
    losses_ = result.losses;
    return result.output;
  }

  void load(const Source<Batch>& source, StepReport& report) {
    if (has_ended_) return;
    const Timed timed(report.read);
    const core::Span span(core::Phase::kData);
    std::optional<Batch> batch = source();
    if (!batch) {
      has_ended_ = true;
      return;
    }
    auto moved = on_device(std::move(*batch), options_, copy_stream_);
    slots_.push_back({std::move(moved.batch), std::move(moved.copy)});
  }

  void start(Slot& slot, StepReport& report) {
    const Timed timed(report.start_dist);
    if (slot.copy) slot.copy->wait();
    slot.copy.reset();
    std::vector<SparseInput> inputs;
    for (const auto& module : modules_) {
      inputs.push_back({module.name, module.tables, module.features(slot.batch)});
    }
    slot.inputs = std::make_unique<SparseInputs>(std::move(inputs));
  }

  void wait_sizes(Slot& slot, StepReport& report) {
    const Timed timed(report.wait_sizes);
    slot.inputs->wait_sizes();
  }

  void wait_ids(Slot& slot, StepReport& report) {
    {
      const Timed timed(report.wait_ids);
      slot.inputs->wait_ids();
    }
    if (!prefetch_ || slot.is_prefetched) return;
    const Timed timed(report.prefetch);
    prefetch_(*slot.inputs);
    slot.is_prefetched = true;
  }

  // At the beginning: `lead` batches with their sizes known, and one more that was read.
  void fill(const Source<Batch>& source, StepReport& report) {
    while (slots_.size() < lead_ + 1 && !has_ended_) load(source, report);
    for (std::size_t i = 0; i < std::min(lead_, slots_.size()); ++i) {
      if (slots_[i].inputs != nullptr) continue;
      start(slots_[i], report);
      wait_sizes(slots_[i], report);
    }
  }

  Result run(const Source<Batch>& source, StepReport& report) {
    call(trains_ ? steps_.zero_grad : nullptr, report.zero_grad);
    if (slots_[0].inputs == nullptr) start(slots_[0], report);
    wait_ids(slots_[0], report);
    const bool starts_later = lead_ > 0 && slots_.size() > lead_;
    if (starts_later) start(slots_[lead_], report);
    if (!options_.reads_late) load(source, report);
    Result result;
    {
      const Timed timed(report.forward);
      const at::AutoGradMode grad_mode(trains_ && at::GradMode::is_enabled());
      result = steps_.forward(slots_[0].batch, *slots_[0].inputs);
    }
    slots_[0].inputs->check_all_used();
    if (lead_ > 1 && slots_.size() > 1) wait_ids(slots_[1], report);
    if (starts_later) wait_sizes(slots_[lead_], report);
    if (trains_) {
      {
        const Timed timed(report.backward);
        const core::Span span(core::Phase::kBackward);
        result.losses.sum().backward();
      }
      call(steps_.step, report.step);
    }
    return result;
  }

  static void call(const std::function<void()>& function, double& seconds) {
    if (!function) return;
    const Timed timed(seconds);
    const core::Span span(core::Phase::kOptimizer);
    function();
  }

  Steps<Batch> steps_;
  std::vector<PipelinedModule<Batch>> modules_;
  PipelineOptions options_;
  std::size_t lead_;
  bool trains_;
  std::optional<CopyStream> copy_stream_;
  std::deque<Slot> slots_;
  bool has_ended_ = false;
  bool has_failed_ = false;  // or is in a step
  StepReport report_;
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
      : detail::Pipeline<Batch>(std::move(steps), std::move(modules), options, 2, true) {
    this->prefetch_ = std::move(prefetch);
  }
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
