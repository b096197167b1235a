// tests/checkpoint/samples.h — small checkpoints with values that say where they came from.

#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/writer.h"

namespace tessera::checkpoint::testing {

/// A folder of its own in memory (a sync costs nothing there), removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const std::string parent = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ::testing::TempDir();
    std::string name = parent + "/tessera-ckpt-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    std::string inner = path_;
    return inner.append("/").append(name);
  }

 private:
  std::string path_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void spill(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// Tensors whose elements are `seed` plus their place, and the parts of them.
struct Sample {
  std::vector<std::vector<float>> memory;  // what parts point to
  std::vector<std::vector<Part>> parts;    // per rank

  /// Adds the region of an F32 tensor to a rank's parts.
  void add(std::size_t rank, const std::string& name, const std::vector<std::int64_t>& shape,
           const Region& region, float seed) {
    if (parts.size() <= rank) parts.resize(rank + 1);
    memory.push_back(values(shape, region, seed));
    Part part;
    part.name = name;
    part.shape = shape;
    part.region = region;
    part.data = reinterpret_cast<const std::byte*>(memory.back().data());
    parts[rank].push_back(std::move(part));
  }

  static std::vector<float> values(const std::vector<std::int64_t>& shape, const Region& region,
                                   float seed) {
    std::size_t count = 1;
    for (const auto length : region.lengths) count *= static_cast<std::size_t>(length);
    std::vector<float> result(count);
    for (std::size_t i = 0; i < count; ++i) {
      std::size_t rest = i;
      std::int64_t place = 0;
      std::int64_t stride = 1;
      for (std::size_t d = shape.size(); d-- > 0;) {
        const auto length = static_cast<std::size_t>(region.lengths[d]);
        place += (region.offsets[d] + static_cast<std::int64_t>(rest % length)) * stride;
        rest /= length;
        stride *= shape[d];
      }
      result[i] = seed + static_cast<float>(place);
    }
    return result;
  }
};

/// Two ranks: a table cut by rows, one by columns, a whole one, a number without dimensions, an
/// empty one.
inline Sample two_ranks(float seed) {
  Sample sample;
  sample.add(0, "rows", {7, 5}, {{0, 0}, {4, 5}}, seed);
  sample.add(1, "rows", {7, 5}, {{4, 0}, {3, 5}}, seed);
  sample.add(0, "columns", {6, 8}, {{0, 0}, {6, 3}}, seed);
  sample.add(1, "columns", {6, 8}, {{0, 3}, {6, 5}}, seed);
  sample.add(0, "whole.weight", {3, 4}, {{0, 0}, {3, 4}}, seed);
  sample.add(1, "scalar", {}, {{}, {}}, seed);
  sample.add(1, "empty", {0, 3}, {{0, 0}, {0, 3}}, seed);
  return sample;
}

inline Manifest save_sample(const std::string& root, std::int64_t step, int keep = 0,
                            Disk& disk = Disk::real()) {
  const Sample sample = two_ranks(static_cast<float>(1000 * step));
  return save_parts(root, step, sample.parts, {{"seed", std::int64_t{7}}, {"lr", 0.1}}, keep, disk);
}

/// Reads every tensor of a sample's checkpoint and compares it with what was saved.
inline void expect_sample(const Reader& reader) {
  const auto seed = static_cast<float>(1000 * reader.manifest().step);
  const auto tensors = reader.tensors();
  ASSERT_EQ(tensors.size(), 5U);
  for (const TensorInfo& tensor : tensors) {
    const Region whole{std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape};
    const std::vector<float> expected = Sample::values(tensor.shape, whole, seed);
    std::vector<float> got(expected.size());
    reader.read(tensor.name, whole, reinterpret_cast<std::byte*>(got.data()));
    EXPECT_EQ(got, expected) << tensor.name;
  }
}

/// The text that `body` throws; empty if it does not.
template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::checkpoint::testing
