#include "dlrm/stream_batches.h"

#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "tessera/comm/collectives.h"

namespace tessera::workloads::dlrm {
namespace {

// The others hear from rank 0 this often, so that waiting for samples is no late rank. Also how
// long samples stay away before those that were there are trained on without them.
constexpr std::chrono::milliseconds kPatience{200};

comm::Group own_group(const comm::Group& world) {
  if (world.size() == 1) return world;
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return *world.subgroup(ranks, "dlrm-stream");
}

template <class T>
void put(std::vector<std::uint8_t>& bytes, const T* values, std::int64_t count) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(values);
  bytes.insert(bytes.end(), begin, begin + count * static_cast<std::int64_t>(sizeof(T)));
}

template <class T>
void take(const std::uint8_t*& from, std::vector<T>& values, std::int64_t count) {
  values.resize(static_cast<std::size_t>(count));
  if (count > 0) std::memcpy(values.data(), from, values.size() * sizeof(T));
  from += values.size() * sizeof(T);
}

/// Samples [begin, end) of a block as bytes.
std::vector<std::uint8_t> packed(const SampleBlock& block, std::int64_t begin, std::int64_t end,
                                 std::int64_t num_dense) {
  const std::int64_t count = end - begin;
  std::vector<std::uint8_t> bytes;
  put(bytes, &count, 1);
  put(bytes, block.labels.data() + begin, count);
  put(bytes, block.dense.data() + begin * num_dense, count * num_dense);
  std::vector<std::int64_t> ids;
  const std::int32_t* length = block.lengths.data();
  const std::int64_t* id = block.ids.data();
  const auto* last = length + block.lengths.size();
  for (; length < last; length += block.num_samples) {
    put(bytes, length + begin, count);
    id += std::accumulate(length, length + begin, std::int64_t{0});
    const std::int64_t own = std::accumulate(length + begin, length + end, std::int64_t{0});
    ids.insert(ids.end(), id, id + own);
    id += own + std::accumulate(length + end, length + block.num_samples, std::int64_t{0});
  }
  const auto num_ids = static_cast<std::int64_t>(ids.size());
  put(bytes, &num_ids, 1);
  put(bytes, ids.data(), num_ids);
  return bytes;
}

std::shared_ptr<SampleBlock> unpacked(const at::Tensor& bytes, const ClickSchema& schema) {
  const std::uint8_t* from = bytes.const_data_ptr<std::uint8_t>();
  auto block = std::make_shared<SampleBlock>();
  std::vector<std::int64_t> count;
  take(from, count, 1);
  block->num_samples = count[0];
  take(from, block->labels, count[0]);
  take(from, block->dense, count[0] * schema.num_dense);
  take(from, block->lengths, count[0] * static_cast<std::int64_t>(schema.features.size()));
  take(from, count, 1);
  take(from, block->ids, count[0]);
  return block;
}

}  // namespace

StreamBatches::StreamBatches(const StreamBatchesOptions& options, const data::Schema& schema,
                             const comm::Group& world)
    : options_(options), schema_(schema.click_schema()), group_(own_group(world)) {
  schema_.origin = schema.text();
  if (world.rank() != 0) return;
  stream_ = std::make_unique<data::RawStream>(
      options.path, schema,
      data::StreamOptions{options.batch_size * world.size(), options.follows, options.sees_text});
}

StreamBatches::Word StreamBatches::read(const std::function<bool()>& is_told_to_stop) {
  if (is_stopping_ || (is_told_to_stop && is_told_to_stop())) return {Kind::kEnd, ""};
  try {
    switch (stream_->next(block_, kPatience)) {
      case data::RawStream::Next::kBlock:
        // Every rank needs a sample.
        if (block_.num_samples < group_.size()) return {Kind::kEnd, ""};
        return {Kind::kSamples, ""};
      case data::RawStream::Next::kNothingYet:
        return {Kind::kWait, ""};
      default:
        return {Kind::kEnd, ""};
    }
  } catch (const std::exception& error) {
    return {Kind::kError, error.what()};
  }
}

std::optional<ClickBatch> StreamBatches::next(const std::function<bool()>& is_told_to_stop) {
  return receive(is_told_to_stop, /*drops=*/false);
}

void StreamBatches::skip(std::int64_t num_steps, const std::function<bool()>& is_told_to_stop) {
  if (options_.path == "-") return;
  for (std::int64_t step = 0; step < num_steps && !has_ended_; ++step) {
    receive(is_told_to_stop, /*drops=*/true);
  }
}

std::optional<ClickBatch> StreamBatches::receive(const std::function<bool()>& is_told_to_stop,
                                                 bool drops) {
  if (has_ended_) return std::nullopt;
  const auto world = static_cast<std::size_t>(group_.size());
  for (;;) {
    std::vector<std::vector<std::uint8_t>> parts(world);
    at::Tensor head = at::zeros({static_cast<std::int64_t>(world) + 1}, at::kLong);
    auto* sizes = head.data_ptr<std::int64_t>() + 1;
    if (group_.rank() == 0) {
      const Word word = read(is_told_to_stop);
      head[0] = static_cast<std::int64_t>(word.kind);
      for (std::size_t r = 0; r < world; ++r) {
        if (word.kind == Kind::kError) put(parts[r], word.error.data(), std::ssize(word.error));
        if (word.kind == Kind::kSamples && !drops) {
          const auto [begin, end] =
              part_of_rank(block_.num_samples, static_cast<std::int64_t>(r), group_.size());
          parts[r] = packed(block_, begin, end, schema_.num_dense);
        }
        sizes[r] = std::ssize(parts[r]);
      }
    }
    if (world > 1) comm::broadcast_(head, 0, group_);
    const auto kind = static_cast<Kind>(head[0].item<std::int64_t>());
    sizes = head.data_ptr<std::int64_t>() + 1;
    if (kind == Kind::kWait) {
      if (drops || !std::exchange(gave_samples_, false)) continue;
      return make_batch(std::make_shared<SampleBlock>(), schema_);
    }
    if (kind == Kind::kEnd) {
      has_ended_ = true;
      return std::nullopt;
    }
    if (kind == Kind::kSamples && drops) return std::nullopt;
    at::Tensor bytes = at::empty({0}, at::kByte);
    std::vector<std::int64_t> sent(world, 0);
    std::vector<std::int64_t> received(world, 0);
    received[0] = sizes[group_.rank()];
    if (group_.rank() == 0) {
      std::vector<std::uint8_t> all;
      for (std::size_t r = 0; r < world; ++r) {
        all.insert(all.end(), parts[r].begin(), parts[r].end());
        sent[r] = sizes[r];
      }
      bytes = at::empty({std::ssize(all)}, at::kByte);
      std::copy(all.begin(), all.end(), bytes.data_ptr<std::uint8_t>());
    }
    if (world > 1) bytes = comm::all_to_all_v_async(bytes, sent, group_, received).wait();
    if (kind == Kind::kError) {
      has_ended_ = true;
      throw DataError(std::string(reinterpret_cast<const char*>(bytes.const_data_ptr()),
                                  static_cast<std::size_t>(bytes.numel())));
    }
    gave_samples_ = true;
    return make_batch(unpacked(bytes, schema_), schema_);
  }
}

void UnseenLog::read(std::int64_t /*first*/, std::int64_t /*count*/, SampleBlock& /*block*/) const {
  throw DataError("stream: its samples come one after the other; none can be chosen.");
}

}  // namespace tessera::workloads::dlrm
