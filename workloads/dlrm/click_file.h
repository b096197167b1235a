// dlrm/click_file.h — Tessera's binary click log: memory-mapped, checked, versioned. No LibTorch.
//
// The format is described in docs/dlrm.md. Blocks of samples, each feature by feature, so that a
// batch is one copy per feature; a directory with the CRC-32C of every block; a header with sizes,
// version and the CRC-32C of itself and of the directory. Little-endian.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dlrm/click_log.h"

namespace tessera::workloads::dlrm {

/// The newest version of the format. A log of a schema without names of dense numbers, means and
/// origin has version 1, one without tables that grow or have columns of their own at most 2.
inline constexpr std::uint32_t kClickFileVersion = 3;

struct ClickFileOptions {
  /// Store dense numbers in 16 bits.
  bool half_dense = false;
  std::int64_t block_samples = 65536;
};

/// One block, as the directory describes it.
struct ClickFileBlock {
  std::uint64_t begin = 0;
  std::uint64_t num_bytes = 0;
  std::uint32_t num_samples = 0;
  std::uint32_t crc = 0;
};

/// What header and directory say.
struct ClickFileLayout {
  ClickSchema schema;
  std::uint32_t version = 1;
  bool half_dense = false;
  std::int64_t num_samples = 0;
  std::int64_t block_samples = 0;
  std::vector<ClickFileBlock> blocks;
};

/// Reads header and directory of a file of these bytes. Throws DataError beginning with `name` for
/// anything that is not such a file, of another version, cut short, or damaged.
ClickFileLayout decode_click_file(std::string_view bytes, const std::string& name);

/// Writes a file; it appears under its name only when `finish` has returned.
class TESSERA_API ClickFileWriter {
 public:
  /// Throws DataError if the file cannot be made.
  ClickFileWriter(const std::string& path, const ClickSchema& schema,
                  const ClickFileOptions& options = {});
  /// Leaves nothing behind if `finish` was not called.
  ~ClickFileWriter();
  ClickFileWriter(const ClickFileWriter&) = delete;
  ClickFileWriter& operator=(const ClickFileWriter&) = delete;

  /// Appends samples. Throws DataError for ids outside their table, bags of another size than the
  /// schema says, labels other than 0 and 1, and if the disk refuses.
  void append(const SampleBlock& samples);
  /// Throws DataError for a log without samples, which may be appended then.
  void finish();
  std::int64_t num_samples() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A file, mapped. Opening checks the header, the directory and the lengths, not the blocks.
class TESSERA_API ClickFile : public ClickLog {
 public:
  /// Throws DataError.
  explicit ClickFile(const std::string& path);
  ~ClickFile() override;

  const ClickSchema& schema() const noexcept override { return layout_.schema; }
  std::int64_t num_samples() const noexcept override { return layout_.num_samples; }
  /// Ids are checked against their table while they are copied: throws DataError for damage.
  void read(std::int64_t first, std::int64_t count, SampleBlock& block) const override;
  /// Where bags vary, only the file itself knows where ids lie; it is then left to the system.
  void expect(std::int64_t first, std::int64_t count) const override;

  const ClickFileLayout& layout() const noexcept { return layout_; }
  std::uint64_t num_bytes() const noexcept;
  /// Reads every byte and compares every sum. Throws DataError naming the first bad block.
  void verify() const;

 private:
  struct Mapping;
  std::string path_;
  std::unique_ptr<const Mapping> mapping_;
  ClickFileLayout layout_;
};

}  // namespace tessera::workloads::dlrm
