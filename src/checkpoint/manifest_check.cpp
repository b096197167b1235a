#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/json.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {
namespace {

using json::corrupt;

bool overlap(const Region& a, const Region& b) {
  for (std::size_t i = 0; i < a.offsets.size(); ++i) {
    if (a.offsets[i] >= b.offsets[i] + b.lengths[i]) return false;
    if (b.offsets[i] >= a.offsets[i] + a.lengths[i]) return false;
  }
  return true;
}

void check_cover(const TensorRecord& tensor, const std::string& where) {
  const std::uint64_t size = bytes_of(tensor.dtype);
  const std::uint64_t total = num_elements_of(tensor.shape, where);
  if (total > INT64_MAX / size) corrupt(where, "has more bytes than can be counted");
  std::uint64_t covered = 0;
  std::vector<const Region*> regions;
  for (const RegionRecord& record : tensor.regions) {
    const Region& region = record.region;
    if (region.offsets.size() != tensor.shape.size() ||
        region.lengths.size() != tensor.shape.size()) {
      corrupt(where, "has a region of another number of dimensions");
    }
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      if (region.lengths[i] > tensor.shape[i] ||
          region.offsets[i] > tensor.shape[i] - region.lengths[i]) {
        corrupt(where, "of shape " + text_of(tensor.shape) + " has a region at " +
                           text_of(region.offsets) + " of " + text_of(region.lengths) +
                           ", which leaves it");
      }
    }
    const std::uint64_t count = num_elements_of(region.lengths, where);
    if (count * size != record.end - record.begin) {
      corrupt(where, "has a region of " + std::to_string(count) + " elements in " +
                         std::to_string(record.end - record.begin) + " bytes");
    }
    if (count == 0) continue;
    if (covered > total - std::min(count, total)) corrupt(where, "has regions that overlap");
    covered += count;
    regions.push_back(&region);
  }
  if (covered != total) {
    corrupt(where, "of shape " + text_of(tensor.shape) + " is covered only in part: " +
                       std::to_string(covered) + " of " + std::to_string(total) + " elements");
  }
  if (tensor.shape.empty()) return;
  std::sort(regions.begin(), regions.end(),
            [](const Region* a, const Region* b) { return a->offsets < b->offsets; });
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const std::int64_t end = regions[i]->offsets[0] + regions[i]->lengths[0];
    for (std::size_t j = i + 1; j < regions.size() && regions[j]->offsets[0] < end; ++j) {
      if (overlap(*regions[i], *regions[j])) corrupt(where, "has regions that overlap");
    }
  }
}

void check_files(const Manifest& manifest, const std::string& where) {
  std::set<std::string> names;
  for (const FileRecord& file : manifest.files) {
    if (!names.insert(file.name).second) corrupt(where, "lists " + file.name + " twice");
  }
  std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>> ranges(manifest.files.size());
  for (const TensorRecord& tensor : manifest.tensors) {
    for (const RegionRecord& region : tensor.regions) {
      if (region.file < 0 || static_cast<std::size_t>(region.file) >= ranges.size()) {
        corrupt(where + ", tensor '" + tensor.name + "'", "lies in a file that is not listed");
      }
      ranges[region.file].emplace_back(region.begin, region.end);
    }
  }
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const FileRecord& file = manifest.files[i];
    if (file.header_bytes == 0) {
      if (!ranges[i].empty()) corrupt(where, file.name + " holds tensors but has no header");
      continue;
    }
    std::sort(ranges[i].begin(), ranges[i].end());
    std::uint64_t end = file.header_bytes;
    for (const auto& [first, last] : ranges[i]) {
      if (first != end) corrupt(where, "the tensors in " + file.name + " overlap or leave a gap");
      end = last;
    }
    if (end != file.num_bytes) corrupt(where, "the tensors do not fill " + file.name);
  }
}

void check_deltas(const Manifest& manifest, const std::string& where) {
  if (!manifest.deltas.empty() && !manifest.base) corrupt(where, "has deltas but no base");
  for (const DeltaRecord& delta : manifest.deltas) {
    const std::string place = where + ", delta '" + delta.name + "'";
    if (delta.shape.empty() || delta.shape.size() > 2) {
      corrupt(place, "has neither one nor two dimensions");
    }
    num_elements_of(delta.shape, place);
    if (manifest.find(delta.name) != nullptr) corrupt(place, "is also there in full");
    const std::int64_t num_columns = delta.shape.size() == 2 ? delta.shape[1] : 1;
    for (const DeltaPiece& piece : delta.pieces) {
      const TensorRecord* rows = manifest.find(piece.rows);
      const TensorRecord* values = manifest.find(piece.values);
      if (rows == nullptr || values == nullptr || rows->dtype != Dtype::kI64 ||
          rows->shape.size() != 1 || values->dtype != delta.dtype || values->shape.size() != 2 ||
          values->shape[0] != rows->shape[0] || piece.column_begin > piece.column_end ||
          piece.column_end > num_columns ||
          values->shape[1] != piece.column_end - piece.column_begin) {
        corrupt(place, "has a piece whose rows and values do not fit");
      }
    }
  }
}

void check_lists(const Manifest& manifest, const std::string& where) {
  if (!manifest.lists.empty() && !manifest.base) corrupt(where, "has changed lists but no base");
  for (const ListDelta& list : manifest.lists) {
    const std::string place = where + ", list '" + list.name + "'";
    const auto numbers = [&](const std::string& name) {
      const TensorRecord* tensor = manifest.find(name);
      if (tensor == nullptr || tensor->dtype != Dtype::kI64 || tensor->shape.size() != 1) {
        corrupt(place, "has no tensor '" + name + "' of whole numbers");
      }
      return tensor->shape[0];
    };
    const std::int64_t num_changed = numbers(list.changed);
    numbers(list.removed);
    if (numbers(list.groups) != numbers(list.runs)) corrupt(place, "has groups without a run");
    if (manifest.find(list.name) != nullptr) corrupt(place, "is also there in full");
    for (const ListDelta::Column& column : list.columns) {
      const TensorRecord* values = manifest.find(column.values);
      if (values == nullptr || values->shape.empty() || values->shape.size() > 2 ||
          values->shape[0] != num_changed) {
        corrupt(place, "has " + std::to_string(num_changed) + " changed ids, but not as many of '" +
                           column.values + "'");
      }
      std::vector<std::int64_t> shape = values->shape;
      shape[0] = list.rows;
      num_elements_of(shape, place);
      if (manifest.find(column.name) != nullptr || manifest.find_delta(column.name) != nullptr) {
        corrupt(place, "has '" + column.name + "', which is also there otherwise");
      }
    }
  }
}

}  // namespace

void check_manifest(const Manifest& manifest, const std::string& where) {
  check_files(manifest, where);
  for (const TensorRecord& tensor : manifest.tensors) {
    check_cover(tensor, where + ", tensor '" + tensor.name + "'");
  }
  check_deltas(manifest, where);
  check_lists(manifest, where);
}

}  // namespace tessera::checkpoint
