// checkpoint/open_file.h — opening what may come from a stranger: plain files of one folder only.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

/// A file descriptor that is closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

/// A folder, open for reading. What is opened in it is of this folder, also when another one takes
/// its name meanwhile.
class OpenFolder {
 public:
  /// Opens `path`, which may be a link only if `follows`. Throws Error(kMissing or kCorrupt).
  explicit OpenFolder(const std::string& path, bool follows = false);
  /// Opens the folder `name` in `parent`, never following a link.
  OpenFolder(const OpenFolder& parent, const std::string& name);

  const std::string& path() const noexcept { return path_; }
  int fd() const noexcept { return fd_.get(); }
  /// Whether `name` in `parent` is no longer this folder.
  bool is_replaced(const OpenFolder& parent, const std::string& name) const;

 private:
  OpenFolder(int parent, const std::string& name, std::string path, int flags);

  std::string path_;
  Descriptor fd_;
};

/// A regular file, open for reading.
class OpenFile {
 public:
  /// Opens `name` in `folder`. Refuses names with a slash, links, anything but a regular file, and
  /// files of other users that have a second name elsewhere. Throws Error(kMissing or kCorrupt).
  OpenFile(const OpenFolder& folder, const std::string& name);

  const std::string& path() const noexcept { return path_; }
  std::uint64_t num_bytes() const noexcept { return num_bytes_; }

  /// Reads exactly these bytes. Throws Error(kCorrupt) if the file ends before, or cannot be read.
  void read(std::uint64_t begin, void* data, std::size_t num_bytes) const;
  /// Tells the kernel that these bytes are wanted soon.
  void expect(std::uint64_t begin, std::uint64_t num_bytes) const;

 private:
  std::string path_;
  Descriptor fd_;
  std::uint64_t num_bytes_ = 0;
};

/// Reads a whole file of at most `max_bytes`.
std::string read_small_file(const OpenFolder& folder, const std::string& name,
                            std::uint64_t max_bytes);

/// Reads and checks the manifest of a folder; not the files it lists.
Manifest read_manifest(const OpenFolder& folder);
Manifest read_manifest(const std::string& folder);

/// The commit that the manifest of a folder claims, without reading more than its beginning; 0 if
/// it has none, -1 if it cannot be read.
std::int64_t read_commit(const OpenFolder& parent, const std::string& folder);

/// Reads and checks the header of a safetensors file.
FileHeader read_header(const OpenFile& file);

}  // namespace tessera::checkpoint
