// tessera/pipeline/loop.h — the one loop of all pipelines, which does not know what a batch is.
//
// It keeps the batches in flight, decides what is done with which of them and when, and measures
// it. What is done is told by Stages: the pipelines of train_pipeline.h do it with the batches of a
// C++ program, the bindings with the objects of a Python one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "tessera/core/export.h"

namespace tessera::pipeline {

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

struct LoopOptions {
  /// Batches whose input dists are started before their turn. 0: in their turn.
  std::size_t lead = 1;
  /// Batches that must have been read for the first of them to be taken; fewer of them are dropped
  /// at the end of the source.
  std::size_t needed = 1;
  /// Read a batch in the step that starts its input dist, not in the step before.
  bool reads_late = false;
  /// Call `prefetch` for every batch.
  bool prefetches = false;
  /// With a lead of two or more: from this many trained batches on, the ids of the next batch are
  /// waited for after the forward of this one; until then after its step.
  std::int64_t ahead_from = 0;
};

/// A batch on its way, and what belongs to it.
struct TESSERA_API Flight {
  Flight() = default;
  virtual ~Flight();
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
};

/// What a loop does with its batches. Whatever throws ends the step.
class TESSERA_API Stages {
 public:
  /// The next batch; null at the end.
  virtual std::unique_ptr<Flight> read() = 0;
  /// Starts the input dists; gives the bytes of the features.
  virtual std::int64_t start(Flight& batch) = 0;
  /// The sizes are known and the ids are sent.
  virtual void wait_sizes(Flight& batch) = 0;
  /// The ids are here.
  virtual void wait_ids(Flight& batch) = 0;
  /// Once for every batch, after its `wait_ids`.
  virtual void prefetch(Flight& batch) = 0;
  virtual void forward(Flight& batch) = 0;

  /// Asked when it matters: a model may change its mode between steps.
  virtual bool trains() = 0;
  virtual void zero_grad() = 0;
  virtual void backward(Flight& batch) = 0;
  virtual void step() = 0;

 protected:
  Stages() = default;
  Stages(const Stages&) = default;
  Stages& operator=(const Stages&) = default;
  virtual ~Stages();
};

/// Input dists are started `lead` batches ahead. A step: zero_grad; wait for the ids of batch i;
/// start the input dist of i+lead; read; forward of i; with a lead of two or more, wait for the ids
/// of i+1; wait for the sizes of i+lead; backward; step. Collective; for one thread.
class TESSERA_API Loop {
 public:
  explicit Loop(const LoopOptions& options);

  /// Trains on one batch and gives it back; null at the end, after which the next call begins anew.
  /// After an exception it throws c10::Error until `reset`.
  std::unique_ptr<Flight> progress(Stages& stages);

  /// At the beginning of a step: `lead` batches with their sizes known, and one more that was read.
  void fill(Stages& stages);
  /// Reads on until this many batches are in flight; false if the source ends before.
  bool read_until(Stages& stages, std::size_t num_batches);

  /// Drops the batches in flight. Not from within a stage.
  void reset();

  /// Of the last step.
  const StepReport& report() const noexcept { return report_; }
  /// Batches that were read and not yet trained on.
  std::int64_t num_in_flight() const noexcept { return static_cast<std::int64_t>(slots_.size()); }
  /// Batches whose backward has run, since the loop was made.
  std::int64_t num_trained() const noexcept { return num_trained_; }
  /// A step, or filling, threw; or it is being called from one.
  bool has_failed() const noexcept { return has_failed_; }

 private:
  struct Slot {
    std::unique_ptr<Flight> batch;
    std::int64_t num_bytes = 0;
    bool is_started = false;
    bool is_prefetched = false;
  };

  class Running;
  std::unique_ptr<Flight> advance(Stages& stages);
  void fill(Stages& stages, StepReport& report);
  void run(Stages& stages, StepReport& report);
  void load(Stages& stages, StepReport& report);
  static void start(Stages& stages, Slot& slot, StepReport& report);
  static void wait_sizes(Stages& stages, Slot& slot, StepReport& report);
  void wait_ids(Stages& stages, Slot& slot, StepReport& report) const;

  LoopOptions options_;
  std::deque<Slot> slots_;
  StepReport report_;
  std::int64_t num_trained_ = 0;
  bool has_ended_ = false;
  bool has_failed_ = false;  // or is in a step
  bool is_running_ = false;
};

}  // namespace tessera::pipeline
