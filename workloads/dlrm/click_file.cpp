#include "dlrm/click_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dlrm/click_layout.h"
#include "dlrm/half.h"
#include "dlrm/mapped_file.h"
#include "tessera/core/crc32c.h"

namespace tessera::workloads::dlrm {
namespace {

// Samples [begin, end) of a block: a batch is one or more of these.
struct Piece {
  std::size_t block;
  std::size_t begin;
  std::size_t end;
  std::size_t out;  // place of the first in the batch
};

std::vector<Piece> pieces_of(const ClickFileLayout& layout, std::int64_t first,
                             std::int64_t count) {
  std::vector<Piece> pieces;
  const auto n = static_cast<std::size_t>(count);
  const auto block_samples = static_cast<std::size_t>(layout.block_samples);
  for (std::size_t done = 0; done < n;) {
    const std::size_t sample = static_cast<std::size_t>(first) + done;
    const std::size_t number = sample / block_samples;
    const std::size_t begin = sample % block_samples;
    const std::size_t end =
        std::min<std::size_t>(layout.blocks[number].num_samples, begin + n - done);
    pieces.push_back({number, begin, end, done});
    done += end - begin;
  }
  return pieces;
}

// Walks through the parts of a block; every step is checked against its end.
class BlockParts {
 public:
  BlockParts(std::string_view bytes, const std::string& path, std::size_t number)
      : bytes_(bytes), path_(path), number_(number) {}

  template <class T>
  const T* take(std::uint64_t count) {
    // Counts come from 32-bit numbers and small factors: no overflow.
    const std::uint64_t num_bytes = detail::round_up(count * sizeof(T), 8);
    if (num_bytes > bytes_.size() - place_) fail("is shorter than its parts");
    const char* part = bytes_.data() + place_;
    place_ += num_bytes;
    return reinterpret_cast<const T*>(part);
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(path_ + ": block " + std::to_string(number_) + " is damaged: it " + what + ".");
  }

 private:
  std::string_view bytes_;
  std::uint64_t place_ = 0;
  const std::string& path_;
  std::size_t number_;
};

template <class T>
void copy_ids(const T* from, std::size_t count, std::int64_t num_rows, std::int64_t* to,
              const BlockParts& parts, const Feature& feature) {
  T largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    largest = std::max(largest, from[i]);
    to[i] = static_cast<std::int64_t>(from[i]);
  }
  if (!feature.grows() && largest >= static_cast<std::uint64_t>(num_rows)) {
    parts.fail("holds id " + std::to_string(largest) + " of feature '" + feature.name +
               "', whose table has " + std::to_string(num_rows) + " rows");
  }
}

// Reads the pieces of a batch into a block of samples.
class Filler {
 public:
  Filler(const ClickFileLayout& layout, const std::string& path, std::string_view bytes,
         SampleBlock& out)
      : layout_(layout), path_(path), bytes_(bytes), out_(out) {}

  void fill(const std::vector<Piece>& pieces) {
    const std::size_t num_features = layout_.schema.features.size();
    std::vector<std::vector<Part>> parts;
    parts.reserve(pieces.size());
    for (const Piece& piece : pieces) {
      BlockParts block = parts_of(piece);
      copy_front(piece, block);
      parts.push_back(copy_lengths(piece, block));
    }
    std::size_t num_ids = 0;
    for (const auto& of_piece : parts) {
      for (const Part& part : of_piece) num_ids += part.count;
    }
    out_.ids.resize(num_ids);
    std::int64_t* to = out_.ids.data();
    for (std::size_t f = 0; f < num_features; ++f) {
      const Feature& feature = layout_.schema.features[f];
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        const Part& part = parts[p][f];
        const BlockParts block = parts_of(pieces[p]);
        if (detail::id_bytes(feature) == 4) {
          copy_ids(static_cast<const std::uint32_t*>(part.ids), part.count, feature.num_rows, to,
                   block, feature);
        } else {
          copy_ids(static_cast<const std::uint64_t*>(part.ids), part.count, feature.num_rows, to,
                   block, feature);
        }
        to += part.count;
      }
    }
  }

 private:
  struct Part {
    const void* ids;
    std::size_t count;
  };

  BlockParts parts_of(const Piece& piece) const {
    const ClickFileBlock& block = layout_.blocks[piece.block];
    return {bytes_.substr(block.begin, block.num_bytes), path_, piece.block};
  }

  // Labels and dense numbers.
  void copy_front(const Piece& piece, BlockParts& block) {
    const std::size_t n = layout_.blocks[piece.block].num_samples;
    const auto* labels = block.take<std::uint8_t>(n);
    std::uint8_t any = 0;
    for (std::size_t s = piece.begin; s < piece.end; ++s) {
      any |= labels[s];
      out_.labels[piece.out + s - piece.begin] = labels[s];
    }
    if (any > 1) block.fail("holds a label that is neither 0 nor 1");
    const auto width = static_cast<std::size_t>(layout_.schema.num_dense);
    const std::size_t first = piece.begin * width;
    const std::size_t count = (piece.end - piece.begin) * width;
    float* to = out_.dense.data() + piece.out * width;
    if (layout_.half_dense) {
      const auto* dense = block.take<std::uint16_t>(n * width) + first;
      for (std::size_t i = 0; i < count; ++i) to[i] = float_of(dense[i]);
    } else {
      const auto* dense = block.take<float>(n * width) + first;
      if (count > 0) std::memcpy(to, dense, count * sizeof(float));
    }
    check_finite(piece, to, count, block);
  }

  // One such number would make all parameters as it is, within a step.
  void check_finite(const Piece& piece, const float* dense, std::size_t count,
                    const BlockParts& block) const {
    float sum = 0;  // 0 * x is 0 for finite numbers, NaN for others
    for (std::size_t i = 0; i < count; ++i) sum += 0 * dense[i];
    if (sum == 0) return;
    const auto width = static_cast<std::size_t>(layout_.schema.num_dense);
    const auto bad = static_cast<std::size_t>(
        std::find_if(dense, dense + count, [](float x) { return !std::isfinite(x); }) - dense);
    const std::size_t sample =
        piece.block * static_cast<std::size_t>(layout_.block_samples) + piece.begin + bad / width;
    const auto& names = layout_.schema.dense_names;
    block.fail("holds a dense number that is not finite: sample " + std::to_string(sample) +
               ", number " + std::to_string(bad % width) +
               (names.empty() ? "" : " ('" + names[bad % width] + "')") + ", is " +
               std::to_string(dense[bad]));
  }

  // Lengths, and where the ids of each feature lie.
  std::vector<Part> copy_lengths(const Piece& piece, BlockParts& block) {
    const std::size_t n = layout_.blocks[piece.block].num_samples;
    const auto batch = static_cast<std::size_t>(out_.num_samples);
    std::vector<Part> parts;
    parts.reserve(layout_.schema.features.size());
    for (std::size_t f = 0; f < layout_.schema.features.size(); ++f) {
      const Feature& feature = layout_.schema.features[f];
      std::int32_t* lengths = out_.lengths.data() + f * batch + piece.out;
      std::size_t first = 0;
      std::size_t count = 0;
      std::size_t all = 0;
      if (feature.bag_size > 0) {
        const auto bag = static_cast<std::size_t>(feature.bag_size);
        std::fill_n(lengths, piece.end - piece.begin, static_cast<std::int32_t>(bag));
        first = piece.begin * bag;
        count = (piece.end - piece.begin) * bag;
        all = n * bag;
      } else {
        const auto* offsets = block.take<std::uint32_t>(n + 1);
        for (std::size_t s = piece.begin; s < piece.end; ++s) {
          if (offsets[s + 1] < offsets[s] || offsets[s + 1] - offsets[s] > detail::kMaxBag) {
            block.fail("holds offsets of feature '" + feature.name + "' that make no bags");
          }
          lengths[s - piece.begin] = static_cast<std::int32_t>(offsets[s + 1] - offsets[s]);
        }
        first = offsets[piece.begin];
        count = offsets[piece.end] - first;
        all = offsets[n];
        if (first + count > all) block.fail("holds offsets that run past their end");
      }
      parts.push_back(detail::id_bytes(feature) == 4
                          ? Part{block.take<std::uint32_t>(all) + first, count}
                          : Part{block.take<std::uint64_t>(all) + first, count});
    }
    return parts;
  }

  const ClickFileLayout& layout_;
  const std::string& path_;
  std::string_view bytes_;
  SampleBlock& out_;
};

}  // namespace

struct ClickFile::Mapping : MappedFile {
  using MappedFile::MappedFile;
};

ClickFile::ClickFile(const std::string& path)
    : path_(path),
      mapping_(std::make_unique<const Mapping>(path)),
      layout_(decode_click_file(mapping_->bytes(), path)) {}

ClickFile::~ClickFile() = default;

std::uint64_t ClickFile::num_bytes() const noexcept { return mapping_->bytes().size(); }

void ClickFile::read(std::int64_t first, std::int64_t count, SampleBlock& block) const {
  check_range(*this, first, count, path_);
  const auto n = static_cast<std::size_t>(count);
  block.num_samples = count;
  block.labels.resize(n);
  block.dense.resize(n * static_cast<std::size_t>(layout_.schema.num_dense));
  block.lengths.resize(n * layout_.schema.features.size());
  Filler(layout_, path_, mapping_->bytes(), block).fill(pieces_of(layout_, first, count));
}

void ClickFile::expect(std::int64_t first, std::int64_t count) const {
  const auto& features = layout_.schema.features;
  const bool varies = std::any_of(features.begin(), features.end(),
                                  [](const Feature& feature) { return feature.bag_size == 0; });
  count = std::min(count, layout_.num_samples - first);
  if (varies || first < 0 || count <= 0) return;
  for (const Piece& piece : pieces_of(layout_, first, count)) {
    const ClickFileBlock& block = layout_.blocks[piece.block];
    std::uint64_t place = block.begin;
    const auto fetch = [&](std::uint64_t bytes_per_sample) {
      mapping_->fetch(place + piece.begin * bytes_per_sample,
                      (piece.end - piece.begin) * bytes_per_sample);
      place += detail::round_up(block.num_samples * bytes_per_sample, 8);
    };
    fetch(1);
    fetch(static_cast<std::uint64_t>(layout_.schema.num_dense) * (layout_.half_dense ? 2 : 4));
    for (const Feature& feature : features) {
      fetch(static_cast<std::uint64_t>(feature.bag_size) * detail::id_bytes(feature));
    }
  }
}

void ClickFile::verify() const {
  SampleBlock samples;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < layout_.blocks.size(); ++i) {
    const ClickFileBlock& block = layout_.blocks[i];
    const std::string_view bytes = mapping_->bytes().substr(block.begin, block.num_bytes);
    if (core::crc32c(bytes.data(), bytes.size()) != block.crc) {
      throw DataError(path_ + ": block " + std::to_string(i) + " (samples from " +
                      std::to_string(first) + ") is damaged: its sum is wrong.");
    }
    read(first, block.num_samples, samples);
    first += block.num_samples;
  }
}

}  // namespace tessera::workloads::dlrm
