// Binary click logs and lines of text: any bytes are read without harm, and what is accepted keeps
// its promises.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>

#include "dlrm/click_file.h"
#include "dlrm/criteo.h"
#include "tessera/checkpoint/checksum.h"

using namespace tessera::workloads::dlrm;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// No fuzzer guesses the sums: puts the right ones in, so that the meaning is checked.
std::string with_sums(std::string bytes) {
  if (bytes.size() < 64) return bytes;
  std::uint64_t directory = 0;
  std::memcpy(&directory, bytes.data() + 40, 8);
  if (directory < bytes.size()) {
    const std::uint64_t num_bytes = bytes.size() - directory;
    std::memcpy(bytes.data() + 48, &num_bytes, 8);
    const auto sum = tessera::checkpoint::crc32c(bytes.data() + directory, num_bytes);
    std::memcpy(bytes.data() + 56, &sum, 4);
  }
  const auto sum = tessera::checkpoint::crc32c(bytes.data(), 60);
  std::memcpy(bytes.data() + 60, &sum, 4);
  return bytes;
}

void try_layout(const std::string& bytes) {
  try {
    const ClickFileLayout layout = decode_click_file(bytes, "f");
    std::int64_t samples = 0;
    for (const ClickFileBlock& block : layout.blocks) {
      require(block.begin + block.num_bytes <= bytes.size());
      samples += block.num_samples;
    }
    require(samples == layout.num_samples);
  } catch (const DataError&) {
  }
}

void try_file(const std::string& bytes) {
  const int fd = ::memfd_create("click", MFD_CLOEXEC);
  if (fd < 0) return;
  const bool is_written =
      ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size());
  try {
    if (is_written) {
      const ClickFile file("/proc/self/fd/" + std::to_string(fd));
      SampleBlock samples;
      const std::int64_t count = std::min<std::int64_t>(file.num_samples(), 1000);
      file.read(0, count, samples);
      require(std::accumulate(samples.lengths.begin(), samples.lengths.end(), std::int64_t{0}) ==
              static_cast<std::int64_t>(samples.ids.size()));
      for (const std::int64_t id : samples.ids) require(id >= 0);
    }
  } catch (const DataError&) {
  }
  ::close(fd);
}

void try_line(std::string_view line) {
  static const auto kFeatures = equal_features(kCriteoFeatures, 1000);
  float label = -1;
  float dense[kCriteoDense];
  std::int64_t ids[kCriteoFeatures];
  if (!parse_criteo_line(line, kFeatures, label, dense, ids).empty()) return;
  require(label == 0 || label == 1);
  for (const std::int64_t id : ids) require(id >= 0 && id < 1000);
  for (const float number : dense) require(number >= 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try_layout(bytes);
  const std::string repaired = with_sums(bytes);
  try_layout(repaired);
  try_file(repaired);
  try_line(bytes);
  return 0;
}
