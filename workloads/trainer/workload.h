// trainer/workload.h — what a training is made of: a model, batches, metrics, and what it wants to
// say. The trainer does the rest.
//
// A workload derives from Workload<Batch>. It owns its model (under DistributedDataParallel), its
// optimizer and where its samples come from; `run` in run.h trains it as a program.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "tessera/checkpoint/state.h"
#include "tessera/comm/group.h"
#include "tessera/core/check.h"
#include "tessera/core/export.h"
#include "tessera/pipeline/read_ahead.h"
#include "tessera/pipeline/train_pipeline.h"
#include "trainer/settings.h"

namespace tessera::trainer {

/// A number of steps that means: as long as there are samples.
inline constexpr std::int64_t kEndless = std::int64_t{1} << 40;

/// Numbers with names, in order.
using Figures = std::vector<std::pair<std::string, double>>;

/// A number that every checkpoint of a job carries; it loads into a job with the same alone.
struct Mark {
  std::string name;  // in the checkpoint
  std::int64_t value = 0;
  std::string before = {};  // words around the number: "seed ", " samples per step"
  std::string after = {};
};

/// Where the steps of a job begin and end, and what the trainer wants to know of each.
struct Run {
  std::int64_t first_step = 0;
  std::int64_t num_steps = 0;
  std::function<void(const at::Tensor& loss)> computed;  // before backward
};

/// What the trainer knows of a workload. Not for deriving: see Workload.
class TESSERA_API AnyWorkload {
 public:
  AnyWorkload() = default;
  AnyWorkload(const AnyWorkload&) = delete;
  AnyWorkload& operator=(const AnyWorkload&) = delete;
  virtual ~AnyWorkload();

  virtual std::string name() const = 0;
  virtual const Settings& settings() const = 0;
  /// Of the whole job: the settings' own unless the data decides.
  virtual std::int64_t num_steps() const { return settings().num_steps; }
  /// What makes a job longer that has done them, in words.
  virtual std::string longer() const { return "--steps N goes on up to step N"; }

  // ---- The model
  /// Steps what DistributedDataParallel has averaged.
  virtual torch::optim::Optimizer& optimizer() = 0;
  /// Adds all that a checkpoint holds; the number of steps and the loss are added already.
  virtual void add_state(checkpoint::State& state) = 0;
  /// Adds what servers need of it, without what only training needs; see trainer/publish.h. Pieces
  /// with `touched_rows` are published as far as they have changed since `forget_published`.
  virtual void add_published(checkpoint::State& state) { add_state(state); }
  virtual void forget_published() {}
  /// What is trained and lies on this rank, for the fingerprint at the end.
  virtual std::vector<at::Tensor> parameters() const = 0;
  /// Scales all rates for one step. The optimizer's own unless told otherwise.
  virtual void scale_rates(double factor);
  virtual std::vector<Mark> marks() const { return {}; }
  /// The ranks that hold the whole state together; those of `world`. Others may hold it too: one
  /// such group `saves`.
  virtual comm::Group saving_group(const comm::Group& world) const { return world; }
  virtual bool saves() const { return true; }

  /// Where the model is; batches are moved there, and the loss of a step is read while the next one
  /// computes. None: batches stay where they are read. What the settings say: the GPU of this rank,
  /// or none.
  virtual std::optional<at::Device> device() const;

  // ---- Metrics. Collective over all ranks.
  /// After a checkpoint was loaded, before the first step.
  virtual void begin() {}
  /// After a step with a finite loss, inside its time.
  virtual void follow() {}
  /// After the last step, before its figures are told.
  virtual void finish() {}
  /// Judges the model; the first number decides whether it has broken, and which is the best: the
  /// lower, the better. None: nothing is judged.
  virtual Figures evaluate() { return {}; }

  // ---- What is told, on rank 0
  virtual std::string unit() const { return "samples"; }
  virtual double units_per_step() const = 0;  // of all ranks
  virtual std::string introduction() { return ""; }
  /// More of the `run` line of metrics.jsonl, and lines after it, as JSON.
  virtual Figures facts() { return {}; }
  virtual std::vector<std::string> records() { return {}; }
  /// Lines of metrics.jsonl after an evaluation, as JSON; the trainer adds the step.
  virtual std::vector<std::string> evaluation_records() { return {}; }
  /// The same at the end.
  virtual std::vector<std::string> final_records() { return {}; }
  /// What it reads, for the report.
  virtual std::vector<std::string> data_files() const { return {}; }
  /// More files of the run folder: names and texts.
  virtual std::vector<std::pair<std::string, std::string>> files() const { return {}; }
  virtual Figures running() const { return {}; }           // in the progress line
  virtual std::string running_text() const { return ""; }  // the same in words
  virtual std::string verdict(const Figures& /*evaluation*/) const { return ""; }
  virtual Figures results() const { return {}; }  // more of --json
  virtual std::string rates() const;              // "--lr 0.1", for a loss that is not a number
  /// What starts it; with --resume it goes on.
  virtual std::string command() const { return "tessera train " + name(); }

  // ---- Steps, which Workload does
  virtual void start(const Run& run) = 0;
  /// False, and nothing was done, if the samples have ended: on all ranks at the same step.
  virtual bool step() = 0;
  /// All samples that were there have been trained on, and more may come: on all ranks after the
  /// same step.
  virtual bool has_caught_up() const = 0;
  /// No batch is read any more when it returns.
  virtual void stop() noexcept = 0;
};

/// Samples of one rank and step come as a `Batch`: a tensor, or anything that can be moved and, for
/// other devices, has `to(device, non_blocking)`. With `pin_memory()` and `record_stream(stream)` a
/// batch is copied beside the step before.
template <class Batch>
class Workload : public AnyWorkload {
 public:
  using Inputs = pipeline::SparseInputs;
  using Result = pipeline::Result;

  /// The batch of this rank for step `step`, from 0, on the host. Called for one step after the
  /// other, by a thread of its own, ahead of the steps: it must not use what `forward` changes.
  virtual Batch read(std::int64_t step) = 0;
  /// The same where samples may end before the steps do: nothing then, on all ranks.
  virtual std::optional<Batch> read_or_end(std::int64_t step) { return read(step); }
  /// Whether that is no batch, but says that the samples of this step are not there yet: on all
  /// ranks at the same place. Batches before it are trained on then, not held for company.
  virtual bool is_pause(const Batch& /*batch*/) const { return false; }
  /// Batches are no longer wanted: a read that waits for samples must return.
  virtual void stop_reading() noexcept {}
  /// Loss and output; the trainer does backward and the optimizer's step.
  virtual Result forward(const Batch& batch, const Inputs& inputs) = 0;
  /// Sharded tables whose ids travel ahead of their step; `inputs` of forward holds them.
  virtual std::vector<pipeline::PipelinedModule<Batch>> pipelined() const { return {}; }
  void start(const Run& run) final {
    run_ = run;
    next_read_ = run.first_step;
    pipeline::Steps<Batch> steps;
    // Gradients may lie in buckets: they are set to zero in place.
    steps.zero_grad = [this] { this->optimizer().zero_grad(/*set_to_none=*/false); };
    steps.forward = [this](const Batch& batch, const Inputs& inputs) {
      Result result = forward(batch, inputs);
      run_.computed(result.losses);
      return result;
    };
    steps.step = [this] { this->optimizer().step(); };
    // A batch that is copied must be read a step before it is needed.
    const std::optional<at::Device> device = this->device();
    is_pinned_ = device && device->is_cuda();
    pipeline_.emplace(std::move(steps), pipelined(),
                      pipeline::PipelineOptions{.device = device, .reads_late = !is_pinned_});
    reader_.emplace([this] { return read_next(); });
  }

  bool step() final {
    for (;;) {
      if (const auto output = pipeline_->progress([this] { return take(); })) {
        output_ = *output;
        return true;
      }
      if (!has_paused_) return false;
      has_paused_ = false;  // nothing is in flight: the next samples are waited for
    }
  }
  bool has_caught_up() const final { return has_paused_ && pipeline_->num_in_flight() == 0; }

  void stop() noexcept final {
    stop_reading();
    reader_.reset();
    pipeline_.reset();
  }

 protected:
  /// Of the last forward.
  const at::Tensor& output() const noexcept { return output_; }

 private:
  // The next batch; nothing at the end, and where the samples pause.
  std::optional<Batch> take() {
    std::optional<Batch> batch = reader_->next();
    has_paused_ = batch && is_pause(*batch);
    if (has_paused_) return std::nullopt;
    return batch;
  }

  // No further than the last step. A checkpoint holds the number of steps that were done, so it
  // knows nothing of what was read ahead.
  std::optional<Batch> read_next() {
    if (next_read_ >= run_.num_steps) return std::nullopt;
    std::optional<Batch> batch = read_or_end(next_read_);
    if (batch && is_pause(*batch)) return batch;
    ++next_read_;
    if constexpr (requires { Batch(batch->pin_memory()); }) {
      if (is_pinned_ && batch) return batch->pin_memory();
    }
    return batch;
  }

  Run run_;
  std::int64_t next_read_ = 0;  // the reader's
  bool is_pinned_ = false;      // batches go to a GPU
  bool has_paused_ = false;     // the source, when it was asked last
  std::optional<pipeline::TrainPipelineSparseDist<Batch>> pipeline_;
  at::Tensor output_;
  std::optional<pipeline::ReadAhead<Batch>> reader_;
};

}  // namespace tessera::trainer
