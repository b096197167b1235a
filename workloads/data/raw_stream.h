// data/raw_stream.h — samples of a text that still comes: a pipe, or a file that grows. No
// LibTorch.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "data/read_table.h"
#include "data/schema.h"
#include "dlrm/click_log.h"

namespace tessera::workloads::data {

struct StreamOptions {
  /// Samples of a block.
  std::int64_t block_samples = 8192;
  /// The end of a file is not the end of the stream. A pipe ends when it is closed.
  bool follows = false;
  /// As in TableOptions; called by the thread that reads.
  std::function<void(std::string_view, std::int64_t)> sees_text = nullptr;
};

/// Reads "-" or a file in a thread of its own, a few blocks ahead. Ids are raw, bad records are
/// left out.
class RawStream {
 public:
  RawStream(std::string path, const Schema& schema, const StreamOptions& options);
  ~RawStream();
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;

  enum class Next : std::uint8_t { kBlock, kNothingYet, kEnd };
  /// The next samples, `block_samples` of them, fewer only at the end. Waits at most `patience`.
  /// Throws DataError for what cannot be read, when all before it was taken.
  Next next(dlrm::SampleBlock& block, std::chrono::milliseconds patience);

  /// What was read and left out, once the stream has ended.
  TableReport report() const;

 private:
  void read();
  void take(const dlrm::SampleBlock& block);

  std::string path_;
  Schema schema_;
  StreamOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable has_block_;
  std::condition_variable has_room_;
  std::deque<dlrm::SampleBlock> blocks_;
  bool has_ended_ = false;
  std::exception_ptr error_;
  TableReport report_;
  std::atomic<bool> is_stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tessera::workloads::data
