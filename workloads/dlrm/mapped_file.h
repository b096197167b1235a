// dlrm/mapped_file.h — a file as bytes in memory.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::workloads::dlrm {

/// A regular file, mapped for reading until it is destroyed. If somebody cuts the file short
/// meanwhile, the next read of the lost bytes ends the process with exit code 65 and one line that
/// names the file and both sizes.
class MappedFile {
 public:
  /// Throws DataError naming the file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const noexcept { return {data_, num_bytes_}; }

  /// Asks the system to bring these bytes into memory, and does not wait for it.
  void fetch(std::size_t begin, std::size_t count) const noexcept;

 private:
  const char* data_ = nullptr;
  std::size_t num_bytes_ = 0;
  int fd_ = -1;
  int place_ = -1;  // in the list of those that a signal may be about
};

}  // namespace tessera::workloads::dlrm
