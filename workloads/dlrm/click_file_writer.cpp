#include <algorithm>
#include <cmath>

#include "data/whole_file.h"
#include "dlrm/click_file.h"
#include "dlrm/click_layout.h"
#include "dlrm/half.h"
#include "tessera/core/crc32c.h"

namespace tessera::workloads::dlrm {

using detail::kBlockAlignment;
using detail::round_up;

/// Gathers samples until a block is full.
struct ClickFileWriter::State {
  struct Bags {
    std::vector<std::uint32_t> offsets = {0};  // varying bags only
    std::vector<std::uint32_t> narrow;
    std::vector<std::uint64_t> wide;
  };

  explicit State(const std::string& where) : path(where), file(where) {}

  std::string path;
  data::WholeFile file;
  ClickFileLayout layout;
  std::uint64_t num_bytes = 0;  // written so far
  std::vector<std::uint8_t> labels;
  std::vector<float> dense;
  std::vector<Bags> bags;
  std::string block;

  [[noreturn]] void fail(const std::string& what) const { throw DataError(path + ": " + what); }
  void write(const std::string& bytes);
  void write_block();
  void pad_file();
  void take(const SampleBlock& samples, std::size_t begin, std::size_t end,
            std::vector<std::size_t>& id_places);
  void take_bags(const SampleBlock& samples, std::size_t feature, std::size_t begin,
                 std::size_t end, std::size_t& place);

  template <class T>
  void add(const std::vector<T>& values) {
    block.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    block.resize(round_up(block.size(), 8));
  }
};

void ClickFileWriter::State::write(const std::string& bytes) {
  file.write(bytes);
  num_bytes += bytes.size();
}

void ClickFileWriter::State::pad_file() {
  write(std::string(round_up(num_bytes, kBlockAlignment) - num_bytes, '\0'));
}

void ClickFileWriter::State::write_block() {
  if (labels.empty()) return;
  ClickFileBlock entry;
  entry.begin = num_bytes;
  entry.num_samples = static_cast<std::uint32_t>(labels.size());
  block.clear();
  add(labels);
  if (layout.half_dense) {
    std::vector<std::uint16_t> halves(dense.size());
    for (std::size_t i = 0; i < dense.size(); ++i) halves[i] = half_of(dense[i]);
    add(halves);
  } else {
    add(dense);
  }
  for (std::size_t f = 0; f < bags.size(); ++f) {
    if (layout.schema.features[f].bag_size == 0) add(bags[f].offsets);
    add(bags[f].narrow);
    add(bags[f].wide);
    bags[f].offsets.resize(1);
    bags[f].narrow.clear();
    bags[f].wide.clear();
  }
  entry.num_bytes = block.size();
  entry.crc = core::crc32c(block.data(), block.size());
  write(block);
  pad_file();
  layout.num_samples += static_cast<std::int64_t>(labels.size());
  layout.blocks.push_back(entry);
  labels.clear();
  dense.clear();
}

// The samples [begin, end) of one feature; `place` is where their ids begin, and moves on.
void ClickFileWriter::State::take_bags(const SampleBlock& samples, std::size_t feature,
                                       std::size_t begin, std::size_t end, std::size_t& place) {
  const Feature& facts = layout.schema.features[feature];
  const std::int32_t* lengths =
      samples.lengths.data() + feature * static_cast<std::size_t>(samples.num_samples);
  Bags& bag = bags[feature];
  std::uint64_t sum = 0;
  for (std::size_t s = begin; s < end; ++s) {
    const std::int32_t length = lengths[s];
    if (length < 0 || length > static_cast<std::int32_t>(detail::kMaxBag) ||
        (facts.bag_size > 0 && length != facts.bag_size)) {
      fail("feature '" + facts.name + "' has a bag of " + std::to_string(length) +
           " ids; the schema says " +
           (facts.bag_size > 0 ? std::to_string(facts.bag_size) : "0 to 2^20") + ".");
    }
    sum += static_cast<std::uint64_t>(length);
    if (facts.bag_size == 0) {
      const std::uint64_t offset = bag.offsets.back() + static_cast<std::uint64_t>(length);
      if (offset > UINT32_MAX) fail("a block holds too many ids. Choose smaller blocks.");
      bag.offsets.push_back(static_cast<std::uint32_t>(offset));
    }
  }
  if (place + sum > samples.ids.size()) fail("there are fewer ids than the lengths say.");
  const std::int64_t* ids = samples.ids.data() + place;
  place += sum;
  for (std::uint64_t i = 0; i < sum && !facts.grows(); ++i) {
    if (ids[i] < 0 || ids[i] >= facts.num_rows) {
      fail("feature '" + facts.name + "' has id " + std::to_string(ids[i]) + ", its table " +
           std::to_string(facts.num_rows) + " rows.");
    }
  }
  if (detail::id_bytes(facts) == 4) {
    bag.narrow.insert(bag.narrow.end(), ids, ids + sum);
  } else {
    bag.wide.insert(bag.wide.end(), ids, ids + sum);
  }
}

void ClickFileWriter::State::take(const SampleBlock& samples, std::size_t begin, std::size_t end,
                                  std::vector<std::size_t>& id_places) {
  const auto width = static_cast<std::size_t>(layout.schema.num_dense);
  for (std::size_t s = begin; s < end; ++s) {
    const float label = samples.labels[s];
    if (label != 0 && label != 1) {
      fail("label " + std::to_string(label) + " of a sample is neither 0 nor 1.");
    }
    labels.push_back(label == 1 ? 1 : 0);
  }
  for (std::size_t i = begin * width; i < end * width; ++i) {
    const float value = samples.dense[i];
    if (!std::isfinite(value) || (layout.half_dense && std::abs(value) >= kHalfLimit)) {
      fail("dense number " + std::to_string(value) +
           (layout.half_dense ? " cannot be stored in 16 bits." : " is not finite."));
    }
  }
  dense.insert(dense.end(), samples.dense.begin() + static_cast<std::ptrdiff_t>(begin * width),
               samples.dense.begin() + static_cast<std::ptrdiff_t>(end * width));
  for (std::size_t f = 0; f < bags.size(); ++f) take_bags(samples, f, begin, end, id_places[f]);
}

ClickFileWriter::ClickFileWriter(const std::string& path, const ClickSchema& schema,
                                 const ClickFileOptions& options) {
  detail::check_schema(schema, path);
  if (options.block_samples < 1 ||
      options.block_samples > static_cast<std::int64_t>(detail::kMaxBlockSamples)) {
    throw DataError(path + ": blocks of " + std::to_string(options.block_samples) +
                    " samples; 1 to 2^24 can be written.");
  }
  state_ = std::make_unique<State>(path);
  state_->layout.schema = schema;
  state_->layout.version = detail::version_of(schema);
  state_->layout.half_dense = options.half_dense;
  state_->layout.block_samples = options.block_samples;
  state_->bags.resize(schema.features.size());
  state_->file.rewind();  // a pipe cannot be told at the end what is at the beginning
  state_->write(std::string(detail::kHeaderBytes, '\0'));
}

ClickFileWriter::~ClickFileWriter() = default;

void ClickFileWriter::append(const SampleBlock& samples) {
  const auto count = static_cast<std::size_t>(samples.num_samples);
  const std::size_t num_features = state_->bags.size();
  if (samples.labels.size() != count ||
      samples.dense.size() != count * static_cast<std::size_t>(state_->layout.schema.num_dense) ||
      samples.lengths.size() != count * num_features) {
    state_->fail("the samples do not have the sizes that the schema says.");
  }
  std::vector<std::size_t> id_places;
  std::size_t place = 0;
  for (std::size_t f = 0; f < num_features; ++f) {
    id_places.push_back(place);
    for (std::size_t s = 0; s < count; ++s) {
      place += static_cast<std::size_t>(std::max(samples.lengths[f * count + s], 0));
    }
  }
  const auto block_samples = static_cast<std::size_t>(state_->layout.block_samples);
  for (std::size_t begin = 0; begin < count;) {
    const std::size_t room = block_samples - state_->labels.size();
    const std::size_t end = std::min(count, begin + room);
    state_->take(samples, begin, end, id_places);
    if (state_->labels.size() == block_samples) state_->write_block();
    begin = end;
  }
}

void ClickFileWriter::finish() {
  State& state = *state_;
  if (num_samples() == 0) state.fail("there is no sample in it; append some before finish.");
  state.write_block();
  const auto encoded = detail::encode_layout(state.layout, state.num_bytes);
  state.write(encoded.directory);
  state.file.rewind();
  state.write(encoded.header);
  state.file.finish();
}

std::int64_t ClickFileWriter::num_samples() const noexcept {
  return state_->layout.num_samples + static_cast<std::int64_t>(state_->labels.size());
}

}  // namespace tessera::workloads::dlrm
