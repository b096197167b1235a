#include "dlrm/batch.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "trainer/permutation.h"

namespace tessera::workloads::dlrm {
namespace {

// Steps whose samples a log fetches while earlier ones compute.
constexpr std::int64_t kStepsAhead = 8;

// A tensor on memory of the block, which lives as long as the tensor.
template <class T>
at::Tensor tensor_on(const std::shared_ptr<const SampleBlock>& block, const std::vector<T>& values,
                     at::IntArrayRef sizes, at::ScalarType type) {
  if (values.empty()) return at::empty(sizes, type);
  auto* data = const_cast<T*>(values.data());
  return at::from_blob(data, sizes, [block](void*) {}, at::TensorOptions().dtype(type));
}

}  // namespace

ClickBatch ClickBatch::to(c10::Device device, bool non_blocking) const {
  return {dense.to(device, non_blocking), sparse.to(device, non_blocking),
          labels.to(device, non_blocking)};
}

ClickBatch ClickBatch::pin_memory() const {
  return {dense.pin_memory(), sparse.pin_memory(), labels.pin_memory()};
}

void ClickBatch::record_stream(c10::Stream stream) const {
  dense.record_stream(stream);
  sparse.record_stream(stream);
  labels.record_stream(stream);
}

ClickBatch make_batch(std::shared_ptr<const SampleBlock> block, const ClickSchema& schema) {
  const std::int64_t batch = block->num_samples;
  std::vector<std::string> keys;
  jagged::KeyedJaggedFields fields;
  fields.stride = batch;
  fields.length_per_key.emplace();
  for (std::size_t f = 0; f < schema.features.size(); ++f) {
    keys.push_back(schema.features[f].name);
    const std::int32_t* lengths = block->lengths.data() + static_cast<std::int64_t>(f) * batch;
    fields.length_per_key->push_back(std::accumulate(lengths, lengths + batch, std::int64_t{0}));
  }
  fields.lengths = tensor_on(block, block->lengths,
                             {static_cast<std::int64_t>(block->lengths.size())}, at::kInt);
  auto ids =
      tensor_on(block, block->ids, {static_cast<std::int64_t>(block->ids.size())}, at::kLong);
  return {tensor_on(block, block->dense, {batch, schema.num_dense}, at::kFloat),
          jagged::KeyedJaggedTensor(std::move(keys), std::move(ids), std::move(fields)),
          tensor_on(block, block->labels, {batch}, at::kFloat)};
}

/// Blocks that no batch uses any more, with their memory: fresh memory would cost a page fault for
/// every 4 KiB of a batch.
class BatchSource::Blocks : public std::enable_shared_from_this<Blocks> {
 public:
  std::shared_ptr<SampleBlock> take() {
    std::unique_ptr<SampleBlock> block;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        block = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (block == nullptr) block = std::make_unique<SampleBlock>();
    auto give_back = [self = shared_from_this()](SampleBlock* used) {
      std::unique_ptr<SampleBlock> owned(used);
      const std::lock_guard lock(self->mutex_);
      self->free_.push_back(std::move(owned));
    };
    return {block.release(), std::move(give_back)};
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<SampleBlock>> free_;
};

BatchSource::BatchSource(std::shared_ptr<const ClickLog> log, const BatchSourceOptions& options)
    : log_(std::move(log)), options_(options), blocks_(std::make_shared<Blocks>()) {
  const std::int64_t size = log_->num_samples();
  if (options_.end < 0) options_.end = size;
  const auto text = [](std::int64_t number) { return std::to_string(number); };
  if (options_.batch_size < 1 || options_.world < 1 || options_.rank < 0 ||
      options_.rank >= options_.world) {
    throw DataError("batches: rank " + text(options_.rank) + " of " + text(options_.world) +
                    " with batches of " + text(options_.batch_size) + " samples makes no sense.");
  }
  if (options_.begin < 0 || (size >= 0 && options_.end > size)) {
    throw DataError("batches: the part [" + text(options_.begin) + ", " + text(options_.end) +
                    ") is not in the log, which holds " + text(size) + " samples.");
  }
  if (options_.end < 0) {  // without end
    if (options_.shuffle_seed) throw DataError("batches: a log without end cannot be shuffled.");
    return;
  }
  const std::int64_t count = options_.end - options_.begin;
  const std::int64_t step = options_.batch_size * options_.world;
  num_steps_ = count < 0 ? 0 : (options_.drop_last ? count / step : (count + step - 1) / step);
  if (num_steps_ == 0) {
    throw DataError("batches: " + text(std::max<std::int64_t>(count, 0)) +
                    " samples make no step of " + text(options_.world) + " ranks x " +
                    text(options_.batch_size) + " samples; make the batch smaller.");
  }
}

BatchSource::~BatchSource() = default;

std::optional<ClickBatch> BatchSource::next() {
  if (num_steps_ >= 0 && position_ >= num_steps_) return std::nullopt;
  const Part part = part_of(position_);
  auto block = blocks_->take();
  if (options_.shuffle_seed) {
    gather(part, *block);
  } else {
    log_->read(part.first, part.count, *block);
  }
  ++position_;
  if (!options_.shuffle_seed) expect_further_steps();
  return make_batch(std::move(block), log_->schema());
}

void BatchSource::gather(const Part& part, SampleBlock& block) const {
  const trainer::Permutation order(
      options_.end - options_.begin,
      *options_.shuffle_seed + static_cast<std::uint64_t>(epoch_) * 0x9e37U);
  std::vector<std::int64_t> samples(static_cast<std::size_t>(part.count));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i] = options_.begin + order(part.first - options_.begin + static_cast<std::int64_t>(i));
  }
  log_->gather(samples, block);
}

BatchSource::Part BatchSource::part_of(std::int64_t step) const {
  const std::int64_t world = options_.world;
  const std::int64_t rank = options_.rank;
  const std::int64_t first = options_.begin + step * options_.batch_size * world;
  std::int64_t all = options_.batch_size * world;
  if (options_.end >= 0) all = std::min(all, options_.end - first);
  const auto [begin, end] = part_of_rank(all, rank, world);
  return {first + begin, end - begin};
}

void BatchSource::expect_further_steps() {
  std::int64_t end = position_ + kStepsAhead;
  if (num_steps_ >= 0) end = std::min(end, num_steps_);
  // After a seek, what was announced is of no use.
  if (expected_ < position_ || expected_ > end) expected_ = position_;
  for (; expected_ < end; ++expected_) {
    const Part part = part_of(expected_);
    log_->expect(part.first, part.count);
  }
}

void BatchSource::seek(std::int64_t position) {
  if (position < 0) {
    throw DataError("batches: there is no step " + std::to_string(position) + ".");
  }
  position_ = position;
}

}  // namespace tessera::workloads::dlrm
