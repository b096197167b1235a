#include "tessera/checkpoint/writer.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

std::string padded(std::size_t number) {
  std::string digits = std::to_string(number);
  if (digits.size() < 5) digits.insert(0, 5 - digits.size(), '0');
  return digits;
}

// The names that torch's distributed checkpoint gives its shards.
std::string shard_name(int rank, std::size_t file, std::size_t num_files) {
  std::string name = "shard-";
  name.append(padded(static_cast<std::size_t>(rank) + 1))
      .append("-model-")
      .append(padded(file + 1));
  return name.append("-of-").append(padded(num_files)).append(".safetensors");
}

void check_part(const Part& part) {
  const bool has_name =
      !part.name.empty() && part.name.size() <= 1024 && part.name != "__metadata__" &&
      std::all_of(part.name.begin(), part.name.end(),
                  [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F; });
  if (!has_name) {
    throw Error(
        ErrorKind::kInvalid,
        "checkpoint.save: a tensor's name is empty, longer than 1024, '__metadata__' or has "
        "control characters.");
  }
}

// Writes one part and sums it chunk by chunk, while it is in the cache.
RegionRecord write_part(const Part& part, FileWriter& writer, std::vector<std::byte>& buffer,
                        const std::function<void(std::uint64_t)>& wrote) {
  RegionRecord record;
  record.region = part.region;
  record.begin = writer.num_bytes();
  const std::uint64_t num_bytes = part.num_bytes();
  for (std::uint64_t place = 0; place < num_bytes; place += kChunkBytes) {
    const std::uint64_t count = std::min(kChunkBytes, num_bytes - place);
    const std::byte* data = part.data;
    if (data != nullptr) {
      data += place;
    } else {
      buffer.resize(kChunkBytes);
      part.fill(place, std::span(buffer.data(), count));
      data = buffer.data();
    }
    record.chunk_crcs.push_back(crc32c(data, count));
    record.crc = crc32c_joined(record.crc, record.chunk_crcs.back(), count);
    writer.write(data, count);
    if (wrote) wrote(count);
  }
  record.end = writer.num_bytes();
  return record;
}

}  // namespace

std::uint64_t Part::num_bytes() const {
  return num_elements_of(region.lengths, "tensor '" + name + "'") * bytes_of(dtype);
}

Manifest write_shard(const std::string& folder, int rank, int world, const std::vector<Part>& parts,
                     Disk& disk, const std::function<void(std::uint64_t)>& progress) {
  Manifest written;
  written.world = world;
  // A file holds each name once: the k-th region of a tensor goes into the k-th file.
  std::vector<std::vector<const Part*>> files;
  std::map<std::string, std::size_t> num_seen;
  for (const Part& part : parts) {
    check_part(part);
    const std::size_t file = num_seen[part.name]++;
    if (file >= files.size()) files.emplace_back();
    files[file].push_back(&part);
  }
  std::uint64_t done = 0;
  const auto wrote = [&](std::uint64_t count) {
    done += count;
    if (progress) progress(done);
  };
  std::vector<std::byte> buffer;
  for (std::size_t i = 0; i < files.size(); ++i) {
    FileHeader header;
    header.metadata = {{"DCP_VERSION", "1.0"}, {"format", "pt"}};
    header.is_sharded = true;
    for (const Part* part : files[i]) {
      header.entries.push_back({.name = part->name,
                                .dtype = part->dtype,
                                .shape = part->region.lengths,
                                .offsets = part->region.offsets});
    }
    const std::string text = encode_header(header);
    FileRecord record{.name = shard_name(rank, i, files.size()),
                      .header_bytes = text.size(),
                      .header_crc = crc32c(text.data(), text.size())};
    record.crc = record.header_crc;
    FileWriter writer(disk, folder + "/" + record.name);
    writer.write(text);
    Manifest one;
    for (const Part* part : files[i]) {
      RegionRecord region = write_part(*part, writer, buffer, wrote);
      record.crc = crc32c_joined(record.crc, region.crc, region.end - region.begin);
      one.tensors.push_back({part->name, part->dtype, part->shape, {std::move(region)}});
    }
    writer.finish();
    record.num_bytes = writer.num_bytes();
    one.files.push_back(std::move(record));
    merge(written, std::move(one));
  }
  return written;
}

Manifest save_parts(const std::string& root, std::int64_t step,
                    const std::vector<std::vector<Part>>& parts, const Values& values, int keep,
                    Disk& disk, bool replaces) {
  PendingFolder folder(root, step, disk, replaces);
  Manifest manifest;
  manifest.step = step;
  manifest.world = static_cast<int>(parts.size());
  manifest.values = values;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    merge(manifest,
          write_shard(folder.path(), static_cast<int>(rank), manifest.world, parts[rank], disk));
  }
  folder.write_manifest(manifest);
  folder.commit(keep);
  return manifest;
}

}  // namespace tessera::checkpoint
