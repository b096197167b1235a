// dlrm/batch.h — batches of a click log as tensors, for one rank.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dlrm/click_log.h"
#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::workloads::dlrm {

struct ClickBatch {
  at::Tensor dense;  // float32 [batch, num_dense]
  jagged::KeyedJaggedTensor sparse;
  at::Tensor labels;  // float32 [batch]

  std::int64_t size() const { return labels.size(0); }
  ClickBatch to(c10::Device device, bool non_blocking = false) const;
  ClickBatch pin_memory() const;
  void record_stream(c10::Stream stream) const;
};

/// Makes a batch of a block, sharing its memory.
ClickBatch make_batch(std::shared_ptr<const SampleBlock> block, const ClickSchema& schema);

/// The part [begin, end) of `all` samples of a step that a rank gets: rounded up, so that the last
/// ranks are the ones with less.
struct PartOfRank {
  std::int64_t begin;
  std::int64_t end;
};
inline PartOfRank part_of_rank(std::int64_t all, std::int64_t rank, std::int64_t world) {
  return {(all * rank + world - 1) / world, (all * (rank + 1) + world - 1) / world};
}

struct BatchSourceOptions {
  /// Samples per rank and step.
  std::int64_t batch_size = 2048;
  int rank = 0;
  int world = 1;
  /// The part of the log to read, [begin, end); end -1 is the end of the log.
  std::int64_t begin = 0;
  std::int64_t end = -1;
  /// Leave out a last step that is not full. Otherwise its samples are cut into parts that differ
  /// by at most one sample (possibly none on the last ranks).
  bool drop_last = true;
  /// Read the samples in an order drawn from this seed and the epoch, another for every epoch.
  std::optional<std::uint64_t> shuffle_seed = {};
};

/// Batches in order. Step s of all ranks together covers world * batch_size samples in a row, rank
/// r the r-th part of them: what is read depends on the step, not on who read before. All ranks
/// have the same number of steps.
class BatchSource {
 public:
  /// Throws DataError if the range is not in the log or gives no step at all.
  BatchSource(std::shared_ptr<const ClickLog> log, const BatchSourceOptions& options);
  ~BatchSource();

  /// The batch of this rank for the next step; nothing at the end of the range.
  std::optional<ClickBatch> next();

  /// The number of the next step, to be saved and given to `seek`. Past-the-end is allowed.
  std::int64_t position() const noexcept { return position_; }
  void seek(std::int64_t position);
  /// Which order is taken, if samples are shuffled; 0 at first.
  void set_epoch(std::int64_t epoch) noexcept { epoch_ = epoch; }

  /// Steps in the range; -1 for a log without end.
  std::int64_t num_steps() const noexcept { return num_steps_; }
  const ClickSchema& schema() const noexcept { return log_->schema(); }
  const BatchSourceOptions& options() const noexcept { return options_; }

 private:
  class Blocks;  // memory that batches give back
  std::shared_ptr<const ClickLog> log_;
  BatchSourceOptions options_;
  /// Where this rank's samples of a step begin, and how many they are.
  struct Part {
    std::int64_t first;
    std::int64_t count;
  };
  Part part_of(std::int64_t step) const;
  void expect_further_steps();
  void gather(const Part& part, SampleBlock& block) const;

  std::int64_t num_steps_ = -1;
  std::int64_t position_ = 0;
  std::int64_t epoch_ = 0;
  std::int64_t expected_ = 0;  // steps before this one were announced to the log
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace tessera::workloads::dlrm
