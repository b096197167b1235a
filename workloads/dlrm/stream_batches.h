// dlrm/stream_batches.h — batches of a text that still comes, for all ranks.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "data/raw_stream.h"
#include "dlrm/batch.h"
#include "tessera/comm/group.h"

namespace tessera::workloads::dlrm {

struct StreamBatchesOptions {
  std::string path;  // "-": standard input of rank 0
  bool follows = false;
  std::int64_t batch_size = 2048;  // samples per rank and step
  /// Told on rank 0; see TableOptions.
  std::function<void(std::string_view, std::int64_t)> sees_text = nullptr;
};

/// Rank 0 reads and deals the samples of a step in order: the r-th part to rank r. The ranks talk
/// over a group of their own, so that `next` may be called beside training.
class StreamBatches {
 public:
  /// Collective.
  StreamBatches(const StreamBatchesOptions& options, const data::Schema& schema,
                const comm::Group& world);

  /// The batch of this rank for the next step; nothing, on all ranks, when the stream has ended or
  /// `is_told_to_stop` says so on rank 0. A last step of fewer samples than ranks is left out. A
  /// batch without samples says, once, that the samples of the next step are not there yet.
  /// Collective. Throws the same DataError on all ranks.
  std::optional<ClickBatch> next(const std::function<bool()>& is_told_to_stop);
  /// Drops the samples of so many steps, those a run has done already. Collective; the same on all
  /// ranks. A pipe has none of them.
  void skip(std::int64_t num_steps, const std::function<bool()>& is_told_to_stop);

  /// A call of `next` that waits returns nothing, soon, once rank 0 is told. For another thread.
  void stop() noexcept { is_stopping_ = true; }

  const ClickSchema& schema() const noexcept { return schema_; }

 private:
  enum class Kind : std::int64_t { kSamples, kEnd, kWait, kError };
  struct Word {
    Kind kind = Kind::kEnd;
    std::string error;
  };
  Word read(const std::function<bool()>& is_told_to_stop);
  std::optional<ClickBatch> receive(const std::function<bool()>& is_told_to_stop, bool drops);

  StreamBatchesOptions options_;
  ClickSchema schema_;
  comm::Group group_;
  std::unique_ptr<data::RawStream> stream_;  // on rank 0
  SampleBlock block_;                        // the samples of a step, on rank 0
  bool has_ended_ = false;
  bool gave_samples_ = false;  // since it last said that there are none
  std::atomic<bool> is_stopping_ = false;
};

/// A log of which its columns are known, and nothing else.
class UnseenLog : public ClickLog {
 public:
  explicit UnseenLog(ClickSchema schema) : schema_(std::move(schema)) {}
  const ClickSchema& schema() const noexcept override { return schema_; }
  std::int64_t num_samples() const noexcept override { return -1; }
  void read(std::int64_t first, std::int64_t count, SampleBlock& block) const override;

 private:
  ClickSchema schema_;
};

}  // namespace tessera::workloads::dlrm
