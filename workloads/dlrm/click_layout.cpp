#include "dlrm/click_layout.h"

#include <cstring>
#include <set>

#include "tessera/core/crc32c.h"

namespace tessera::workloads::dlrm {
namespace detail {
namespace {

constexpr std::string_view kMagic = "TSRCLICK";
constexpr std::uint32_t kHalfFlag = 1;

[[noreturn]] void fail(const std::string& name, const std::string& what) {
  throw DataError(name + ": " + what);
}

template <class T>
void put(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

// Takes numbers from the front of the bytes.
class Numbers {
 public:
  Numbers(std::string_view bytes, const std::string& name) : rest_(bytes), name_(name) {}

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, text(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view text(std::size_t num_bytes) {
    if (rest_.size() < num_bytes) fail(name_, "the directory ends too early.");
    const std::string_view front = rest_.substr(0, num_bytes);
    rest_.remove_prefix(num_bytes);
    return front;
  }
  bool is_empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
  const std::string& name_;
};

}  // namespace

void check_schema(const ClickSchema& schema, const std::string& name) {
  if (schema.num_dense < 0 || schema.num_dense > static_cast<std::int64_t>(kMaxDense)) {
    fail(name, std::to_string(schema.num_dense) + " dense numbers per sample; 0 to " +
                   std::to_string(kMaxDense) + " can be stored.");
  }
  if (schema.features.size() > kMaxFeatures) {
    fail(name, std::to_string(schema.features.size()) + " features; at most " +
                   std::to_string(kMaxFeatures) + " can be stored.");
  }
  if (!schema.dense_names.empty() &&
      schema.dense_names.size() != static_cast<std::size_t>(schema.num_dense)) {
    fail(name, std::to_string(schema.dense_names.size()) + " names of " +
                   std::to_string(schema.num_dense) + " dense numbers.");
  }
  for (const std::string& one : schema.dense_names) {
    if (one.size() > kMaxNameBytes) {
      fail(name,
           "names of dense numbers have at most " + std::to_string(kMaxNameBytes) + " bytes.");
    }
  }
  if (schema.origin.size() > kMaxOriginBytes) fail(name, "the schema has more than 64 MiB.");
  std::set<std::string> names;
  for (const Feature& feature : schema.features) {
    if (feature.name.empty() || feature.name.size() > kMaxNameBytes ||
        !names.insert(feature.name).second) {
      fail(name, "feature names must be different and of 1 to " + std::to_string(kMaxNameBytes) +
                     " bytes.");
    }
    if (feature.num_rows < 0 || feature.num_rows > kMaxRows) {
      fail(name, "feature '" + feature.name + "' has " + std::to_string(feature.num_rows) +
                     " rows; 1 to 2^48 can be stored, or 0 for a table that grows.");
    }
    if (feature.dim < 0 || feature.dim > kMaxDim) {
      fail(name, "feature '" + feature.name + "' has " + std::to_string(feature.dim) +
                     " columns; 1 to " + std::to_string(kMaxDim) +
                     " can be stored, or 0 for as many as the others.");
    }
    if (feature.bag_size < 0 || feature.bag_size > static_cast<std::int64_t>(kMaxBag)) {
      fail(name, "feature '" + feature.name + "' has bags of " + std::to_string(feature.bag_size) +
                     " ids; 0 (varies) to 2^20 can be stored.");
    }
  }
}

std::uint64_t least_block_bytes(const ClickSchema& schema, bool half_dense, std::uint64_t n) {
  std::uint64_t bytes = round_up(n, 8);
  bytes += round_up(n * static_cast<std::uint64_t>(schema.num_dense) * (half_dense ? 2 : 4), 8);
  for (const Feature& feature : schema.features) {
    if (feature.bag_size == 0) bytes += round_up(4 * (n + 1), 8);
    bytes += round_up(n * static_cast<std::uint64_t>(feature.bag_size) * id_bytes(feature), 8);
  }
  return bytes;
}

std::uint32_t version_of(const ClickSchema& schema) {
  bool is_plain = schema.dense_names.empty() && schema.origin.empty();
  bool is_own = false;
  for (const Feature& feature : schema.features) {
    is_plain = is_plain && !feature.means;
    is_own = is_own || feature.grows() || feature.dim > 0;
  }
  if (is_own) return 3;
  return is_plain ? 1 : 2;
}

EncodedLayout encode_layout(const ClickFileLayout& layout, std::uint64_t directory_begin) {
  EncodedLayout encoded;
  for (const Feature& feature : layout.schema.features) {
    put(encoded.directory, static_cast<std::uint64_t>(feature.num_rows));
    put(encoded.directory, static_cast<std::uint32_t>(feature.bag_size));
    put(encoded.directory, static_cast<std::uint32_t>(feature.name.size()));
    encoded.directory += feature.name;
  }
  for (const ClickFileBlock& block : layout.blocks) {
    put(encoded.directory, block.begin);
    put(encoded.directory, block.num_bytes);
    put(encoded.directory, block.num_samples);
    put(encoded.directory, block.crc);
  }
  const std::uint32_t version = version_of(layout.schema);
  if (version >= 2) {
    for (const Feature& feature : layout.schema.features) {
      put(encoded.directory, std::uint32_t{feature.means ? 1U : 0U});
    }
    const auto put_text = [&](const std::string& text) {
      put(encoded.directory, static_cast<std::uint32_t>(text.size()));
      encoded.directory += text;
    };
    put(encoded.directory, static_cast<std::uint32_t>(layout.schema.dense_names.size()));
    for (const std::string& one : layout.schema.dense_names) put_text(one);
    put_text(layout.schema.origin);
  }
  if (version >= 3) {
    for (const Feature& feature : layout.schema.features) {
      put(encoded.directory, static_cast<std::uint32_t>(feature.dim));
    }
  }
  std::string& header = encoded.header;
  header += kMagic;
  put(header, version);
  put(header, layout.half_dense ? kHalfFlag : std::uint32_t{0});
  put(header, static_cast<std::uint64_t>(layout.num_samples));
  put(header, static_cast<std::uint32_t>(layout.schema.num_dense));
  put(header, static_cast<std::uint32_t>(layout.schema.features.size()));
  put(header, static_cast<std::uint32_t>(layout.block_samples));
  put(header, static_cast<std::uint32_t>(layout.blocks.size()));
  put(header, directory_begin);
  put(header, static_cast<std::uint64_t>(encoded.directory.size()));
  put(header, core::crc32c(encoded.directory.data(), encoded.directory.size()));
  put(header, core::crc32c(header.data(), header.size()));
  return encoded;
}

namespace {

struct Header {
  std::uint32_t num_features = 0;
  std::uint32_t num_blocks = 0;
  std::uint64_t directory_begin = 0;
  std::uint64_t directory_bytes = 0;
  std::uint32_t directory_crc = 0;
};

Header decode_header(std::string_view bytes, const std::string& name, ClickFileLayout& layout) {
  if (bytes.size() < kMagic.size() || bytes.substr(0, kMagic.size()) != kMagic) {
    fail(name, "is not a binary click log. Make one with tessera data convert.");
  }
  if (bytes.size() < kHeaderBytes) fail(name, "is cut short: the header has 64 bytes.");
  Numbers numbers(bytes.substr(kMagic.size(), kHeaderBytes - kMagic.size()), name);
  const auto version = numbers.take<std::uint32_t>();
  if (version < 1 || version > kClickFileVersion) {
    fail(name, "has version " + std::to_string(version) +
                   " of the format; this program reads versions 1 to " +
                   std::to_string(kClickFileVersion) + ".");
  }
  layout.version = version;
  const auto flags = numbers.take<std::uint32_t>();
  const auto num_samples = numbers.take<std::uint64_t>();
  layout.schema.num_dense = numbers.take<std::uint32_t>();
  Header header;
  header.num_features = numbers.take<std::uint32_t>();
  layout.block_samples = numbers.take<std::uint32_t>();
  header.num_blocks = numbers.take<std::uint32_t>();
  header.directory_begin = numbers.take<std::uint64_t>();
  header.directory_bytes = numbers.take<std::uint64_t>();
  header.directory_crc = numbers.take<std::uint32_t>();
  const auto crc = numbers.take<std::uint32_t>();
  if (crc != core::crc32c(bytes.data(), kHeaderBytes - 4)) {
    fail(name, "the header is damaged: its sum is wrong.");
  }
  if (flags > kHalfFlag || num_samples > (std::uint64_t{1} << 48) || layout.block_samples < 1 ||
      layout.block_samples > static_cast<std::int64_t>(kMaxBlockSamples) ||
      header.num_features > kMaxFeatures) {
    fail(name, "the header holds numbers that make no sense.");
  }
  layout.half_dense = flags == kHalfFlag;
  layout.num_samples = static_cast<std::int64_t>(num_samples);
  return header;
}

void check_blocks(const ClickFileLayout& layout, std::uint64_t directory_begin,
                  const std::string& name) {
  bool varies = false;
  for (const Feature& feature : layout.schema.features) varies |= feature.bag_size == 0;
  std::uint64_t place = kHeaderBytes;
  std::int64_t num_samples = 0;
  for (std::size_t i = 0; i < layout.blocks.size(); ++i) {
    const ClickFileBlock& block = layout.blocks[i];
    const bool is_last = i + 1 == layout.blocks.size();
    const std::uint64_t least =
        least_block_bytes(layout.schema, layout.half_dense, block.num_samples);
    const bool has_samples =
        block.num_samples >= 1 && (is_last ? block.num_samples <= layout.block_samples
                                           : block.num_samples == layout.block_samples);
    if (!has_samples || block.begin != place || block.begin > directory_begin ||
        block.num_bytes > directory_begin - block.begin || block.num_bytes < least ||
        (!varies && block.num_bytes != least)) {
      fail(name, "the directory is wrong about block " + std::to_string(i) + ".");
    }
    place = round_up(block.begin + block.num_bytes, kBlockAlignment);
    num_samples += block.num_samples;
  }
  if (num_samples != layout.num_samples || place != directory_begin) {
    fail(name, "header and directory differ: " + std::to_string(layout.num_samples) + " and " +
                   std::to_string(num_samples) + " samples, " + std::to_string(directory_begin) +
                   " and " + std::to_string(place) + " bytes.");
  }
}

}  // namespace
}  // namespace detail

ClickFileLayout decode_click_file(std::string_view bytes, const std::string& name) {
  using namespace detail;
  ClickFileLayout layout;
  const Header header = decode_header(bytes, name, layout);
  if (header.directory_begin > bytes.size() ||
      header.directory_bytes != bytes.size() - header.directory_begin) {
    fail(name, "has " + std::to_string(bytes.size()) + " bytes; the header says " +
                   std::to_string(header.directory_begin + header.directory_bytes) +
                   ". It is cut short or something was added.");
  }
  const std::string_view directory = bytes.substr(header.directory_begin);
  if (core::crc32c(directory.data(), directory.size()) != header.directory_crc) {
    fail(name, "the directory is damaged: its sum is wrong.");
  }
  Numbers numbers(directory, name);
  for (std::uint32_t f = 0; f < header.num_features; ++f) {
    Feature feature;
    feature.num_rows = static_cast<std::int64_t>(numbers.take<std::uint64_t>());
    feature.bag_size = numbers.take<std::uint32_t>();
    const auto name_bytes = numbers.take<std::uint32_t>();
    feature.name = numbers.text(name_bytes);
    layout.schema.features.push_back(std::move(feature));
  }
  check_schema(layout.schema, name);
  for (std::uint32_t b = 0; b < header.num_blocks; ++b) {
    ClickFileBlock block;
    block.begin = numbers.take<std::uint64_t>();
    block.num_bytes = numbers.take<std::uint64_t>();
    block.num_samples = numbers.take<std::uint32_t>();
    block.crc = numbers.take<std::uint32_t>();
    layout.blocks.push_back(block);
  }
  if (layout.version >= 2) {
    for (Feature& feature : layout.schema.features) {
      const auto pooling = numbers.take<std::uint32_t>();
      if (pooling > 1) fail(name, "feature '" + feature.name + "' has a pooling that is unknown.");
      feature.means = pooling == 1;
    }
    const auto num_names = numbers.take<std::uint32_t>();
    for (std::uint32_t i = 0; i < num_names; ++i) {
      layout.schema.dense_names.emplace_back(numbers.text(numbers.take<std::uint32_t>()));
    }
    layout.schema.origin = numbers.text(numbers.take<std::uint32_t>());
  }
  if (layout.version >= 3) {
    for (Feature& feature : layout.schema.features) feature.dim = numbers.take<std::uint32_t>();
  } else if (any_grows(layout.schema)) {
    fail(name, "a feature has 0 rows, which is for version 3 of the format.");
  }
  check_schema(layout.schema, name);
  if (!numbers.is_empty()) fail(name, "the directory holds more than it should.");
  check_blocks(layout, header.directory_begin, name);
  return layout;
}

}  // namespace tessera::workloads::dlrm
