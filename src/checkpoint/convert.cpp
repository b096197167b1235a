#include "tessera/checkpoint/convert.h"

#include <algorithm>
#include <utility>

#include "checkpoint/open_file.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

// Reads `count` elements of a region from its element `begin` on, as boxes: the end of a row, whole
// rows, the beginning of a row; each row again so, one dimension further in.
void read_elements(const TensorSource& source, const std::string& name, const Region& region,
                   std::size_t dimension, std::uint64_t begin, std::uint64_t count,
                   std::uint64_t element_bytes, std::byte* out) {
  if (count == 0) return;
  if (dimension == region.lengths.size()) {
    source.read(name, region, out);
    return;
  }
  std::uint64_t row = 1;
  for (std::size_t i = dimension + 1; i < region.lengths.size(); ++i) {
    row *= static_cast<std::uint64_t>(region.lengths[i]);
  }
  while (count > 0) {
    const std::uint64_t inside = begin % row;
    Region box = region;
    box.offsets[dimension] += static_cast<std::int64_t>(begin / row);
    std::uint64_t here = 0;
    if (inside != 0 || count < row) {
      here = std::min(count, row - inside);
      box.lengths[dimension] = 1;
      read_elements(source, name, box, dimension + 1, inside, here, element_bytes, out);
    } else {
      here = count / row * row;
      box.lengths[dimension] = static_cast<std::int64_t>(count / row);
      source.read(name, box, out);
    }
    begin += here;
    count -= here;
    out += here * element_bytes;
  }
}

Part part_of(const TensorSource& source, const TensorInfo& tensor, Region region) {
  Part part;
  part.name = tensor.name;
  part.dtype = tensor.dtype;
  part.shape = tensor.shape;
  part.region = region;
  part.fill = [&source, name = tensor.name, size = bytes_of(tensor.dtype),
               region = std::move(region)](std::uint64_t begin, std::span<std::byte> out) {
    read_elements(source, name, region, 0, begin / size, out.size() / size, size, out.data());
  };
  return part;
}

std::size_t cut_dimension(const TensorInfo& tensor, Cut cut) {
  return cut == Cut::kColumns ? tensor.shape.size() - 1 : 0;
}

}  // namespace

std::vector<std::vector<Part>> parts_of(const TensorSource& source, int ranks, Cut cut) {
  if (ranks < 1) {
    throw Error(ErrorKind::kInvalid,
                "checkpoint: " + std::to_string(ranks) + " ranks cannot hold anything.");
  }
  std::vector<std::vector<Part>> parts(static_cast<std::size_t>(ranks));
  std::vector<std::uint64_t> load(parts.size(), 0);
  for (const TensorInfo& tensor : source.tensors()) {
    const Region whole{std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape};
    if (cut == Cut::kWhole || tensor.shape.empty()) {
      const std::size_t rank = std::min_element(load.begin(), load.end()) - load.begin();
      parts[rank].push_back(part_of(source, tensor, whole));
      load[rank] += parts[rank].back().num_bytes();
      continue;
    }
    const std::size_t dimension = cut_dimension(tensor, cut);
    const std::int64_t extent = tensor.shape[dimension];
    for (std::int64_t rank = 0, begin = 0; rank < ranks; ++rank) {
      const std::int64_t length = extent / ranks + (rank < extent % ranks ? 1 : 0);
      Region region = whole;
      region.offsets[dimension] = begin;
      region.lengths[dimension] = length;
      begin += length;
      // An empty tensor still needs somebody who says so.
      if (length == 0 && !(extent == 0 && rank == 0)) continue;
      parts[rank].push_back(part_of(source, tensor, std::move(region)));
      load[rank] += parts[rank].back().num_bytes();
    }
  }
  return parts;
}

void export_plain(const Reader& source, const std::string& path, Disk& disk) {
  FileHeader header;
  header.metadata = {{"format", "pt"}, {"step", std::to_string(source.manifest().step)}};
  std::vector<Part> parts;
  for (const TensorInfo& tensor : source.tensors()) {
    const Region whole{std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape};
    parts.push_back(part_of(source, tensor, whole));
    header.entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  const std::string temporary = path + ".tmp";
  disk.remove(temporary);
  try {
    FileWriter writer(disk, temporary);
    writer.write(encode_header(header));
    std::vector<std::byte> buffer(kChunkBytes);
    for (const Part& part : parts) {
      const std::uint64_t num_bytes = part.num_bytes();
      for (std::uint64_t place = 0; place < num_bytes; place += kChunkBytes) {
        const std::uint64_t count = std::min(kChunkBytes, num_bytes - place);
        part.fill(place, std::span(buffer.data(), count));
        writer.write(buffer.data(), count);
      }
    }
    writer.finish();
    if (disk.rename(temporary, path) != 0) throw_write_error("rename to", path);
    const std::size_t slash = path.find_last_of('/');
    const std::string parent = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    if (disk.sync_folder(parent) != 0) throw_write_error("sync", parent);
  } catch (...) {
    disk.remove(temporary);
    throw;
  }
}

Manifest import_plain(const std::string& path, const std::string& root, std::int64_t step,
                      Disk& disk, bool replaces) {
  const PlainReader source(path);
  return save_parts(root, step, parts_of(source, 1, Cut::kWhole), {}, 0, disk, replaces);
}

namespace {

std::int64_t volume_of(const std::vector<std::int64_t>& lengths) {
  std::int64_t volume = 1;
  for (const std::int64_t length : lengths) volume *= length;
  return volume;
}

// Parts inside the tensor that together are as large; that none overlaps the manifest's check says.
void check_places(const TensorInfo& tensor, const std::vector<PlacedRegion>& places, int ranks) {
  std::int64_t volume = 0;
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorKind::kInvalid, "checkpoint: the parts of " + tensor.name + " " + what);
  };
  for (const PlacedRegion& place : places) {
    const auto& [offsets, lengths] = place.region;
    if (place.rank < 0 || place.rank >= ranks) {
      refuse("are for rank " + std::to_string(place.rank) + " of " + std::to_string(ranks) + ".");
    }
    bool is_inside = offsets.size() == tensor.shape.size() && lengths.size() == offsets.size();
    for (std::size_t i = 0; is_inside && i < offsets.size(); ++i) {
      is_inside = offsets[i] >= 0 && lengths[i] >= 0 && offsets[i] <= tensor.shape[i] &&
                  lengths[i] <= tensor.shape[i] - offsets[i];
    }
    if (!is_inside) refuse("reach outside of it.");
    volume += volume_of(lengths);
  }
  if (volume != volume_of(tensor.shape)) refuse("do not cover it once.");
}

std::vector<std::vector<Part>> placed_parts(
    const Reader& source, int ranks,
    const std::map<std::string, std::vector<PlacedRegion>>& places) {
  std::vector<std::vector<Part>> parts(static_cast<std::size_t>(ranks));
  std::vector<std::uint64_t> load(parts.size(), 0);
  const auto add = [&](const TensorInfo& tensor, const Region& region, std::size_t rank) {
    parts[rank].push_back(part_of(source, tensor, region));
    load[rank] += parts[rank].back().num_bytes();
  };
  for (const auto& [name, regions] : places) {
    const TensorInfo* tensor = source.find(name);
    if (tensor == nullptr) {
      throw Error(ErrorKind::kInvalid, source.folder() + ": has no tensor " + name + ".");
    }
    check_places(*tensor, regions, ranks);
    for (const PlacedRegion& place : regions) {
      if (volume_of(place.region.lengths) == 0 && regions.size() > 1) continue;
      add(*tensor, place.region, static_cast<std::size_t>(place.rank));
    }
  }
  for (const TensorInfo& tensor : source.tensors()) {
    if (places.contains(tensor.name)) continue;
    const Region whole{std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape};
    add(tensor, whole,
        static_cast<std::size_t>(std::min_element(load.begin(), load.end()) - load.begin()));
  }
  return parts;
}

// With `is_same`, what is written takes the place of the source, also in the order of commits.
Manifest save_again(const Reader& source, const std::string& root,
                    const std::vector<std::vector<Part>>& parts, bool is_same, bool replaces,
                    Disk& disk) {
  const int ranks = static_cast<int>(parts.size());
  PendingFolder folder(root, source.manifest().step, disk, is_same || replaces);
  Manifest manifest;
  manifest.step = source.manifest().step;
  manifest.world = ranks;
  manifest.plan = source.manifest().plan;
  if (is_same) {
    manifest.commit = source.manifest().commit;
    manifest.saved = source.manifest().saved;
    manifest.job = source.manifest().job;
  }
  manifest.values = source.manifest().values;
  if (ranks == source.manifest().world) manifest.rank_values = source.manifest().rank_values;
  for (int rank = 0; rank < ranks; ++rank) {
    merge(manifest, write_shard(folder.path(), rank, ranks, parts[rank], disk));
  }
  folder.write_manifest(manifest);
  folder.commit();
  return manifest;
}

}  // namespace

Manifest reshard(const Reader& source, const std::string& root, int ranks, Cut cut, Disk& disk,
                 bool replaces) {
  return save_again(source, root, parts_of(source, ranks, cut), false, replaces, disk);
}

Manifest reshard(const Reader& source, const std::string& root, int ranks,
                 const std::map<std::string, std::vector<PlacedRegion>>& places, Disk& disk,
                 bool replaces) {
  if (ranks < 1) {
    throw Error(ErrorKind::kInvalid,
                "checkpoint: " + std::to_string(ranks) + " ranks cannot hold anything.");
  }
  return save_again(source, root, placed_parts(source, ranks, places), false, replaces, disk);
}

Manifest compact(const std::string& root, std::int64_t step, Disk& disk) {
  const Reader source(root, step);
  if (!source.manifest().base) {
    throw Error(ErrorKind::kInvalid,
                source.folder() + ": is no delta, there is nothing to compact.");
  }
  for (const std::int64_t other : list_steps(root)) {
    if (other <= step) break;
    try {
      const Manifest newer = read_manifest(root + "/" + folder_name(other));
      if (newer.base && newer.base->sha256 == source.manifest().sha256) {
        throw Error(ErrorKind::kInvalid, source.folder() + ": the delta of step " +
                                             std::to_string(other) +
                                             " stands on it. Compact that one instead.");
      }
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kInvalid || error.kind() == ErrorKind::kRead) throw;
    }
  }
  return save_again(source, root, parts_of(source, source.manifest().world, Cut::kWhole), true,
                    true, disk);
}

}  // namespace tessera::checkpoint
