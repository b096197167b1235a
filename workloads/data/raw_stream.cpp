#include "data/raw_stream.h"

#include <utility>

namespace tessera::workloads::data {
namespace {

constexpr std::size_t kBlocksAhead = 4;

/// Ends the reading thread from within.
struct Stopped {};

}  // namespace

RawStream::RawStream(std::string path, const Schema& schema, const StreamOptions& options)
    : path_(std::move(path)), schema_(schema), options_(options), thread_([this] { read(); }) {}

RawStream::~RawStream() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  has_room_.notify_all();
  thread_.join();
}

void RawStream::read() {
  TableOptions options;
  options.skips_bad = true;
  options.raw_ids = true;
  options.block_samples = options_.block_samples;
  options.sees_text = options_.sees_text;
  // A pipe is asked as well, so that nobody waits for one that stays silent.
  const bool is_pipe = path_ == "-";
  if (is_pipe || options_.follows) options.goes_on = [this] { return !is_stopping_; };
  TableReport report;
  std::exception_ptr error;
  try {
    report =
        read_tables({path_}, schema_, options, [this](dlrm::SampleBlock& block) { take(block); });
  } catch (const Stopped&) {
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  report_ = std::move(report);
  error_ = error;
  has_ended_ = true;
  has_block_.notify_all();
}

void RawStream::take(const dlrm::SampleBlock& block) {
  std::unique_lock lock(mutex_);
  has_room_.wait(lock, [this] { return is_stopping_ || blocks_.size() < kBlocksAhead; });
  if (is_stopping_) throw Stopped();
  blocks_.push_back(block);
  has_block_.notify_one();
}

RawStream::Next RawStream::next(dlrm::SampleBlock& block, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  has_block_.wait_for(lock, patience, [this] { return !blocks_.empty() || has_ended_; });
  if (blocks_.empty()) {
    if (error_) std::rethrow_exception(error_);
    return has_ended_ ? Next::kEnd : Next::kNothingYet;
  }
  block = std::move(blocks_.front());
  blocks_.pop_front();
  lock.unlock();
  has_room_.notify_one();
  return Next::kBlock;
}

TableReport RawStream::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

}  // namespace tessera::workloads::data
