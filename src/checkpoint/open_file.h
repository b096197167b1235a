// checkpoint/open_file.h — opening what may come from a stranger: plain files of one folder only.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

/// A regular file, open for reading.
class OpenFile {
 public:
  OpenFile() = default;
  /// Opens `folder`/`name`. Refuses names with a slash, links, anything but a regular file, and
  /// files of other users that have a second name elsewhere. Throws Error(kMissing or kCorrupt).
  OpenFile(const std::string& folder, const std::string& name);
  OpenFile(OpenFile&& other) noexcept
      : path_(std::move(other.path_)),
        fd_(std::exchange(other.fd_, -1)),
        num_bytes_(other.num_bytes_) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(fd_, other.fd_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  ~OpenFile();

  bool is_open() const noexcept { return fd_ >= 0; }
  const std::string& path() const noexcept { return path_; }
  std::uint64_t num_bytes() const noexcept { return num_bytes_; }

  /// Reads exactly these bytes. Throws Error(kCorrupt) if the file ends before, or cannot be read.
  void read(std::uint64_t begin, void* data, std::size_t num_bytes) const;
  /// Tells the kernel that these bytes are wanted soon.
  void expect(std::uint64_t begin, std::uint64_t num_bytes) const;

 private:
  std::string path_;
  int fd_ = -1;
  std::uint64_t num_bytes_ = 0;
};

/// Reads a whole file of at most `max_bytes`.
std::string read_small_file(const std::string& folder, const std::string& name,
                            std::uint64_t max_bytes);

/// Reads and checks the manifest of a folder; not the files it lists.
Manifest read_manifest(const std::string& folder);

/// The commit that the manifest of a folder claims, without reading more than its beginning; 0 if
/// it has none, -1 if it cannot be read.
std::int64_t read_commit(const std::string& folder);

/// Reads and checks the header of a safetensors file.
FileHeader read_header(const OpenFile& file);

}  // namespace tessera::checkpoint
