#include "serving/published_rows.h"

#include <algorithm>
#include <filesystem>

#include "checkpoint/json.h"
#include "checkpoint/open_file.h"
#include "checkpoint/stored_region.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/embedding/quantised_rows.h"

namespace tessera::serving {
namespace {

using checkpoint::DeltaPiece;
using checkpoint::DeltaRecord;
using checkpoint::Dtype;
using checkpoint::Manifest;
using checkpoint::TensorInfo;
using checkpoint::TensorRecord;
using checkpoint::json::corrupt;

constexpr std::int64_t kBlockBytes = std::int64_t{8} << 20;

std::vector<float> as_floats(Dtype dtype, std::vector<std::byte> bytes) {
  std::vector<float> numbers(bytes.size() / checkpoint::bytes_of(dtype));
  const auto type = dtype == Dtype::kF32   ? embedding::RowType::kFp32
                    : dtype == Dtype::kF16 ? embedding::RowType::kFp16
                                           : embedding::RowType::kBf16;
  embedding::dequantise_row(type, reinterpret_cast<const std::uint8_t*>(bytes.data()), numbers);
  return numbers;
}

void hand_over(std::span<const std::int64_t> ids, std::span<float> numbers, std::int64_t width,
               const PublishedRows::IdChanges& changes) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    changes.take(ids[i], numbers.subspan(i * static_cast<std::size_t>(width),
                                         static_cast<std::size_t>(width)));
  }
}

}  // namespace

std::vector<float> read_numbers(const checkpoint::Reader& reader, const TensorInfo& tensor,
                                std::int64_t begin, std::int64_t count) {
  checkpoint::Region region;
  region.offsets.assign(tensor.shape.size(), 0);
  region.lengths = tensor.shape;
  if (!tensor.shape.empty()) {
    region.offsets[0] = begin;
    region.lengths[0] = count;
  }
  const std::uint64_t num = checkpoint::num_elements_of(region.lengths, tensor.name);
  std::vector<std::byte> bytes(num * checkpoint::bytes_of(tensor.dtype));
  reader.read(tensor.name, region, bytes.data());
  return as_floats(tensor.dtype, std::move(bytes));
}

// One delta of the chain, with its files open.
class PublishedRows::Link {
 public:
  Link(const std::string& root, const Manifest& manifest)
      : folder_(root + "/" + checkpoint::folder_name(manifest.step)), manifest_(manifest) {
    if (checkpoint::read_manifest(folder_).sha256 != manifest.sha256) {
      corrupt(folder_.path(), "was replaced while it was read");
    }
    for (const auto& record : manifest.files) files_.emplace_back(folder_, record.name);
  }

  const DeltaRecord* delta(const std::string& table) const { return manifest_.find_delta(table); }

  std::vector<std::int64_t> rows(const DeltaRecord& delta, const DeltaPiece& piece) const {
    const TensorRecord& tensor = *manifest_.find(piece.rows);
    std::vector<std::int64_t> rows(static_cast<std::size_t>(tensor.shape[0]));
    read(tensor, {{0}, tensor.shape}, reinterpret_cast<std::byte*>(rows.data()));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < 0 || rows[i] >= delta.shape[0] || (i > 0 && rows[i] <= rows[i - 1])) {
        corrupt(folder_.path(),
                "delta '" + delta.name + "' has rows that do not ascend or do not exist");
      }
    }
    return rows;
  }

  std::vector<float> values(const DeltaRecord& delta, const DeltaPiece& piece, std::int64_t begin,
                            std::int64_t count) const {
    const std::int64_t width = piece.column_end - piece.column_begin;
    std::vector<std::byte> bytes(static_cast<std::size_t>(count * width) *
                                 checkpoint::bytes_of(delta.dtype));
    read(*manifest_.find(piece.values), {{begin, 0}, {count, width}}, bytes.data());
    return as_floats(delta.dtype, std::move(bytes));
  }

 private:
  void read(const TensorRecord& tensor, const checkpoint::Region& region, std::byte* data) const {
    for (const checkpoint::RegionRecord& record : tensor.regions) {
      checkpoint::Chunks chunks(files_[static_cast<std::size_t>(record.file)], record, tensor.name);
      checkpoint::copy_common(record, region, checkpoint::bytes_of(tensor.dtype), chunks, data);
    }
  }

  checkpoint::OpenFolder folder_;
  const Manifest& manifest_;
  std::vector<checkpoint::OpenFile> files_;
};

PublishedRows::PublishedRows(const checkpoint::Reader& reader, const std::string& served)
    : reader_(reader) {
  const auto chain = reader.chain();
  const auto found = std::find_if(chain.begin(), chain.end(), [&](const Manifest* manifest) {
    return manifest->sha256 == served;
  });
  is_chain_ = found != chain.end();
  if (!is_chain_) return;
  const std::string root = std::filesystem::path(reader.folder()).parent_path().string();
  for (auto link = found; link != chain.begin();) {
    --link;
    links_.push_back(std::make_unique<Link>(root, **link));
  }
}

PublishedRows::~PublishedRows() = default;

void PublishedRows::each_row(const TensorInfo& table, const Take& take) const {
  const bool knows = is_chain_ && std::all_of(links_.begin(), links_.end(), [&](const auto& link) {
                       return link->delta(table.name) != nullptr;
                     });
  if (knows) return each_changed(table, take);
  const auto width = static_cast<std::size_t>(table.shape[1]);
  const std::int64_t most =
      std::max<std::int64_t>(1, kBlockBytes / (4 * static_cast<std::int64_t>(width)));
  for (std::int64_t begin = 0; begin < table.shape[0]; begin += most) {
    const std::int64_t count = std::min(most, table.shape[0] - begin);
    std::vector<float> numbers = read_numbers(reader_, table, begin, count);
    for (std::int64_t r = 0; r < count; ++r) {
      take(begin + r, std::span(numbers).subspan(static_cast<std::size_t>(r) * width, width));
    }
  }
}

void PublishedRows::each_changed(const TensorInfo& table, const Take& take) const {
  struct Part {
    const Link* link;
    const DeltaRecord* delta;
    const DeltaPiece* piece;
    std::vector<std::int64_t> rows;
  };
  std::vector<Part> parts;
  std::vector<std::int64_t> changed;
  for (const auto& link : links_) {
    const DeltaRecord* delta = link->delta(table.name);
    for (const DeltaPiece& piece : delta->pieces) {
      parts.push_back({link.get(), delta, &piece, link->rows(*delta, piece)});
      changed.insert(changed.end(), parts.back().rows.begin(), parts.back().rows.end());
    }
  }
  std::sort(changed.begin(), changed.end());
  changed.erase(std::unique(changed.begin(), changed.end()), changed.end());

  const std::int64_t width = table.shape[1];
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(1, kBlockBytes / (4 * width)));
  for (std::size_t begin = 0; begin < changed.size(); begin += most) {
    const std::span<const std::int64_t> block =
        std::span(changed).subspan(begin, std::min(most, changed.size() - begin));
    std::vector<float> numbers(block.size() * static_cast<std::size_t>(width));
    // Columns of a row that one delta has written; pieces of a delta do not overlap.
    std::vector<std::int64_t> known(block.size());
    std::vector<std::int64_t> now(block.size());
    const Link* link = nullptr;
    const auto close_link = [&] {
      for (std::size_t i = 0; i < block.size(); ++i) known[i] = std::max(known[i], now[i]);
      std::fill(now.begin(), now.end(), 0);
    };
    for (const Part& part : parts) {
      if (part.link != link) close_link();
      link = part.link;
      const auto first = std::lower_bound(part.rows.begin(), part.rows.end(), block.front());
      const auto last = std::upper_bound(first, part.rows.end(), block.back());
      if (first == last) continue;
      const std::int64_t columns = part.piece->column_end - part.piece->column_begin;
      const std::vector<float> values =
          part.link->values(*part.delta, *part.piece, first - part.rows.begin(), last - first);
      std::size_t place = 0;
      for (auto row = first; row != last; ++row) {
        while (block[place] < *row) ++place;
        std::copy_n(
            values.begin() + (row - first) * columns, columns,
            numbers.begin() + static_cast<std::int64_t>(place) * width + part.piece->column_begin);
        now[place] += columns;
      }
    }
    close_link();
    for (std::size_t i = 0; i < block.size(); ++i) {
      std::span<float> row = std::span(numbers).subspan(i * static_cast<std::size_t>(width),
                                                        static_cast<std::size_t>(width));
      if (known[i] < width) {  // only a part of its columns was written: the others are older
        const std::vector<float> whole = read_numbers(reader_, table, block[i], 1);
        std::copy(whole.begin(), whole.end(), row.begin());
      }
      take(block[i], row);
    }
  }
}

void PublishedRows::each_id(const TensorInfo& ids, const TensorInfo& weights,
                            const IdChanges& changes) const {
  changes.clear();
  const std::int64_t width = weights.shape[1];
  const std::int64_t most = std::max<std::int64_t>(1, kBlockBytes / (4 * width));
  for (std::int64_t begin = 0; begin < ids.shape[0]; begin += most) {
    const std::int64_t count = std::min(most, ids.shape[0] - begin);
    std::vector<std::int64_t> block(static_cast<std::size_t>(count));
    reader_.read(ids.name, {{begin}, {count}}, reinterpret_cast<std::byte*>(block.data()));
    std::vector<float> numbers = read_numbers(reader_, weights, begin, count);
    hand_over(block, numbers, width, changes);
  }
}

}  // namespace tessera::serving
